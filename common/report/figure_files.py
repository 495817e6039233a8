"""Figures that are more than a table's curves: configs/figure/<name>.yaml says what is drawn."""

from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from yaml import YAMLError

from common.report.cli import UsageError, explain, nearest, one_line
from common.report.published import ROOT

FIGURES = ROOT / "configs" / "figure"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    table: str


class Bars(_Strict):
    """A value of a benchmark's table for each cluster and number of workers, a bar for each method."""

    kind: Literal["bars"]
    value: str
    axis: str


class Curves(_Strict):
    """Metrics against time: published curves above, below those of some rows (and one variant) of a table."""

    kind: Literal["curves"]
    variant: str | None = None
    rows: tuple[str, ...] = Field(min_length=1)
    metrics: tuple[str, ...] = Field(min_length=1)
    published: str


KINDS = {"bars": Bars, "curves": Curves}


def load_figure(name: str, folder: Path = FIGURES) -> Bars | Curves:
    """Reads a figure's file; UsageError naming file, key, value and expectation if it is unknown or wrong."""
    known = figure_names(folder)
    if name not in known:
        raise UsageError(f"figure={name}: unknown; {nearest(name, known)}")
    path = folder / f"{name}.yaml"
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"{path.name}: not valid YAML: {one_line(error)}") from None
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in KINDS:
        raise UsageError(f"{path.name}: kind={kind}: {nearest(str(kind), KINDS)}")
    try:
        return KINDS[kind].model_validate(content)
    except ValidationError as error:
        raise UsageError(f"{path.name}: {explain(error, KINDS[kind])}") from None


def figure_names(folder: Path = FIGURES) -> list[str]:
    """The figures that have a file; every table of runs can be drawn besides."""
    return sorted(path.stem for path in folder.glob("*.yaml"))
