"""Hydra overrides as texts: what they mean, and which may stand in a definition."""

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from pydantic import AfterValidator

# Keys that are set for each run when it is made.
OF_EACH_RUN = ("seed", "run_dir", "resume")


@cache  # the parser is slow, and the runs of a table share most of their overrides
def parse_override(text: str) -> tuple[str, Any]:
    """Return (key, value) of a Hydra override, so that 1e-3 equals 0.001; ValueError if it is none or a sweep."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        raise ValueError(f"{text!r}: expected one Hydra override, key=value") from None
    if override.is_sweep_override():
        raise ValueError(f"{text!r}: expected one value, got a sweep over several")
    prefix = "~" if override.is_delete() else ""
    package = f"@{override.package}" if override.package else ""
    return f"{prefix}{override.key_or_group}{package}", override.value()


def meaning(overrides: Sequence[str]) -> dict[str, Any]:
    """Return {key: value} of overrides."""
    return dict(map(parse_override, overrides))


def check_override(text: str) -> str:
    """Return an override that may stand in a definition; ValueError for any other."""
    key, _ = parse_override(text)
    if key in OF_EACH_RUN:
        raise ValueError(f"{key} is set for each run when it is made; expected any other key")
    return text


Override = Annotated[str, AfterValidator(check_override)]
