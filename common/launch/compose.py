"""From YAML files and overrides to a checked configuration."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import hydra
import omegaconf
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

from common import rank_environment
from common.arguments import did_you_mean, nearest
from common.cli import explain_mistake, locate, one_line
from common.config.config import Config, ConfigError
from common.config.elastic import SURVIVING
from common.config.moments import with_betas
from common.config.overrides import CONFIGS, GROUPS, as_hydra_reads, choices, choices_with, flatten
from common.training.members import config_of
from common.training.task import Task, load_task

FEW = 3  # the most choices that a message names
MOST_LOST = 64  # before a run the topology is also built for 1 to 64 fewer workers
# Hydra 1.3 asks which version's defaults are meant; 1.4 always uses those of 1.3, and warns of the argument. OmegaConf
# 2.4 registers resolvers with a function whose name does something else in 2.3.
VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
register = OmegaConf.register_new_resolver if omegaconf.__version__.startswith("2.3.") else OmegaConf.register_resolver
# ${mul:a,b} in YAML: for example the global batch as samples of a worker times the number of workers. ${div:a,b}
# divides.
register("mul", lambda a, b: a * b, replace=True)
register("div", lambda a, b: a / b, replace=True)
# ${groups:TASK}, in --help: the choices of the task.
register("groups", lambda task: list_groups(load_task(task).config_class), replace=True)


class LauncherError(ConfigError):
    """A mistake in what the environment says about this process alone."""


def compose_config(task: str, overrides: list[str]) -> Config:
    """Compose configs/<task>.yaml with Hydra overrides and check it.

    Raises ConfigError with one readable line for each mistake.
    """
    loaded = load_task(task)
    words = as_hydra_reads(loaded.config_class, overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS), **VERSION_BASE):
            return check(loaded, compose(task, words))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_composition(error, task)) from error


def explain_composition(error: Exception, task: str) -> str:
    """Return Hydra's complaint in one line, reworded, with the key or the choice that was probably meant."""
    text = str(error)
    if absent := re.search(r"Could not find '(\w+)/([^']+)'", text):
        group, name = absent.groups()
        return f"{group}={name}: unknown; {nearest(name, choices(load_task(task).config_class, group))}"
    if gone := re.search(r"Could not delete from config. '([^']+)' does not exist", text):
        return f"~{gone[1]}: there is nothing to delete; {gone[1]}=null switches off what can be switched off"
    unknown = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)'", text)
    if unknown is not None:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONFIGS), **VERSION_BASE):
            known = flatten(OmegaConf.to_container(compose(task, [])))
        return f"{unknown[1]}: no such key{suggestion(unknown[1], known.keys())}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        what = "missing" if isinstance(error, MissingMandatoryValue) else text.splitlines()[0]
        return f"{error.full_key}: {what}"
    return one_line(error)


def suggestion(key: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the key that was probably meant, or which choice has it, or ""."""
    group, _, last = key.rpartition(".")
    names = {name: name.rpartition(".") for name in known if name != key and not name.startswith(f"{key}.")}
    beside = {own: name for name, (its_group, _, own) in names.items() if its_group == group}
    initials = "".join(word[:1] for word in last.split("_"))  # learning_rate: lr
    close = did_you_mean(last, beside).partition("'")[2].partition("'")[0] or (initials if len(initials) > 1 else "")
    if close in beside:
        return f"; did you mean {beside[close]!r}?"
    if elsewhere := [name for name, (*_, own) in names.items() if own == last]:
        depth = min(name.count(".") for name in elsewhere)
        return f"; did you mean {' or '.join(repr(name) for name in elsewhere if name.count('.') == depth)}?"
    if 0 < len(having := choices_with(key)) <= FEW:
        return f"; it is a key of {', '.join(having)}"
    return "" if group and beside else did_you_mean(key, names)


def check(task: type[Task], composed: DictConfig) -> Config:
    """Turn Hydra's composition into the task's typed configuration, with the number of workers filled in."""
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    try:
        resolved = resolve_workers(resolve_elastic(values))
        config = task.config_class.model_validate(resolved)
    except ValidationError as error:
        raise ConfigError(explain(error, task.config_class, flatten(values))) from error
    config.build_topology()
    remaining = [config.elastic.members(config.n, change.step) for change in config.elastic.script]
    left = range(config.elastic.min_workers or config.n, config.n)[-MOST_LOST:]
    for members in [*remaining, *(config.all_workers[:n] for n in left)]:
        config_of(config, members)
    if config.workers.batched and not task.fixed_shapes:
        raise ConfigError("workers.batched=true: expected false: the shapes of this task's batches differ")
    micro_batches = config.ranks * config.training.gradient_accumulation
    if config.training.batch_size % micro_batches:
        raise ConfigError(
            f"training.batch_size={config.training.batch_size}: expected a multiple of {micro_batches} (ranks x "
            "training.gradient_accumulation)"
        )
    return with_betas(config)


def list_groups(config_class: type[Config]) -> str:
    """Return a line for each group of configs/ with its choices."""
    return "\n".join(f"{group}: {', '.join(choices(config_class, group))}" for group in sorted(GROUPS))


def resolve_elastic(values: dict[str, Any]) -> dict[str, Any]:
    """Expand elastic=true; fill in elastic.agent from ELASTIC_AGENT, if a launcher of several hosts has set it."""
    elastic = values.get("elastic", {})
    if isinstance(elastic, bool):
        elastic = dict(SURVIVING) if elastic else {}
    if isinstance(elastic, dict) and elastic.get("min_workers") is not None:
        elastic = elastic | {"agent": elastic.get("agent") or os.environ.get("ELASTIC_AGENT")}
    return values | {"elastic": elastic}


def resolve_workers(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in workers.count and workers.per_host from the launcher's environment or the hardware."""
    workers = values.get("workers")
    if not isinstance(workers, dict) or workers.get("kind") not in ("processes", "simulated"):
        return values
    count, per_host = workers.get("count"), workers.get("per_host")
    elastic = values.get("elastic")
    elastic = elastic if isinstance(elastic, dict) else {}
    if workers["kind"] == "processes" and elastic.get("min_workers") is None:
        try:
            rank_environment.check_launcher()
        except ValueError as error:
            raise LauncherError(str(error)) from error
    launched = from_launcher("WORLD_SIZE")
    if workers["kind"] == "processes" and launched is not None:
        per_worker = (values.get("parallel") or {}).get("ranks_per_worker", 1)
        per_worker = per_worker if isinstance(per_worker, int) and per_worker > 0 else 1  # a wrong one is named later
        if launched % per_worker:
            where = f"parallel.ranks_per_worker={per_worker}"
            raise ConfigError(f"{where}: the launcher started {launched} processes, expected a divisor of that")
        available = launched // per_worker
        if count not in (None, available):
            raise ConfigError(
                f"workers.count={count}: the launcher started {launched} processes, expected {available} or null"
            )
        count = available
        per_host = per_host or max(1, (from_launcher("LOCAL_WORLD_SIZE") or launched) // per_worker)
    agent = elastic.get("agent")
    if agent is not None and (count is None or per_host is None):
        raise ConfigError(f"elastic.agent={agent}: expected workers.count and workers.per_host, too")
    if count is None:
        count = max(1, _gpus()) if workers["kind"] == "processes" else 1
    if isinstance(per_host, int) and isinstance(count, int) and per_host > 0 and count % per_host:
        raise ConfigError(f"workers.per_host={per_host}: expected a divisor of the number of workers, {count}")
    if per_host is None and isinstance(count, int) and count > 0:  # a wrong count is named once
        per_host = count
    return values | {"workers": workers | {"count": count, "per_host": per_host}}


def from_launcher(name: str) -> int | None:
    """Return what `common.rank_environment.from_launcher` does; raise LauncherError if that raises ValueError."""
    try:
        return rank_environment.from_launcher(name)
    except ValueError as error:
        raise LauncherError(str(error)) from error


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def explain(error: ValidationError, config_class: type[Config], given: dict[str, Any]) -> str:
    """Return a line for each mistake: key=value: expectation. given: the whole flat configuration."""
    return "\n".join(_explain_mistake(item, config_class, given) for item in error.errors())


def _explain_mistake(item: Mapping[str, Any], config_class: type[Config], given: dict[str, Any]) -> str:
    key = ".".join(locate(item["loc"], config_class)[0])
    match item["type"]:
        case "extra_forbidden":
            return f"{key}={item['input']!r}: no such key{suggestion(key, given)}"
        case "value_error":  # for one key the message begins with its value, for a group with a key in it
            message = item["msg"].removeprefix("Value error, ")
            return f"{key}{'.' if isinstance(item['input'], dict) else '='}{message}" if key else message
    return explain_mistake(item, config_class)
