"""What a user types on the command line, made what Hydra reads."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from pydantic import BaseModel

from common.cli import one_line
from common.paths import expand_home
from common.spelling import nearest
from common.training.config import Config, ConfigError
from common.training.elastic_config import SURVIVING, ElasticConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GROUPS = {folder.name for folder in CONFIGS.iterdir() if folder.is_dir()}
# Hydra would take these, but a run's folder and its start are not Hydra's.
IGNORED = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir", "hydra.job.env_", "hydra.launcher", "hydra.sweeper")
IGNORED += ("hydra/launcher", "hydra/sweeper")


def as_hydra_reads(config_class: type[Config], overrides: Sequence[str]) -> list[str]:
    """Return the overrides with every text as it was typed, and with elastic=true as its keys.

    A key that holds text takes it as it stands, without Hydra's grammar: name=007, init_from=runs/lr=0.1/best.pt,
    data.folder=~/images; quotes, ${...} and, for --multirun, lists of values keep their meaning.

    Raises ConfigError for what cannot be read or chosen, or would have no effect.
    """
    texts = {*text_keys(config_class), "topology.path"}  # the latter is an option of one topology
    return _with_elastic([_as_typed(word, texts) for word in overrides])


def typed(key: str, value: str) -> str:
    """Return `key=value` as a user types it in a shell."""
    word = f"{key}={value}"
    try:
        plain = OverridesParser.create().parse_override(word).value() == value
    except HydraException:
        plain = False
    return shlex.quote(word if plain else f"{key}={quoted(value)}")


def text_keys(record: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a configuration that hold text, of any choice of a group."""
    for name, field in record.model_fields.items():
        kinds = set(_kinds(field.annotation))
        if str in kinds and kinds <= {str, NoneType}:
            yield prefix + name
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from text_keys(kind, f"{prefix}{name}.")


def _kinds(annotation: Any) -> Iterator[Any]:
    match get_origin(annotation):
        case origin if origin is Annotated:
            yield from _kinds(get_args(annotation)[0])
        case origin if origin in (Union, UnionType):
            for kind in get_args(annotation):
                yield from _kinds(kind)
        case origin if origin is None:
            yield annotation


def _as_typed(word: str, texts: set[str]) -> str:
    key, _, value = word.partition("=")
    if key.startswith(IGNORED):
        raise ConfigError(f"{word}: has no effect here; run_dir=FOLDER sets the folder of a run")
    is_text = key.lstrip("+") in texts
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        if is_text and not re.search(r"['\"]|\$\{", value):
            return f"{key}={quoted(_expanded(key, value))}"
        reason = one_line(error).partition(" See https://hydra.cc")[0]
        raise ConfigError(f"{shlex.quote(word)}: cannot be read as key=value ({reason})") from error
    _check_choice(override)
    if not is_text or override.is_sweep_override():
        return word
    if isinstance(read := override.value(), str):
        return f"{key}={quoted(_expanded(key, read))}" if read.startswith("~") else word
    return f"{key}={quoted(value)}" if isinstance(read, bool | int | float) else word


def _expanded(key: str, text: str) -> str:
    try:
        return expand_home(text)
    except ValueError as error:
        raise ConfigError(f"{key}={error}") from error


def _check_choice(override: Override) -> None:
    group = override.key_or_group
    if override.is_delete() or group not in GROUPS - {"experiment"} or override.is_sweep_override():
        return
    if not isinstance(override.value(), str | list):
        raise ConfigError(f"{group}={override.get_value_element_as_str()}: {nearest('', choices(group))}")


def choices(group: str) -> list[str]:
    """Return the names that may be given to a group of configs/."""
    return sorted(str(file.relative_to(CONFIGS / group).with_suffix("")) for file in (CONFIGS / group).rglob("*.yaml"))


def choices_with(key: str) -> list[str]:
    """Return `group=name` for each choice that has this key of a group."""
    group, _, name = key.partition(".")
    files = [(choice, CONFIGS / group / f"{choice}.yaml") for choice in choices(group)] if group in GROUPS else []
    return [f"{group}={choice}" for choice, file in files if name in OmegaConf.load(file)]


def quoted(value: str) -> str:
    """Return a text between quotes, as Hydra reads them: backslashes count only before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (found[2] and "\\'"), value) + "'"


def _with_elastic(words: list[str]) -> list[str]:
    """Return the words with elastic=true as keys in front of all others, so that these count in any order."""
    switches = [word for word in words if re.fullmatch(r"\+*elastic=(true|false)", word, re.IGNORECASE)]
    if not switches:
        return words
    on = switches[-1].lower().endswith("true")
    values = SURVIVING if on else ElasticConfig().model_dump()
    keys = [f"elastic.{key}={'null' if value is None else value}" for key, value in values.items()]
    return [*keys, *(word for word in words if word not in switches)]
