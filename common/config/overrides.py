"""Translates what a user types on the command line into what Hydra reads."""

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from pydantic import BaseModel

from common.arguments import expand_home, nearest
from common.cli import one_line
from common.config.config import Config, ConfigError
from common.config.elastic import SURVIVING, ElasticConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GROUPS = {folder.name for folder in CONFIGS.iterdir() if folder.is_dir()}
# Hydra would accept these, but it does not control a run's folder or its start.
IGNORED = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir", "hydra.job.env_", "hydra.launcher", "hydra.sweeper")
IGNORED += ("hydra/launcher", "hydra/sweeper")


def as_hydra_reads(config_class: type[Config], overrides: Sequence[str], several: bool = False) -> list[str]:
    """Return the overrides with every text as it was typed, and with elastic=true replaced by its keys.

    A key that holds text takes its value literally, without Hydra's grammar: name=007, init_from=runs/lr=0.1/best.pt,
    data.folder=~/images; quotes and ${...} keep their meaning.

    several: whether values may be lists, for --multirun; text is split at commas

    Raises ConfigError for an override that cannot be read or chosen, or would have no effect.
    """
    texts = {*text_keys(config_class), "topology.path"}  # the latter is an option of one topology
    words = [_as_typed(config_class, word, texts, several) for word in overrides]
    if not several:  # ++ adds options that configs/topology leaves out; topologies refuse those that they lack
        words = [re.sub(r"^topology\.", "++topology.", word) for word in words]
    return _with_elastic(words)


def typed(key: str, value: str) -> str:
    """Return `key=value` as a user types it in a shell."""
    return shlex.quote(f"{key}={_literal(value)}")


def _literal(text: str) -> str:
    """Return how Hydra reads this text: between quotes where it would read something else."""
    try:
        plain = OverridesParser.create().parse_override(f"key={text}").value() == text
    except HydraException:
        plain = False
    return text if plain else quoted(text)


def text_keys(record: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a configuration that hold text, for every choice of a group."""
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


def _as_typed(config_class: type[Config], word: str, texts: set[str], several: bool) -> str:
    key, _, value = word.partition("=")
    if not key:
        raise ConfigError(f"{shlex.quote(word)}: expected key=value")
    if key.startswith(IGNORED):
        raise ConfigError(f"{word}: has no effect here; run_dir=FOLDER sets the folder of a run")
    is_text = key.lstrip("+") in texts
    if is_text and several and "," in value and not re.search(r"['\"()\[\]{}]", value):
        parts = [part.strip() for part in value.split(",")]
        return f"{key}=" + ",".join(part if part == "null" else _literal(_expanded(key, part)) for part in parts)
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        if is_text and not re.search(r"['\"]|\$\{", value):
            return f"{key}={quoted(_expanded(key, value))}"
        reason = one_line(error).partition(" See https://hydra.cc")[0]
        raise ConfigError(f"{shlex.quote(word)}: cannot be read as key=value ({reason})") from error
    _check_choice(config_class, override)
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


def _check_choice(config_class: type[Config], override: Override) -> None:
    group = override.key_or_group
    if override.is_delete() or group not in GROUPS or override.is_sweep_override():
        return
    value = override.value()
    if not all(isinstance(name, str) for name in (value if isinstance(value, list) else [value])):
        raise ConfigError(f"{group}={override.get_value_element_as_str()}: {nearest('', choices(config_class, group))}")


def choices(config_class: type[Config], group: str) -> list[str]:
    """Return the names that a task may give to a group of configs/; `base` is only for recipes to build on."""
    return [name for name in _names(group) if Path(name).name != "base" and _is_of_task(config_class, group, name)]


def choices_with(key: str) -> list[str]:
    """Return `group=name` for each choice of the key's group that has this key."""
    group, _, name = key.partition(".")
    known = _names(group) if group in GROUPS else []
    return [f"{group}={choice}" for choice in known if name in _load(group, choice)]


def _names(group: str) -> list[str]:
    return sorted(str(file.relative_to(CONFIGS / group).with_suffix("")) for file in (CONFIGS / group).rglob("*.yaml"))


@cache
def _load(group: str, name: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(CONFIGS / group / f"{name}.yaml"))


def _is_of_task(config_class: type[Config], group: str, name: str) -> bool:
    """Return whether a task knows these data or this model, or for a recipe its data and models and its bases'."""
    values = _load(group, name)
    defaults = values.get("defaults", [])
    if group == "experiment":
        bases = [entry for entry in defaults if isinstance(entry, str) and entry != "_self_"]
        taken = [("experiment", base.removeprefix("/experiment/")) for base in bases]
        for part in ("data", "model"):
            key = f"override /{part}"
            taken += [(part, entry[key]) for entry in defaults if isinstance(entry, dict) and key in entry]
        return all(_is_of_task(config_class, *one) for one in taken)
    if group not in ("data", "model") or config_class.model_fields[group].annotation is Any:
        return True
    fields = [kind.model_fields for kind in _kinds(config_class.model_fields[group].annotation)]
    named = [known for known in fields if values["name"] in (get_args(known["name"].annotation) or [values["name"]])]
    return any(values.keys() <= {"defaults", *known} for known in named)


def quoted(value: str) -> str:
    """Return a text between quotes, as Hydra reads them: backslashes count only before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (found[2] and "\\'"), value) + "'"


def _with_elastic(words: list[str]) -> list[str]:
    """Return the words with elastic=true as keys in front of all others, which thus override it in any order."""
    switches = [word for word in words if re.fullmatch(r"\+*elastic=(true|false)", word, re.IGNORECASE)]
    if not switches:
        return words
    on = switches[-1].lower().endswith("true")
    values = SURVIVING if on else ElasticConfig().model_dump()
    keys = [f"elastic.{key}={'null' if value is None else value}" for key, value in values.items()]
    return [*keys, *(word for word in words if word not in switches)]


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to {"a.b.c": value}."""
    if not isinstance(values, dict):
        return {prefix[:-1]: values}
    return {key: value for name, item in values.items() for key, value in flatten(item, f"{prefix}{name}.").items()}
