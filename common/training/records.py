"""What all configuration records have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """Base of all configuration records: no unknown keys, no conversions, no NaN, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
