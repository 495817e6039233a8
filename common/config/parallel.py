"""The configuration of `parallel`: the method."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PlainValidator, PositiveInt, model_validator

from common.arguments import BUCKET_MB, TIMEOUT_S
from common.config.base import NonNegative, Strict
from common.options import GossipOptions, Mixing, Outer, order_of

Timeout = Annotated[float, Field(gt=0, le=TIMEOUT_S.high)]


def _megabytes_or_auto(value: object) -> float | Literal["auto"]:
    if value == "auto":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and value in BUCKET_MB:
        return float(value)
    raise ValueError(f"{value}: expected a size in MiB greater than 0, or auto")


class AllReduceConfig(Strict):
    """Gradients averaged by DDP over all ranks; ranks_per_worker only counts several of them as one worker."""

    method: Literal["allreduce"]
    ranks_per_worker: PositiveInt
    bucket_mb: Annotated[float, Field(gt=0, le=BUCKET_MB.high)]
    hook: Literal["fp16", "powersgd"] | None = None
    powersgd_rank: PositiveInt = 1
    powersgd_from: int = Field(1000, ge=2)
    find_unused_parameters: bool
    timeout_s: Timeout


class OuterConfig(Strict):
    """The outer optimizer of local steps; see common.parallel.Outer."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    displacement: Literal["own", "mixed"] = "own"


class MixingConfig(Strict):
    """How strongly rounds mix as the learning rate falls; see common.parallel.Mixing."""

    power: NonNegative = 0.0
    start: NonNegativeInt = 0


class DecentralizedConfig(Strict):
    """Parameters averaged with peers; see DecentralizedDataParallel.

    shard: whether one replica is sharded over the ranks of a worker (FSDP2), see common.parallel.replica
    share_second_moment: whether simulated workers divide by a common second moment, see common.simulate.methods
    """

    method: Literal["decentralized"]
    order: Literal["awc", "atc"]
    ranks_per_worker: PositiveInt
    shard: bool = False
    bucket_mb: Annotated[float | Literal["auto"], PlainValidator(_megabytes_or_auto)]
    transport: Literal["auto", "send_recv", "subgroup"]
    message_dtype: Literal["float16", "bfloat16", "int8"] | None
    phases: Literal["aligned", "staggered"] = "aligned"
    push_sum: bool = False
    share_second_moment: Literal["mean", "mixing"] | None = None
    later: ClassVar[Mapping[str, Any]] = {"share_second_moment": None}
    local_steps: PositiveInt = 1
    outer: OuterConfig = OuterConfig()
    merge_after: NonNegativeInt | None = None
    local_steps_from: NonNegativeInt = 0
    fragments: PositiveInt = 1
    mixing: MixingConfig = MixingConfig()
    find_unused_parameters: bool
    timeout_s: Timeout

    @model_validator(mode="before")
    @classmethod
    def _order_that_fits(cls, values: Any) -> Any:
        """Fill in the order that `merge_after` implies if none is given."""
        if isinstance(values, dict) and values.get("order") is None:
            values = values | {"order": order_of(values.get("merge_after"))}
        return values

    @model_validator(mode="after")
    def _rounds_fit(self) -> "DecentralizedConfig":
        self.options()
        return self

    @model_validator(mode="after")
    def _shards_fit(self) -> "DecentralizedConfig":
        if self.shard and self.ranks_per_worker == 1:
            raise ValueError("ranks_per_worker=1 with shard=true: expected 2 or more ranks to share a replica")
        if self.shard and self.find_unused_parameters:
            raise ValueError("find_unused_parameters=true with shard=true: expected false: FSDP averages gradients")
        return self

    def options(self) -> GossipOptions:
        """Return the options of gossip. Raises ValueError if keys contradict each other."""
        given = {name: getattr(self, name) for name in GossipOptions.names()}
        outer, mixing = Outer(**self.outer.model_dump()), Mixing(**self.mixing.model_dump())
        return GossipOptions(**given | {"outer": outer, "mixing": mixing})


ParallelConfig = Annotated[AllReduceConfig | DecentralizedConfig, Field(discriminator="method")]
