"""YAML files that define tables, figures, claims and published numbers: how they are named, read and checked."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from yaml import YAMLError

from common.cli import UsageError, explain, nearest, one_line
from common.config.base import Seed

ROOT = Path(__file__).resolve().parents[2]
OF_EACH_RUN = ("seed", "run_dir", "resume")  # keys that are set for each run when it is made
StrictSeed = Annotated[Seed, Field(strict=True)]  # no text, no boolean


class Definition(BaseModel):
    """The content of a file, or a part of it; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


DefinitionT = TypeVar("DefinitionT", bound=Definition)


def names_in(folder: Path) -> list[str]:
    """Return the names of a folder's definitions."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_definition(folder: Path, name: str, key: str, also: Iterable[str] = ()) -> Any:
    """Return the content of folder/<name>.yaml without validating it.

    key:   what the user typed before the name, for messages
    also:  other names that would have been accepted

    Raises UsageError for an unknown name and for a file that is not YAML.
    """
    known = names_in(folder)
    if name not in known:
        raise UsageError(f"{key}={name}: unknown; {nearest(name, {*known, *also})}")
    try:
        return OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeError, RecursionError) as error:
        raise UsageError(f"{_shown(folder, name)}: not valid YAML: {one_line(error)}") from None


def load_definition(
    folder: Path, name: str, model: type[DefinitionT], key: str, also: Iterable[str] = ()
) -> DefinitionT:
    """Return folder/<name>.yaml as this model; raise UsageError naming file, key, value and expectation if wrong."""
    content = read_definition(folder, name, key, also)
    with explained(folder, name, model):
        return model.model_validate(content)


@contextmanager
def explained(folder: Path, name: str, model: type[Definition]) -> Iterator[None]:
    """Turn validation errors of folder/<name>.yaml into a UsageError naming file, key, value and expectation."""
    try:
        yield
    except ValidationError as error:
        raise UsageError(f"{_shown(folder, name)}: {explain(error, model)}") from None


def _shown(folder: Path, name: str) -> str:
    path = folder / f"{name}.yaml"
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


# Tables specify their runs as Hydra overrides.


@cache  # the parser is slow, and the runs of a table share most of their overrides
def parse_override(text: str) -> tuple[str, Any]:
    """Return (key, value) of a Hydra override, so that 1e-3 equals 0.001; raise ValueError if not one, or a sweep."""
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
    """Return the override if it may appear in a definition; raise ValueError otherwise."""
    key, _ = parse_override(text)
    if key in OF_EACH_RUN:
        raise ValueError(f"{key} is set for each run when it is made; expected any other key")
    return text


Override = Annotated[str, AfterValidator(check_override)]
