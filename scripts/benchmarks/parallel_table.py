"""The table of scripts.benchmarks.parallel: columns, order of rows, ratios, and what it says above them."""

from collections.abc import Iterable, Iterator, Mapping

import pandas as pd

from common.runtime.conditions import CONDITIONS

COLUMNS = {
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
FORMATS = dict.fromkeys(WHOLE, ".0f")
FORMATS |= dict.fromkeys(("ratio_to_ddp", "ratio_to_decent_dp"), ".3f") | {"waited_ms": ".1f"}
FORMATS |= dict.fromkeys(("mbit_per_s", "compute_ms", "delay_ms", "bucket_mb"), "g")
# What decent-dp calls the topology that each of ours is compared with.
PEERS = {
    "complete": "complete",
    "one_peer_ring": "ring",
    "one_peer_exponential": "one-peer-exp",
    "hypercube": "one-peer-exp",
    "aer": "alternating-exp-ring",
}
CASE = ["model", "hosts", "ranks_per_host", "mbit_per_s", "compute_ms", "condition"]  # ratios are taken within it
KEY = [*CASE, "engine", "topology"]  # one row of the table


def cases(ranks_per_host: int) -> Iterator[tuple[str, str]]:
    """Yield the pairs (engine, topology) that are compared on such hosts."""
    yield from [("alone", "torch"), ("alone", "fused"), ("ddp", "complete")]
    yield from [("decent_dp", "complete"), ("decent_dp", "ring"), ("decent_dp", "one-peer-exp")]
    yield from [
        ("ours", "complete"),
        ("ours", "one_peer_ring"),
        ("ours", "hypercube"),
        ("ours", "one_peer_exponential"),
    ]
    if ranks_per_host > 1:
        yield from [("decent_dp", "alternating-exp-ring"), ("ours", "one_peer_exponential/between_hosts")]
        yield from [("ours", "one_peer_ring/staggered"), ("ours", "hypercube/staggered")]
    yield from [("ours", "aer"), ("ours", "aer/staggered")]
    yield from [("ours_local", f"aer/{plan}") for plan in ("1000/1", "staggered/4/4", "staggered/10/4")]
    yield from [("ours_torch", "complete"), ("ours_torch", "aer/staggered")]


def table(rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    """Return the rows with their ratios; engines in the order of `cases`."""
    order = [(engine, topology) for engine, topology in cases(ranks_per_host=2)]
    frame = pd.DataFrame(sorted(rows, key=lambda row: order.index((row["engine"], row["topology"]))))
    frame["wire_ms"] = frame.bytes_per_host * 8 / frame.mbit_per_s / 1e3

    def compared(row: pd.Series, engine: str, topology: str | None) -> float:
        same = (frame[CASE] == row[CASE]).all(axis=1) & (frame.engine == engine) & (frame.topology == topology)
        return frame[same].step_ms.item() if same.any() else float("nan")

    for index, row in frame.iterrows():
        optimizer = "fused" if row.engine in ("ours", "ours_local") or row.topology == "fused" else "torch"
        frame.loc[index, "exposed_ms"] = row.step_ms - compared(row, "alone", optimizer)
        frame.loc[index, "ratio_to_ddp"] = row.step_ms / compared(row, "ddp", "complete")
        peer = PEERS.get(row.topology.split("/")[0]) if row.engine.startswith("ours") else None
        frame.loc[index, "ratio_to_decent_dp"] = row.step_ms / compared(row, "decent_dp", peer)
    return frame.sort_values(CASE, kind="stable")


def conclude(frame: pd.DataFrame, module: str) -> list[str]:
    """Return what `module` measured, the fastest topology of every cluster, and memory and start beside decent-dp's."""
    findings = [*fastest(frame), *beside_decent_dp(frame)]
    return [
        "Emulated hosts on one machine (network namespaces, rate-limited links, "
        f"{frame.delay_ms.iloc[0]:g} ms from host to host), gloo, AdamW: torch's for the others, ours fused for "
        "`ours`, which merges and updates in one pass.",
        f"Each row is what `python -m {module} layouts=HOSTSxRANKS mbit_per_s=RATE models=MODEL compute_ms=MS "
        "conditions=CONDITION engines=ENGINE topologies=TOPOLOGY output=FOLDER` measures with the row's values, at its "
        "commit.",
        *(["\n".join(f"- {finding}" for finding in findings)] if findings else []),
    ]


def fastest(frame: pd.DataFrame) -> Iterator[str]:
    """Yield the fastest row of `ours` on each cluster with its ratios."""
    ours = frame[frame.engine == "ours"]
    for (model, hosts, ranks, rate, compute_ms, condition), rows in ours.groupby(CASE, sort=False):
        best = rows.loc[rows.step_ms.idxmin()]
        times = {"DDP's": best.ratio_to_ddp, "decent-dp's on the same topology": best.ratio_to_decent_dp}
        ratios = [f"{ratio:.3f} of {name}" for name, ratio in times.items() if pd.notna(ratio)]
        case = f"{model}, {hosts}x{ranks}, {rate:g} Mbit/s, {compute_ms:g} ms"
        case += "" if condition == "even" else f", {CONDITIONS[condition].label}"
        yield ", ".join([f"{case}: ours is fastest on {best.topology}, {best.step_ms:.0f} ms a step", *ratios])


def beside_decent_dp(frame: pd.DataFrame) -> Iterator[str]:
    """Yield memory and start of ours in terms of decent-dp's at each rate: medians over topologies."""
    names = {"peak_mb": "peak memory", "startup_s": "start", "ready_s": "ready"}
    started = frame[frame.startup_s.notna()].astype(dict.fromkeys(names, float))
    for (model, hosts, ranks, rate), rows in started.groupby(["model", "hosts", "ranks_per_host", "mbit_per_s"]):
        cluster = f"{model}, {hosts}x{ranks}, {rate:g} Mbit/s"
        medians = rows.groupby("engine")[[*names]].median()
        for engine in ("ours", "ours_torch"):
            if {engine, "decent_dp"} <= set(medians.index):
                known = (medians.loc[engine] / medians.loc["decent_dp"]).dropna()
                ratios = ", ".join(f"{names[column]} {ratio:.3f}" for column, ratio in known.items())
                yield f"{cluster}, {engine}: {ratios} of decent-dp's (medians over topologies)"
