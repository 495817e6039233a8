"""What all configuration records have in common."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from common.paths import expand_home

# Random numbers of all ranks and epochs come from multiples of the seed, which have to fit into 64 bits.
LARGEST_SEED = 10**13
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**63)]
NonNegative = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
FilePath = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """Base of all configuration records: no unknown keys, no conversions, no NaN, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
