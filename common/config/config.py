"""The typed configuration, checked once at the start: afterwards every key exists and is valid.

Hydra composes YAML files and command-line overrides; pydantic refuses unknown keys, wrong types, values out of range
and contradictory choices.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from common.arguments import expand_home
from common.config.base import FilePath, Processes, Seed, Strict
from common.config.contradictions import check_choices, made
from common.config.elastic import ElasticConfig, Workers
from common.config.optimization import OptimizerConfig, ScheduleConfig
from common.config.parallel import ParallelConfig
from common.topology import Topology, build


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names key, value and expectation."""


# -- workers and topology


class WorkersConfig(Strict):
    """Where the workers live.

    count:   null: launcher's processes / ranks_per_worker, or else one for each GPU (at least one); 1 if simulated
    batched: whether simulated workers run forward and backward as one batch, see `common.simulate.BatchedWorkers`
    """

    kind: Literal["processes", "simulated"]
    count: PositiveInt | None
    per_host: PositiveInt | None
    batched: bool = False


class TopologyConfig(Strict):
    """A name of common.topology.NAMES and that topology's options."""

    model_config = ConfigDict(extra="allow")

    name: str

    def build(self, workers: int, per_host: int) -> Topology:
        """Build the topology. Raises ConfigError if it does not exist for this number of workers."""
        options = dict(self.model_extra or {})
        try:
            if isinstance(options.get("path"), str):
                options["path"] = expand_home(options["path"])
            return build(self.name, workers, per_host, **options)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(f"topology={self.name} (workers={workers}, per_host={per_host}): {error}") from error


# -- the run


class TrainingConfig(Strict):
    """Length and manner of training. Exactly one of steps and epochs is set.

    batch_size:    of all workers together in one update; samples, or another unit of the task (transformer: tokens)
    tf32:          whether GPUs compute float32 matrix products and convolutions in TF32 (10 bits of mantissa)
    deterministic: whether GPUs repeat a run bit for bit, see common.training.device
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
    threads: Processes | None
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
    """Records of a run.

    every:             steps between train rows of metrics.jsonl
    noise_scale_every: steps between measurements of the gradient noise scale, see common.training.noise_meter
    progress:          show it on rank 0's console
    """

    every: PositiveInt
    noise_scale_every: PositiveInt | None = None
    progress: bool
    wandb: Literal["disabled", "offline", "online"]
    wandb_project: str
    tensorboard: bool


class Config(Strict):
    """The keys of every task; a task's own class gives `data` and `model` their types."""

    task: Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]
    name: str
    seed: Seed
    run_dir: FilePath
    resume: bool
    init_from: FilePath | None
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
    elastic: ElasticConfig = ElasticConfig()

    @field_validator("name")
    @classmethod
    def _stays_below_runs(cls, name: str) -> str:
        if {"", ".", ".."} & {*name.split("/")}:
            raise ValueError(f"{name}: expected a name without `..`, `.` and empty parts; run_dir=FOLDER is free")
        return name

    @model_validator(mode="after")
    def _choices_fit(self) -> "Config":
        check_choices(self)
        self._check_rounds()
        if self.elastic.script:
            self.elastic.members(self.n, max(change.step for change in self.elastic.script))
        if self.elastic.min_workers is not None and self.elastic.min_workers > self.n:
            where = f"elastic.min_workers={self.elastic.min_workers}"
            raise ValueError(f"{where}: expected at most the number of workers, {self.n}")
        unit, warmup = self.schedule.unit, self.schedule.warmup
        length = self.training.steps if unit == "steps" else self.training.epochs
        if self.schedule.name == "cosine" and length is not None and warmup >= length:
            raise ValueError(f"schedule.warmup={warmup:g}: expected fewer than training.{unit}={length:g}")
        return self

    def _check_rounds(self) -> None:
        """Refuse local steps together with choices that are defined only for a round in every update."""
        parallel = self.parallel
        if parallel.method == "allreduce" or parallel.options().plan.every_update:
            return
        for choice in ("optimizer=qg_dmsgd", "optimizer.momentum_mixing=true", "parallel.share_second_moment"):
            if which := made(choice, self):
                raise ValueError(
                    f"parallel.local_steps={parallel.local_steps}, outer.lr={parallel.outer.lr:g} with {which}: "
                    "expected a round in every update, without an outer step"
                )

    @property
    def sharded(self) -> bool:
        """Whether the ranks of a worker hold shards of its replica."""
        return self.parallel.method == "decentralized" and self.parallel.shard

    @property
    def n(self) -> int:
        """The number of workers; known once `resolve_workers` ran."""
        return self.workers.count or 1

    @property
    def all_workers(self) -> Workers:
        """The numbers of all workers."""
        return Workers(tuple(range(self.n)))

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
    def sample_size(self) -> int:
        """Samples in each unit of training.batch_size: 1; for sequences of a language model, their tokens."""
        return 1

    @property
    def ranks(self) -> int:
        """The number of ranks, real or simulated; each draws its own batches."""
        return self.n * self.ranks_per_worker

    def build_topology(self) -> Topology:
        """Build the topology.

        Raises ConfigError if it does not exist for this number of workers, or does not fit the options of gossip.
        """
        topology, parallel = self.topology.build(self.n, self.workers.per_host or 1), self.parallel
        if parallel.method == "decentralized":
            try:
                parallel.options().check_topology(topology)
            except ValueError as error:
                raise ConfigError(f"parallel.{error}") from error
        return topology
