"""The configuration, typed and checked at the door; inside, every key is there and right.

Hydra composes YAML files and command-line overrides; pydantic refuses what is not meant: unknown keys, wrong
types, values out of range, choices that contradict each other.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from common.topology import Topology, build

NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Betas = Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)]


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names key, value and what is expected."""


class Strict(BaseModel):
    """Base of all configuration records: no unknown keys, no conversions, no NaN, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# -- parallel: the method


class AllReduce(Strict):
    """Gradients averaged by DDP over all ranks; ranks_per_worker only says how many of them are counted as one."""

    method: Literal["allreduce"]
    ranks_per_worker: PositiveInt
    bucket_mb: PositiveFloat
    find_unused_parameters: bool
    timeout_s: PositiveFloat


class Decentralized(Strict):
    """Parameters averaged with peers; see DecentralizedDataParallel."""

    method: Literal["decentralized"]
    order: Literal["awc", "atc"]
    ranks_per_worker: PositiveInt
    bucket_mb: PositiveFloat
    transport: Literal["auto", "send_recv", "subgroup"]
    message_dtype: Literal["float16", "bfloat16", "int8"] | None
    phases: Literal["aligned", "staggered"] = "aligned"
    push_sum: bool = False
    find_unused_parameters: bool
    timeout_s: PositiveFloat


Parallel = Annotated[AllReduce | Decentralized, Field(discriminator="method")]


class Workers(Strict):
    """Where the workers live. count: null means the launcher's world size, or one for each GPU (at least one)."""

    kind: Literal["processes", "simulated"]
    count: PositiveInt | None
    per_host: PositiveInt | None


class TopologyChoice(Strict):
    """A name of common.topology.NAMES and that topology's options."""

    model_config = ConfigDict(extra="allow")

    name: str

    def build(self, workers: int, per_host: int) -> Topology:
        """The topology for this many workers; ConfigError if there is none."""
        options = dict(self.model_extra or {})
        try:
            return build(self.name, workers, per_host, **options)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(f"topology={self.name} (workers={workers}, per_host={per_host}): {error}") from error


# -- optimizer and schedule


class OptimizerBase(Strict):
    """Common to all optimizers; decay leaves norms alone (common.optim.decay_groups).

    lr_batch:     lr is meant for a batch of so many samples and scaled linearly to training.batch_size; null: as it is
    decay_biases: whether other layers' biases decay
    """

    lr: PositiveFloat
    lr_batch: PositiveInt | None
    weight_decay: NonNegative
    decay_biases: bool = False


class Sgd(OptimizerBase):
    """torch.optim.SGD."""

    name: Literal["sgd"]
    momentum: Fraction
    nesterov: bool


class Adam(OptimizerBase):
    """torch.optim.Adam or AdamW; fused: one pass over memory."""

    name: Literal["adam", "adamw"]
    betas: Betas
    eps: PositiveFloat
    fused: bool


class AccumAdam(OptimizerBase):
    """common.optim.AccumAdam or AccumAdamW; accumulation_steps is s; fused: one pass over memory, compiled."""

    name: Literal["accumadam", "accumadamw"]
    betas: Betas
    eps: PositiveFloat
    accumulation_steps: PositiveInt
    fused: bool


class DmSgd(OptimizerBase):
    """common.optim.DmSGD."""

    name: Literal["dmsgd"]
    momentum: Fraction
    momentum_mixing: bool


OptimizerChoice = Annotated[Sgd | Adam | AccumAdam | DmSgd, Field(discriminator="name")]


class Constant(Strict):
    """Base of the schedules: a linear warm-up from warmup_start x lr, then lr. Lengths are in `unit`."""

    name: Literal["constant"]
    unit: Literal["steps", "epochs"]
    warmup: NonNegative
    warmup_start: Fraction

    @field_validator("warmup", "milestones", check_fields=False)
    @classmethod
    def _whole_steps(cls, value: float | list[float], info: ValidationInfo) -> float | list[float]:
        lengths = value if isinstance(value, list) else [value]
        if info.data.get("unit") == "steps" and not all(float(length).is_integer() for length in lengths):
            raise ValueError(f"{value}: expected whole numbers with schedule.unit=steps")
        return value


class Cosine(Constant):
    """Half a cosine from lr down to final_fraction x lr at the last step."""

    name: Literal["cosine"]
    final_fraction: Fraction


class InverseSquareRoot(Constant):
    """lr sqrt(warmup / t) after the warm-up."""

    name: Literal["inverse_square_root"]
    warmup: PositiveFloat


class Multistep(Constant):
    """lr times gamma at each milestone."""

    name: Literal["multistep"]
    milestones: list[PositiveFloat]
    gamma: PositiveFloat


Schedule = Annotated[Constant | Cosine | InverseSquareRoot | Multistep, Field(discriminator="name")]


# -- the run


class Training(Strict):
    """How long and how. Exactly one of steps and epochs; batch_size is global, for each update.

    It counts samples, or what the task says that it counts instead (transformer: tokens).
    """

    steps: PositiveInt | None
    epochs: PositiveFloat | None
    batch_size: PositiveInt
    gradient_accumulation: PositiveInt
    clip: PositiveFloat | None
    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool
    device: Literal["auto", "cpu", "cuda"]
    threads: PositiveInt | None
    checkpoint_every: PositiveInt | None
    checkpoints_kept: PositiveInt
    on_nan: Literal["stop", "warn"]

    @model_validator(mode="after")
    def _one_length(self) -> "Training":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps={self.steps}, epochs={self.epochs}: expected exactly one of the two")
        return self


class Evaluation(Strict):
    """When and what to evaluate: the mean model, always; see common.training.evaluation for the rest.

    every:               steps between evaluations, null for once an epoch; the last step is always evaluated
    keep_average:        the mean model persists in every worker after each evaluation
    local_models:        also every worker's own model on its own shard
    recalibrate_batches: training batches of each rank for new BatchNorm statistics of the mean model
    models_kept:         mean models of the last so many evaluations are kept in checkpoints/models
    """

    every: PositiveInt | None
    batch_size: PositiveInt
    keep_average: bool
    local_models: bool
    recalibrate_batches: NonNegativeInt
    models_kept: NonNegativeInt


class Logging(Strict):
    """every: steps between train rows of metrics.jsonl; progress: show it on rank 0's console."""

    every: PositiveInt
    progress: bool
    wandb: Literal["disabled", "offline", "online"]
    wandb_project: str
    tensorboard: bool


class Config(Strict):
    """What every task has; a task's own class adds `data` and `model`."""

    task_name: ClassVar[str] = ""

    task: str
    name: str
    seed: NonNegativeInt
    run_dir: str
    resume: bool
    init_from: str | None
    profile: bool
    parallel: Parallel
    workers: Workers
    topology: TopologyChoice
    optimizer: OptimizerChoice
    schedule: Schedule
    data: Any
    model: Any
    training: Training
    evaluation: Evaluation
    logging: Logging

    @model_validator(mode="after")
    def _choices_fit(self) -> "Config":
        parallel, optimizer = self.parallel, self.optimizer
        if parallel.method == "allreduce" and self.topology.name != "complete":
            raise ValueError(
                f"topology={self.topology.name} with parallel=allreduce: all-reduce averages over everybody, "
                "expected topology=complete (or parallel=decentralized)"
            )
        mixes_momentum = optimizer.name == "dmsgd" and optimizer.momentum_mixing
        if mixes_momentum and parallel.method == "decentralized" and parallel.order != "atc":
            raise ValueError(
                f"parallel.order={parallel.order} with optimizer.momentum_mixing=true: expected parallel.order=atc"
            )
        unit, warmup = self.schedule.unit, self.schedule.warmup
        length = self.training.steps if unit == "steps" else self.training.epochs
        if self.schedule.name == "cosine" and length is not None and warmup >= length:
            raise ValueError(f"schedule.warmup={warmup:g}: expected fewer than training.{unit}={length:g}")
        return self

    @property
    def n(self) -> int:
        """The number of workers; known once `resolve_workers` ran."""
        return self.workers.count or 1

    @property
    def ranks_per_worker(self) -> int:
        """Ranks that share one replica."""
        return self.parallel.ranks_per_worker

    @property
    def lr(self) -> float:
        """The learning rate after linear scaling to the global batch (arXiv 1706.02677, section 2.1)."""
        base = self.optimizer.lr_batch
        return self.optimizer.lr if base is None else self.optimizer.lr * self.training.batch_size / base

    @property
    def ranks(self) -> int:
        """The number of ranks, real or simulated; each draws its own batches."""
        return self.n * self.ranks_per_worker

    def build_topology(self) -> Topology:
        """The schedule of gossip rounds; ConfigError if it does not exist for this number of workers."""
        return self.topology.build(self.n, self.workers.per_host or 1)
