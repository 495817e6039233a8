"""YAML files that define tables, figures, excerpts and published numbers: how they are named, read and checked."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from yaml import YAMLError

from common.cli import UsageError, explain, nearest, one_line
from common.config.base import Seed

ROOT = Path(__file__).resolve().parents[2]
StrictSeed = Annotated[Seed, Field(strict=True)]  # no text, no boolean


class Definition(BaseModel):
    """The content of a file, or a part of it; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
