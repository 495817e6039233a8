"""Arguments of scripts.benchmarks.hosts for each measure, and the names to choose from."""

import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from common.cli import Arguments, Text, nearest, parse
from common.planner.conditions import CONDITIONS

MODULE = "scripts.benchmarks.hosts"
Row = dict[str, object]
EMULATED_RATE = "200"  # Mbit/s
LAYOUTS, NUMBERS = (rf"^{x}(,{x})*$" for x in (r"([1-9]|[1-5]\d|60)x[1-9]\d*", r"\d*\.?\d+"))  # at most 60 hosts
MODELS = ("gpt_5m", "gpt_30m", "digits_resnet")
BETWEEN = "_between_hosts"  # complete inside hosts
AVERAGES = ("allreduce", "complete", "one_peer_exponential", f"one_peer_exponential{BETWEEN}")
AVERAGES += ("aer", "one_peer_ring", "ring")
# (engine, topology) of measure=step. Topologies have their engines' names; for ours see `engines.gossip`.
OF_SEVERAL_RANKS = [("decent_dp", "alternating-exp-ring"), ("ours", "one_peer_exponential/between_hosts")]  # on a host
OF_SEVERAL_RANKS += [("ours", "one_peer_ring/staggered"), ("ours", "hypercube/staggered")]
CASES = [("alone", "torch"), ("alone", "fused"), ("ddp", "complete")]
CASES += [("decent_dp", "complete"), ("decent_dp", "ring"), ("decent_dp", "one-peer-exp")]
CASES += [("ours", "complete"), ("ours", "one_peer_ring"), ("ours", "hypercube"), ("ours", "one_peer_exponential")]
CASES += [*OF_SEVERAL_RANKS, ("ours", "aer"), ("ours", "aer/staggered")]
CASES += [("ours_local", "aer/1000/1"), ("ours_local", "aer/staggered/4/4"), ("ours_local", "aer/staggered/10/4")]
CASES += [("ours_torch", "complete"), ("ours_torch", "aer/staggered")]
ENGINES, TOPOLOGIES = (tuple(dict.fromkeys(names)) for names in zip(*CASES, strict=True))


class Method(NamedTuple):
    """A curve of Figure 6, or a row of the ablation; engine and topology: see `engines.engine_of`."""

    label: str
    engine: str
    topology: str
    bucket_mb: float | None = None
    accumulation_steps: int = 1


METHODS = {
    "allreduce": Method("AllReduce", "allreduce", "complete"),
    "allreduce_fp16": Method("AllReduce, fp16 gradients", "allreduce", "complete/fp16"),
    "sgp_exp": Method("SGP (Exp)", "ours", "one_peer_exponential/push_sum"),
    "decent_exp": Method("Decent (Exp)", "ours", "one_peer_exponential"),
    "decent_exp_hypercube": Method("Decent (Exp, hypercube)", "ours", "hypercube"),  # decent-dp's "one-peer-exp"
    "decent_aer": Method("Decent (AER)", "ours", "aer"),
    "decent_exp_between_hosts": Method("Decent (Exp between hosts)", "ours", "one_peer_exponential/between_hosts"),
    "decent_aer_staggered": Method("Decent (AER, staggered)", "ours", "aer/staggered"),
    # For the ablation: without overlap, gradients leave in one bucket, and gossip adapts, then combines.
    "allreduce_no_overlap": Method("AllReduce, no overlap", "allreduce", "complete", bucket_mb=1000.0),
    "decent_aer_no_overlap": Method("Decent (AER), no overlap", "ours", "aer/atc"),
}
METHODS |= {
    f"{name}_accumulated": METHODS[name]._replace(label=f"{METHODS[name].label}, accumulated", accumulation_steps=8)
    for name in ("allreduce", "allreduce_no_overlap", "decent_aer", "decent_aer_no_overlap")
}


def _check_names(known: Collection[str], text: str) -> str:
    for name in text.split(","):
        if name not in known:
            raise ValueError(f"{name!r}: {nearest(name, known)}")
    return text


def names_of(known: Collection[str]) -> Any:
    """Return the type of a text with some of these names, separated by commas."""
    return Annotated[Text, AfterValidator(partial(_check_names, known))]


class HostsArguments(Arguments):
    """Command line of scripts.benchmarks.hosts; measure=... --help shows the other keys of each."""

    measure: Literal["averaging", "scaling", "step"] = Field(
        description="averaging without training (Table 1), scaling at a fixed global batch (Figure 6), or a step "
        "of several data-parallel engines side by side"
    )
    layouts: Text = Field("4x2", pattern=LAYOUTS, description="HOSTSxRANKS_PER_HOST,... to emulate")
    mbit_per_s: Text | None = Field(
        None, pattern=NUMBERS, description=f"RATE,... of emulated hosts (null: {EMULATED_RATE}); elsewhere only noted"
    )
    delay_ms: NonNegativeFloat = Field(1.0, description="one-way delay between emulated hosts")
    limit_s: PositiveFloat = Field(3600, description="seconds after which emulated hosts are stopped")
    output: Text = Field("results/benchmarks", description="folder for the table, as .csv and .md")
    rows: Text | None = Field(None, description="file that passes the workers' rows to the process that started them")


class AveragingArguments(HostsArguments):
    """measure=averaging."""

    name: ClassVar[str] = "communication"  # of the table's files
    topologies: names_of(AVERAGES) = Field(",".join(AVERAGES), description="topologies to measure")
    iterations: PositiveInt = Field(20, description="timed iterations; the paper has 8196")
    tensors: PositiveInt = Field(3, description="tensors averaged per iteration")
    tensor_mb: PositiveFloat = Field(25.0, description="MB (1e6 bytes) per tensor")


class ScalingArguments(HostsArguments):
    """measure=scaling."""

    layouts: Text = Field("2x2,4x2,8x2", pattern=LAYOUTS, description="HOSTSxRANKS_PER_HOST,...")
    methods: names_of(METHODS) = Field(
        "allreduce,sgp_exp,decent_exp,decent_exp_hypercube,decent_aer", description=f"some of {', '.join(METHODS)}"
    )
    compute_ms: PositiveFloat = Field(2400, description="forward and backward pass of the global batch on one worker")
    payload_mb: PositiveFloat = Field(5, description="MB (1e6 bytes) of parameters, up to rounding")
    bucket_mb: PositiveFloat = Field(1, description="MiB per message, for all methods")
    name: Text = Field("scaling", pattern=r"^[a-z0-9_]+$", description="name of the table's files")
    steps: PositiveInt = Field(12, description="steps per block; a multiple of the topologies' periods")
    blocks: PositiveInt = Field(5, ge=2, description="timed blocks, after an untimed one")


class StepArguments(HostsArguments):
    """measure=step."""

    layouts: Text = Field("8x1,4x2", pattern=LAYOUTS, description="HOSTSxRANKS_PER_HOST,...")
    models: names_of(MODELS) = Field("gpt_5m", description=f"some of {', '.join(MODELS)}")
    compute_ms: Text = Field("400,1200", pattern=NUMBERS, description="emulated compute time; 0: real computation")
    conditions: names_of(CONDITIONS) = Field(
        "even", description=f"how unevenly ranks compute: some of {', '.join(CONDITIONS)}"
    )
    engines: names_of(ENGINES) = Field(",".join(ENGINES), description="engines to measure")
    topologies: names_of(TOPOLOGIES) | None = Field(
        None, description="topologies to measure, by their engines' names; null: all"
    )
    bucket_mb: PositiveFloat = Field(2, description="MiB per message, for our engines")
    peers_bucket_mb: PositiveFloat = Field(5, description="MiB per message, for DDP and decent-dp")
    steps: PositiveInt = Field(12, description="steps per round; a multiple of the schedules' periods")
    rounds: PositiveInt = Field(2, description="timed rounds")
    limit_s: PositiveFloat = Field(1800, description="seconds after which an engine is given up")
    again: bool = Field(False, description="measure again what the table already holds")
    name: Text = Field("parallel", pattern=r"^[a-z0-9_]+$", description="name of the table's files")

    def bucket_of(self, engine: str) -> float:
        """Return the size of the engine's messages, in MiB."""
        return self.bucket_mb if engine.startswith("ours") else self.peers_bucket_mb


KINDS = {"averaging": AveragingArguments, "scaling": ScalingArguments, "step": StepArguments}


def read(argv: Sequence[str]) -> HostsArguments:
    """Return the arguments of the measure that the command line names. Raises UsageError."""
    chosen = re.findall(r"^(?:--)?measure[=\n](.*)", "\n".join(argv), re.MULTILINE)  # --measure X, too
    kind = KINDS.get(chosen[-1] if chosen else "", HostsArguments)
    return parse(kind, argv, MODULE, "Measure on several hosts, emulated or provided by a launcher.")
