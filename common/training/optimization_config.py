"""The configuration of `optimizer` and `schedule`."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, ValidationInfo, field_validator

from common.training.records import Fraction, NonNegative, PositiveInt, Strict

DecayRate = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[DecayRate, DecayRate], Field(strict=False)]


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


class MuonConfig(BaseOptimizerConfig):
    """torch.optim.Muon for the matrices of hidden layers, torch.optim.AdamW for the rest.

    momentum, nesterov: Muon's
    adjust_lr:          how Muon's rate depends on a matrix's shape; match_rms_adamw (arXiv 2502.16982): updates as
                        large as AdamW's, so that one rate and weight decay suit both
    adamw_lr:           AdamW's rate; null: lr
    betas, eps:         AdamW's
    """

    name: Literal["muon"]
    momentum: Fraction
    nesterov: bool
    adjust_lr: Literal["match_rms_adamw", "original"]
    adamw_lr: PositiveFloat | None
    betas: Betas
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
