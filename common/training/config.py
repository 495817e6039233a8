"""The typed configuration, checked once at the start: afterwards every key exists and is valid.

Hydra composes YAML files and command-line overrides; pydantic refuses unknown keys, wrong types, values out of range
and contradictory choices.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from common.local_steps import check_topology
from common.topology import Topology, build
from common.training.parallel_config import ParallelConfig
from common.training.records import NonNegative, Strict

Fraction = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[DecayRate, DecayRate], Field(strict=False)]


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names key, value and expectation."""


# -- workers and topology


class WorkersConfig(Strict):
    """Where the workers live. count: null for the launcher's world size, or else one for each GPU (at least one)."""

    kind: Literal["processes", "simulated"]
    count: PositiveInt | None
    per_host: PositiveInt | None


class TopologyConfig(Strict):
    """A name of common.topology.NAMES and that topology's options."""

    model_config = ConfigDict(extra="allow")

    name: str

    def build(self, workers: int, per_host: int) -> Topology:
        """Build the topology. Raises ConfigError if it does not exist for this number of workers."""
        options = dict(self.model_extra or {})
        try:
            return build(self.name, workers, per_host, **options)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(f"topology={self.name} (workers={workers}, per_host={per_host}): {error}") from error


# -- optimizer and schedule


class BaseOptimizerConfig(Strict):
    """Keys of all optimizers.

    lr_batch: batch size for which lr is meant: lr is scaled linearly to training.batch_size; null: not scaled
    no_decay: what does not decay, see common.optim.groups
    """

    lr: PositiveFloat
    lr_batch: PositiveInt | None
    weight_decay: NonNegative
    no_decay: Literal["norms_and_biases", "norms", "named_bn_or_bias", "nothing"] = "norms_and_biases"


class SgdConfig(BaseOptimizerConfig):
    """torch.optim.SGD."""

    name: Literal["sgd"]
    momentum: Fraction
    nesterov: bool


class AdamConfig(BaseOptimizerConfig):
    """torch.optim.Adam or AdamW; fused: one pass over memory."""

    name: Literal["adam", "adamw"]
    betas: Betas
    eps: PositiveFloat
    fused: bool


class AccumAdamConfig(BaseOptimizerConfig):
    """common.optim.AccumAdam or AccumAdamW; accumulation_steps is s; fused: one pass over memory, compiled."""

    name: Literal["accumadam", "accumadamw"]
    betas: Betas
    eps: PositiveFloat
    accumulation_steps: PositiveInt
    fused: bool


class DmSgdConfig(BaseOptimizerConfig):
    """common.optim.DmSGD."""

    name: Literal["dmsgd"]
    momentum: Fraction
    momentum_mixing: bool


class QgDmSgdConfig(BaseOptimizerConfig):
    """common.optim.QGDmSGD."""

    name: Literal["qg_dmsgd"]
    momentum: DecayRate
    tracking: DecayRate | None
    nesterov: bool


OptimizerConfig = Annotated[
    SgdConfig | AdamConfig | AccumAdamConfig | DmSgdConfig | QgDmSgdConfig, Field(discriminator="name")
]


class ConstantConfig(Strict):
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


class CosineConfig(ConstantConfig):
    """Half a cosine from lr down to final_fraction x lr at the last step.

    change: whether lr changes in every step, or in every epoch after the warm-up
    """

    name: Literal["cosine"]
    final_fraction: Fraction
    change: Literal["step", "epoch"] = "step"


class InverseSquareRootConfig(ConstantConfig):
    """lr sqrt(warmup / t) after the warm-up.

    first: t of the first update
    """

    name: Literal["inverse_square_root"]
    warmup: PositiveFloat
    first: Literal[0, 1] = 0


class MultistepConfig(ConstantConfig):
    """lr times gamma at each milestone."""

    name: Literal["multistep"]
    milestones: list[PositiveFloat]
    gamma: PositiveFloat


ScheduleConfig = Annotated[
    ConstantConfig | CosineConfig | InverseSquareRootConfig | MultistepConfig, Field(discriminator="name")
]


# -- the run


class TrainingConfig(Strict):
    """Length and manner of training. Exactly one of steps and epochs is set.

    batch_size:    of all workers together in one update; samples, or another unit of the task (transformer: tokens)
    tf32:          whether GPUs compute float32 matrix products and convolutions in TF32 (10 bits of mantissa)
    deterministic: whether GPUs repeat a run bit for bit, see common.training.numerics
    """

    steps: PositiveInt | None
    epochs: PositiveFloat | None
    batch_size: PositiveInt
    gradient_accumulation: PositiveInt
    clip: PositiveFloat | None
    precision: Literal["fp32", "bf16", "fp16"]
    tf32: bool = False
    deterministic: bool = False
    compile: bool
    device: Literal["auto", "cpu", "cuda"]
    threads: PositiveInt | None
    checkpoint_every: PositiveInt | None
    checkpoints_kept: PositiveInt
    on_nan: Literal["stop", "warn"]

    @model_validator(mode="after")
    def _one_length(self) -> "TrainingConfig":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps={self.steps}, epochs={self.epochs}: expected exactly one of the two")
        return self


class EvaluationConfig(Strict):
    """When and what to evaluate: always the mean model; see common.training.evaluation for the rest.

    every:               steps between evaluations; null: once an epoch; the last step is always evaluated
    keep_average:        the mean model persists in every worker after each evaluation
    local_models:        also every worker's own model on its own shard
    recalibrate_batches: training batches of each rank for new BatchNorm statistics of the mean model
    models_kept:         number of the last evaluations whose mean models are kept in checkpoints/models
    """

    every: PositiveInt | None
    batch_size: PositiveInt
    keep_average: bool
    local_models: bool
    recalibrate_batches: NonNegativeInt
    models_kept: NonNegativeInt


class LoggingConfig(Strict):
    """Records of a run. every: steps between train rows of metrics.jsonl; progress: show it on rank 0's console."""

    every: PositiveInt
    progress: bool
    wandb: Literal["disabled", "offline", "online"]
    wandb_project: str
    tensorboard: bool


class Config(Strict):
    """The keys of every task; a task's own class gives `data` and `model` their types."""

    task_name: ClassVar[str] = ""

    task: str
    name: str
    seed: NonNegativeInt
    run_dir: str
    resume: bool
    init_from: str | None
    profile: bool
    parallel: ParallelConfig
    workers: WorkersConfig
    topology: TopologyConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    data: Any
    model: Any
    training: TrainingConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig

    @model_validator(mode="after")
    def _choices_fit(self) -> "Config":
        parallel, optimizer = self.parallel, self.optimizer
        if parallel.method == "allreduce" and self.topology.name != "complete":
            raise ValueError(
                f"topology={self.topology.name} with parallel=allreduce: all-reduce averages over everybody, "
                "expected topology=complete (or parallel=decentralized)"
            )
        atc = {"optimizer=qg_dmsgd": optimizer.name == "qg_dmsgd"}
        atc["optimizer.momentum_mixing=true"] = optimizer.name == "dmsgd" and optimizer.momentum_mixing
        for choice, needs_atc in atc.items():
            if needs_atc and parallel.method == "decentralized" and parallel.order != "atc":
                raise ValueError(f"parallel.order={parallel.order} with {choice}: expected parallel.order=atc")
            if needs_atc and parallel.method == "decentralized" and not parallel.plan().every_update:
                raise ValueError(
                    f"parallel.local_steps={parallel.local_steps}, outer.lr={parallel.outer.lr:g} with {choice}: it is "
                    "defined for a round in every update without an outer step; expected another optimizer"
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
        """Build the topology.

        Raises ConfigError if it does not exist for this number of workers, or cannot be had with local steps.
        """
        topology, parallel = self.topology.build(self.n, self.workers.per_host or 1), self.parallel
        if parallel.method == "decentralized":
            try:
                check_topology(parallel.plan(), parallel.local_options()["mixing"], topology, parallel.push_sum)
            except ValueError as error:
                raise ConfigError(f"parallel.{error}") from error
        return topology
