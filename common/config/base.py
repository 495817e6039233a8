"""The common base of all configuration records, and the keys that do not change what a run computes."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from common.arguments import expand_home

# Random numbers of all ranks and epochs come from multiples of the seed, which have to fit into 64 bits.
LARGEST_SEED = 10**13
LARGEST = LARGEST_SEED  # of all integers
NonNegative = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
MOST_PROCESSES = 1024  # or threads, on one machine; with far more, a run dies without a message
Processes = Annotated[int, Field(gt=0, le=MOST_PROCESSES)]
FilePath = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# Keys for where a run computes, reads and writes, what it prints, how long it waits and when it gives up. A run may be
# resumed with other values of these, and runs with other values still count as runs of a table.
FORMER_BOOKKEEPING = re.compile(
    r"run_dir|resume|name|profile|peak_tflops|logging(\..*)?"
    r"|training\.(threads|device|checkpoint_every|checkpoints_kept)|data\.(folder|path|copy_to|workers)"
    r"|elastic\.(min_workers|restarts|agent|groups)"
)
BOOKKEEPING = re.compile(FORMER_BOOKKEEPING.pattern + r"|parallel\.timeout_s|training\.on_nan")


class Strict(BaseModel):
    """Base of all configuration records: no unknown keys, no conversions, no NaN, no huge integers, immutable.

    later: keys that earlier runs lack, with the values those runs had; these are not written, so that runs can resume
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    later: ClassVar[Mapping[str, Any]] = {}

    @field_validator("*")
    @classmethod
    def _fits_into_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and value > LARGEST:
            raise ValueError(f"{value}: expected at most {LARGEST}")
        return value

    @model_serializer(mode="wrap")
    def _without_later_keys(self, values: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in values(self).items() if key not in self.later or value != self.later[key]}


def is_bookkeeping(key: str) -> bool:
    """Return whether a key, such as training.threads, leaves the results unchanged."""
    return BOOKKEEPING.fullmatch(key) is not None
