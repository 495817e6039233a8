"""Arguments of scripts.benchmarks.hosts: those of each measure, and the names that they choose among."""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from common.cli import Arguments, Text, UsageError, nearest, parse
from common.planner.conditions import CONDITIONS

MODULE = "scripts.benchmarks.hosts"
Row = dict[str, object]
EMULATED_RATE = "200"  # Mbit/s
NUMBERS = r"^[\d.]+(,[\d.]+)*$"
ENGINES = ("alone", "ddp", "decent_dp", "ours_torch", "ours_local", "ours")
MODELS = ("gpt_5m", "gpt_30m", "digits_resnet")
BETWEEN, STAGGERED = "_between_hosts", "_staggered"  # inside hosts complete; every second bucket in another order
GOSSIP = ("complete", "one_peer_exponential", "aer", "one_peer_ring", "ring")
GOSSIP += ("static_exponential", "hypercube", "torus", "grid")
AVERAGES = ("allreduce", *GOSSIP, f"aer{STAGGERED}", f"one_peer_exponential{BETWEEN}", f"one_peer_ring{BETWEEN}")


class Method(NamedTuple):
    """A curve of Figure 6, or a row of the ablation; topology: with options, see `engines.gossip`."""

    label: str
    topology: str
    all_reduces: bool = False
    bucket_mb: float | None = None
    accumulation_steps: int = 1


METHODS = {
    "allreduce": Method("AllReduce", "complete", all_reduces=True),
    "sgp_exp": Method("SGP (Exp)", "one_peer_exponential/push_sum"),
    "decent_exp": Method("Decent (Exp)", "one_peer_exponential"),
    "decent_exp_hypercube": Method("Decent (Exp, hypercube)", "hypercube"),  # the authors' library's "one-peer-exp"
    "decent_aer": Method("Decent (AER)", "aer"),
    "decent_exp_between_hosts": Method("Decent (Exp between hosts)", "one_peer_exponential/between_hosts"),
    "decent_aer_staggered": Method("Decent (AER, staggered)", "aer/staggered"),
    # The ablation's: without overlap, gradients leave in one bucket, and gossip adapts then combines.
    "allreduce_no_overlap": Method("AllReduce, no overlap", "complete", all_reduces=True, bucket_mb=1000.0),
    "decent_aer_no_overlap": Method("Decent (AER), no overlap", "aer/atc"),
}
METHODS |= {
    f"{name}_accumulated": METHODS[name]._replace(label=f"{METHODS[name].label}, accumulated", accumulation_steps=8)
    for name in ("allreduce", "allreduce_no_overlap", "decent_aer", "decent_aer_no_overlap")
}


class HostsArguments(Arguments):
    """Command line of scripts.benchmarks.hosts; measure=... --help shows the other keys of each."""

    measure: Literal["averaging", "scaling", "step"] = Field(
        description="averaging without training (Table 1), scaling at a fixed global batch (Figure 6), or the step of "
        "engines of data parallelism beside each other"
    )
    layouts: Text = Field("4x2", pattern=r"^\d+x\d+(,\d+x\d+)*$", description="HOSTSxRANKS_PER_HOST,... to emulate")
    mbit_per_s: Text | None = Field(
        None, pattern=NUMBERS, description=f"RATE,... of emulated hosts, {EMULATED_RATE} if none; else only noted"
    )
    delay_ms: NonNegativeFloat = Field(1.0, description="one-way, between emulated hosts")
    limit_s: PositiveFloat = Field(3600, description="seconds after which emulated hosts are ended")
    output: Text = Field("results/benchmarks", description="where the table is written, as .csv and .md")
    rows: Text | None = Field(None, description="where workers leave their rows for the process that started them")


class AveragingArguments(HostsArguments):
    """measure=averaging."""

    topologies: Text = Field(
        "allreduce,complete,one_peer_exponential,one_peer_exponential_between_hosts,aer,one_peer_ring,ring",
        description=f"names among {', '.join(AVERAGES)}",
    )
    iterations: PositiveInt = Field(20, description="timed ones; the paper has 8196")
    tensors: PositiveInt = Field(3, description="averaged in an iteration")
    tensor_mb: PositiveFloat = Field(25.0, description="MB (1e6 bytes) of each")
    bucket_mb: PositiveFloat | None = Field(None, description="MiB per message of gossip; none: a tensor")

    @property
    def name(self) -> str:
        """Of the table's files."""
        return "communication"


class ScalingArguments(HostsArguments):
    """measure=scaling."""

    layouts: Text = Field("2x2,4x2,8x2", pattern=r"^\d+x\d+(,\d+x\d+)*$", description="HOSTSxRANKS_PER_HOST,...")
    methods: Text = Field(
        "allreduce,sgp_exp,decent_exp,decent_exp_hypercube,decent_aer", description=f"names among {', '.join(METHODS)}"
    )
    compute_ms: NonNegativeFloat = Field(
        2400, description="forward and backward of the whole global batch on one worker, emulated; 0: real ones"
    )
    jitter: NonNegativeFloat = Field(
        0, le=1, description="coefficient of variation of a step's compute time (lognormal): 0.05 is 5 %"
    )
    slow_host: Text | None = Field(
        None, pattern=r"^\d+@[\d.]+$", description="HOST@FACTOR: this host, from 1, computes FACTOR times slower"
    )
    samples: PositiveInt = Field(1024, description="the global batch of compute_ms=0")
    payload_mb: PositiveFloat = Field(5, description="MB (1e6 bytes) of parameters, up to rounding")
    bucket_mb: PositiveFloat = Field(1, description="MiB per message, of all methods")
    name: Text = Field("scaling", pattern=r"^[a-z0-9_]+$", description="of the table's files")
    steps: PositiveInt = Field(12, description="of a block; a multiple of the topologies' periods")
    blocks: PositiveInt = Field(5, ge=2, description="that are timed, after one that is not")


class StepArguments(HostsArguments):
    """measure=step."""

    layouts: Text = Field("8x1,4x2", pattern=r"^\d+x\d+(,\d+x\d+)*$", description="HOSTSxRANKS_PER_HOST,...")
    models: Text = Field("gpt_5m", description=f"of {', '.join(MODELS)}")
    compute_ms: Text = Field("400,1200", pattern=NUMBERS, description="of a step, emulated; 0: really computed")
    conditions: Text = Field("even", description=f"how unevenly ranks compute: of {', '.join(CONDITIONS)}")
    engines: Text = Field(",".join(ENGINES), description="which to measure")
    topologies: Text | None = Field(None, description="which to measure, under their engines' names; none: all")
    bucket_mb: PositiveFloat = Field(2, description="of our messages, in MiB")
    peers_bucket_mb: PositiveFloat = Field(5, description="of DDP's and decent-dp's")
    steps: PositiveInt = Field(12, description="of a round: a multiple of the schedules' periods")
    rounds: PositiveInt = Field(2, description="that are timed")
    limit_s: PositiveFloat = Field(1800, description="an engine that takes longer is given up")
    again: bool = Field(False, description="measure what the table holds too")
    name: Text = Field("parallel", pattern=r"^[a-z0-9_]+$", description="of the table's files")

    def bucket_of(self, engine: str) -> float:
        """Return the size of the engine's messages, in MiB."""
        return self.bucket_mb if engine.startswith("ours") else self.peers_bucket_mb


KINDS = {"averaging": AveragingArguments, "scaling": ScalingArguments, "step": StepArguments}


def read(argv: Sequence[str]) -> HostsArguments:
    """Return the arguments of the measure that the command line names. Raises UsageError."""
    chosen = [word.partition("=")[2] for word in argv if word.startswith("measure=")]
    kind = KINDS.get(chosen[-1] if chosen else "", HostsArguments)
    arguments = parse(kind, argv, MODULE, "Measure on several hosts, emulated ones or a launcher's.")
    if isinstance(arguments, AveragingArguments):
        check_names(arguments, "topologies", AVERAGES)
    elif isinstance(arguments, ScalingArguments):
        check_names(arguments, "methods", METHODS)
        if not arguments.compute_ms and (arguments.jitter or arguments.slow_host):
            raise UsageError("compute_ms=0: jitter and slow_host are of emulated computing")
    return arguments


def check_names(arguments: HostsArguments, key: str, known: Collection[str]) -> None:
    """Raise UsageError for the first of the key's names that is not known."""
    text = getattr(arguments, key) or ""
    for name in filter(None, text.split(",")):
        if name not in known:
            raise UsageError(f"{key}={text}: {name!r}: {nearest(name, known)}")
