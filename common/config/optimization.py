"""The configuration of `optimizer` and `schedule`."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator

from common.config.base import LARGEST, Fraction, NonNegative, Strict

DecayRate = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[DecayRate | None, DecayRate | None], Field(strict=False)]
Samples = Annotated[float, Field(gt=0, le=1e12)]


class HalfLife(Strict):
    """Samples after which a gradient weighs half as much in the first moment (or momentum) and in the second."""

    first: Samples | None = None
    second: Samples | None = None


class BaseOptimizerConfig(Strict):
    """Keys of all optimizers.

    lr_batch: batch size for which lr is meant: lr is scaled linearly to training.batch_size; null: not scaled
    no_decay: which parameters do not decay, see common.optim.groups
    decay:    coupled: an update subtracts learning rate x weight_decay x weight, or adds weight_decay x weight to the
              gradient; independent: it subtracts weight_decay x weight at the full rate lr, and proportionally less if
              the schedule lowers the rate, so that changing lr does not change the decay, as in Loshchilov & Hutter's
              algorithm (arXiv 1711.05101) and "independent weight decay" in Wortsman et al. (arXiv 2309.14322)

    A momentum or beta that is null takes its default or follows from a half-life, see common.config.moments.
    """

    lr: PositiveFloat
    lr_batch: PositiveInt | None
    weight_decay: NonNegative
    no_decay: Literal["norms_and_biases", "norms", "named_bn_or_bias", "nothing"] = "norms_and_biases"
    decay: Literal["coupled", "independent"] = "coupled"
    half_life: HalfLife = HalfLife()
    later: ClassVar[Mapping[str, Any]] = {"half_life": HalfLife().model_dump(), "decay": "coupled"}

    @model_validator(mode="after")
    def _decay_is_decoupled(self) -> "BaseOptimizerConfig":
        if self.decay == "independent" and self.name not in ("adamw", "accumadamw", "muon"):
            raise ValueError(
                f"decay=independent with optimizer={self.name}, whose decay is part of the gradient: expected coupled, "
                "or adamw, accumadamw or muon"
            )
        return self

    def coupled_decay(self, lr: float) -> float:
        """Return the weight decay that the optimizer multiplies by its learning rate; lr: before the schedule."""
        return self.weight_decay if self.decay == "coupled" else self.weight_decay / lr


class SgdConfig(BaseOptimizerConfig):
    """torch.optim.SGD."""

    name: Literal["sgd"]
    momentum: Fraction | None
    nesterov: bool


class AdamConfig(BaseOptimizerConfig):
    """torch.optim.Adam or AdamW; fused: one pass over memory."""

    name: Literal["adam", "adamw"]
    betas: Betas | None
    eps: PositiveFloat
    fused: bool


class AccumAdamConfig(BaseOptimizerConfig):
    """common.optim.AccumAdam or AccumAdamW; accumulation_steps is s; fused: one pass over memory, compiled."""

    name: Literal["accumadam", "accumadamw"]
    betas: Betas | None
    eps: PositiveFloat
    accumulation_steps: PositiveInt
    fused: bool


class DmSgdConfig(BaseOptimizerConfig):
    """common.optim.DmSGD."""

    name: Literal["dmsgd"]
    momentum: DecayRate | None
    momentum_mixing: bool


class QgDmSgdConfig(BaseOptimizerConfig):
    """common.optim.QGDmSGD."""

    name: Literal["qg_dmsgd"]
    momentum: DecayRate
    tracking: DecayRate | None
    nesterov: bool


class MuonConfig(BaseOptimizerConfig):
    """torch.optim.Muon for the matrices of hidden layers, torch.optim.AdamW for the rest.

    momentum, nesterov: Muon's
    adjust_lr:          how Muon's rate depends on a matrix's shape; match_rms_adamw (arXiv 2502.16982): updates as
                        large as AdamW's, so that one rate and weight decay suit both
    adamw_lr:           AdamW's rate; null: lr
    betas, eps:         AdamW's

    half_life.first applies to Muon's momentum and to AdamW's first moment.
    """

    name: Literal["muon"]
    momentum: Fraction | None
    nesterov: bool
    adjust_lr: Literal["match_rms_adamw", "original"]
    adamw_lr: PositiveFloat | None
    betas: Betas | None
    eps: PositiveFloat


OptimizerConfig = Annotated[
    SgdConfig | AdamConfig | AccumAdamConfig | DmSgdConfig | QgDmSgdConfig | MuonConfig, Field(discriminator="name")
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
        if not all(length <= LARGEST for length in lengths):
            raise ValueError(f"{value}: expected at most {LARGEST}")
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
    gamma: Annotated[float, Field(gt=0, le=1)]

    @model_validator(mode="after")
    def _milestones_follow(self) -> "MultistepConfig":
        if not all(a < b for a, b in pairwise(self.milestones)) or self.warmup > min(self.milestones, default=math.inf):
            raise ValueError(
                f"milestones={self.milestones}, warmup={self.warmup:g}: expected ever later milestones, none of them "
                "in the warm-up"
            )
        return self


ScheduleConfig = Annotated[
    ConstantConfig | CosineConfig | InverseSquareRootConfig | MultistepConfig, Field(discriminator="name")
]
