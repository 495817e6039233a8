"""The tables of scripts.benchmarks.hosts: their columns, ratios, and the text above them."""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from common.planner.conditions import CONDITIONS
from scripts.benchmarks.arguments import BETWEEN, CASES, MODULE

PLACE = {
    "workers": "processes",
    "hosts": "machines, or emulated ones",
    "ranks_per_host": "processes of each",
    "mbit_per_s": "of a host's link in both directions, as set (emulated) or as given",
}
AVERAGING = {
    "topology": f"allreduce: torch.distributed.all_reduce; others: rounds of gossip by this engine (*{BETWEEN}: that "
    "topology over hosts, complete inside)",
    **PLACE,
    "backend": "of torch.distributed",
    "iterations": "timed ones",
    "tensors": "what is averaged in each",
    "seconds": "of all iterations, on the slowest rank",
    "seconds_per_iteration": "seconds / iterations",
    "bytes_per_host": "that a host's interface sent in an iteration, headers included: mean over hosts; empty where no "
    "interface is named (GLOO_SOCKET_IFNAME)",
}
SCALING = {
    "method": "as the figure names it, if it does; SGP (Exp) runs what Decent (Exp) "
    "runs, as push-sum's weights stay 1 on this graph",
    "engine": "ddp: torch's DistributedDataParallel; ours: this engine",
    "topology": "of the messages; between hosts: that topology over hosts, complete inside",
    **PLACE,
    "payload_mb": "parameters of a worker, fp32",
    "compute": "forward and backward: a wait, or real layers",
    "step_ms": "a step: mean over the steps of a block and over ranks, median over blocks",
    "step_ms_spread": "interquartile range over blocks",
    "bytes_per_host": "that a host's interface sent in a step, headers included: mean over hosts; empty where no "
    "interface is named (GLOO_SOCKET_IFNAME)",
}
STEP = {
    "engine": "alone: no communication, with torch's AdamW or ours; ours: this project's engine with its AdamW; "
    "ours_torch: the same engine with torch's AdamW, as DDP and decent-dp have it; ours_local: the same with local "
    "steps and an outer optimizer",
    "model": "gpt_5m, gpt_30m or digits_resnet",
    "hosts": "emulated",
    "ranks_per_host": "processes on each",
    "mbit_per_s": "rate of each host's link, both ways",
    "compute_ms": "forward and backward, emulated by a wait; 0: really computed, ranks taking turns on the cores",
    "condition": "how unevenly ranks compute: "
    + "; ".join(f"{name}: {condition.label}" for name, condition in CONDITIONS.items()),
    "topology": "under its engine's name; of ours_local with H, the updates in a round, and tau, after how many of the "
    "next one it is merged; with H = 1000 no message travels while it is measured",
    "step_ms": "mean over ranks and the steps of a round, median over the rounds",
    "step_ms_spread": "largest minus smallest round",
    "exposed_ms": "step_ms minus that of `alone` with the same optimizer",
    "waited_ms": "of this, what ranks wait for messages in a step, their mean, where the engine counts it; the rest is "
    "work on the cores, which the emulated hosts share",
    "bytes_per_host": "that left the busiest host in a step, as its interface counts them: one header for each packet "
    "of up to 64 KB, which is cut later",
    "wire_ms": "what these bytes take at the rate of the link; with the headers of all frames 4 % more",
    "payload_mb": "parameters of a rank, in 1e6 bytes",
    "bucket_mb": "of messages, in MiB",
    "peak_mb": "resident memory of the largest rank; of the first compute_ms of a process only, as it never falls",
    "startup_s": "from the start of the slowest process until its first step begins; once for each process",
    "first_step_s": "of the slowest rank; ours compiles its optimizer in it",
    "ready_s": "from the start of the slowest process until the steps are as long as later ones, less what as many of "
    "those take: with all that is put off to the first steps",
    "ratio_to_ddp": "of step_ms to DDP's",
    "ratio_to_decent_dp": "of our step_ms to that of decent-dp on the same topology; below 1 is faster",
    "delay_ms": "one-way, from host to host",
    "steps": "of a round",
    "rounds": "that were timed",
    "machine": "on which the hosts are emulated",
    "date": "of the measurement, UTC",
    "commit": "of the measurement",
}
WHOLE = ("step_ms", "step_ms_spread", "exposed_ms", "bytes_per_host", "wire_ms", "peak_mb", "steps", "rounds")
FORMATS = {
    "averaging": {"seconds_per_iteration": ".4f", "bytes_per_host": ",.0f", "mbit_per_s": ",.0f"},
    "scaling": {"bytes_per_host": ",.0f", "mbit_per_s": ",.0f"},
    "step": dict.fromkeys(WHOLE, ".0f")
    | dict.fromkeys(("ratio_to_ddp", "ratio_to_decent_dp"), ".3f")
    | dict.fromkeys(("mbit_per_s", "compute_ms", "delay_ms", "bucket_mb"), "g")
    | {"waited_ms": ".1f"},
}
COLUMNS = {"averaging": AVERAGING, "scaling": SCALING, "step": STEP}
TITLES = {
    "averaging": "Averaging without training",
    "scaling": "Strong scaling at a fixed global batch",
    "step": "Engines of data parallelism",
}
SAID = {  # above the tables
    "averaging": "Whole iterations: nothing overlaps with them, and a round of gossip does not average over all. "
    "Table 1 of arXiv 2410.11998 has 8,196 iterations on 16 A100 of 4 nodes with 100 Gbit/s InfiniBand, and on 16 A40 "
    "of 4 nodes with 25 Gbit/s Ethernet; its times are not known here.",
    "scaling": "Computing was emulated. The optimizer's step (AccumAdamW, fused; s = 1, or 8 where accumulated) and "
    "messages are real. The published milliseconds, of other machines and another model, are in "
    "results/paper/figure6.yaml. SGP (Exp) does not measure SGP's overhead: the rounds of the exponential graph are "
    "doubly stochastic, push-sum's weights stay 1, and this engine then runs the code of Decent (Exp). The published "
    "SGP takes up to 91 % longer than Decent (Exp): on T4 and A100 by a fixed cost per step, cause unknown.",
    "step": "Emulated hosts on one machine (network namespaces, rate-limited links with a delay), gloo, AdamW: torch's "
    "for the others, ours fused for `ours`, which merges and updates in one pass. Each row is what `python -m "
    f"{MODULE} measure=step layouts=HOSTSxRANKS mbit_per_s=RATE models=MODEL compute_ms=MS conditions=CONDITION "
    "engines=ENGINE topologies=TOPOLOGY output=FOLDER` measures with the row's values, at its commit.",
}
PEERS = {  # the topology of decent-dp that each of ours is compared with
    "complete": "complete",
    "one_peer_ring": "ring",
    "hypercube": "one-peer-exp",
    "one_peer_exponential": "one-peer-exp",
    "aer": "alternating-exp-ring",
}
CASE = ["model", "hosts", "ranks_per_host", "mbit_per_s", "compute_ms", "condition"]  # ratios are taken within it
KEY = [*CASE, "engine", "topology"]  # one row of the table


def table(rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    """Return the rows of measure=step with their ratios; engines in the order of CASES."""
    frame = pd.DataFrame(sorted(rows, key=lambda row: CASES.index((row["engine"], row["topology"]))))
    frame["wire_ms"] = frame.bytes_per_host * 8 / frame.mbit_per_s / 1e3
    step_ms = frame.set_index(KEY).step_ms

    def step_ms_of(engine: str, topology: object) -> np.ndarray:
        """Return for each row the time of another engine in the same case; NaN where it was not measured."""
        other = frame[CASE].assign(engine=engine, topology=topology)
        return step_ms.reindex(pd.MultiIndex.from_frame(other)).to_numpy()

    fused = frame.engine.isin(["ours", "ours_local"]) | (frame.topology == "fused")
    frame["exposed_ms"] = frame.step_ms - step_ms_of("alone", np.where(fused, "fused", "torch"))
    frame["ratio_to_ddp"] = frame.step_ms / step_ms_of("ddp", "complete")
    peers = frame.topology.str.split("/").str[0].map(PEERS).where(frame.engine.str.startswith("ours"))
    frame["ratio_to_decent_dp"] = frame.step_ms / step_ms_of("decent_dp", peers)
    return frame.sort_values(CASE, kind="stable")
