"""The command line of a task: `python -m cnn.train key=value ...`, with -m for several runs, one after the other."""

import contextlib
import os
import shlex
import sys
from argparse import Namespace
from pathlib import Path

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from common.cli import one_line
from common.config.config import Config, ConfigError
from common.config.overrides import CONFIGS, as_hydra_reads, quoted
from common.launch.compose import VERSION_BASE, compose_config, explain_composition, from_launcher
from common.launch.processes import execute, launch
from common.launch.rank import refuse
from common.record import INTERRUPTED
from common.training.signals import StoppedError, stopped_at_once
from common.training.task import load_task

ONE_OF = ("run", "multirun", "cfg", "info", "shell_completion")


def main(task: str) -> None:
    """Run Hydra's command line for configs/<task>.yaml; end the process with the (largest) exit code."""
    arguments = get_args_parser().parse_args()
    try:
        check_flags(task, arguments)
        if arguments.help or arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion:
            show(task, arguments)
            return
    except ConfigError as error:
        sys.exit(refuse(error))
    path = arguments.config_dir and quoted(f"file://{Path(arguments.config_dir).resolve()}")
    folder = [f"hydra.searchpath=[{path}]"] if path else []
    try:
        # A launcher ends its processes with signals, at once if need be.
        with contextlib.nullcontext() if os.environ.get("RANK") else stopped_at_once():
            # Hydra's own multirun ends with the first run, whose exit ends the process.
            code = (run_all if arguments.multirun else launch)(task, [*folder, *arguments.overrides])
    except StoppedError as stopped:
        print(f"{stopped}: stopped before or after training, nothing is lost", file=sys.stderr, flush=True)
        code = INTERRUPTED
    sys.exit(code)


def check_flags(task: str, arguments: Namespace) -> None:
    """Raise ConfigError for flags of Hydra that would be ignored."""
    given = [f"--{name.replace('_', '-')}" for name in ONE_OF if getattr(arguments, name)]
    if len(given) > 1:
        raise ConfigError(f"{' '.join(given)}: expected one of them")
    for name in ("config_name", "config_path", "experimental_rerun"):
        if getattr(arguments, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: expected none: this command trains by configs/{task}.yaml")
    if arguments.config_dir and not Path(arguments.config_dir).is_dir():
        raise ConfigError(f"--config-dir {arguments.config_dir}: no such folder")
    if arguments.config_dir and arguments.multirun:
        raise ConfigError(f"--config-dir {arguments.config_dir} with --multirun: expected one run, or configs/")


def run_all(task: str, overrides: list[str]) -> int:
    """Train every combination of the values that overrides list; return the largest exit code.

    All are checked before the first one starts. A run that is interrupted ends the command; the same command with
    resume=true continues.
    """
    try:
        if from_launcher("RANK") is not None:
            raise ConfigError("--multirun: expected one run under torchrun or srun; local processes take several")
        jobs = combinations(task, overrides)
    except ConfigError as error:
        return refuse(error)
    worst = 0
    for number, (values, config) in enumerate(jobs, 1):
        print(f"run {number} of {len(jobs)}: {config.run_dir}", file=sys.stderr, flush=True)
        try:
            code = execute(config, values)
        except ConfigError as error:
            code = refuse(error)
        worst = max(worst, code)
        if code == INTERRUPTED:
            break
    folder = os.path.relpath(os.path.commonpath([os.path.abspath(config.run_dir) for _, config in jobs]))
    print(
        f"a table of these runs: python -m scripts.tables {shlex.quote(f'runs={folder}')}", file=sys.stderr, flush=True
    )
    return worst


def combinations(task: str, overrides: list[str]) -> list[tuple[list[str], Config]]:
    """Return the overrides and the configuration of every run; no two share a folder.

    If several would share a run_dir, each gets a folder in it, named after the values in which they differ.
    Raises ConfigError for the first combination that cannot be run.
    """
    words = as_hydra_reads(load_task(task).config_class, overrides, several=True)
    try:
        parsed = OverridesParser.create().parse_overrides(words)
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise ConfigError(one_line(error)) from error
    configs = [compose_config(task, job) for job in jobs]
    runs = []
    for job, config in zip(jobs, configs, strict=True):
        alike = [other for other, its in zip(jobs, configs, strict=True) if its.run_dir == config.run_dir]
        shared = set.intersection(*map(set, alike))
        if name := ",".join(value for value in job if value not in shared).replace("/", "_"):
            folder = f"{config.run_dir}/{name}"
            job = [*(value for value in job if not value.startswith("run_dir=")), f"run_dir={quoted(folder)}"]
            config = config.model_copy(update={"run_dir": folder})
        if config.run_dir in [other.run_dir for _, other in runs]:
            raise ConfigError(f"--multirun: two runs with run_dir={config.run_dir}: expected each value once")
        runs.append((job, config))
    return runs


def show(task: str, arguments: Namespace) -> None:
    """Let Hydra print help or the configuration. Raises ConfigError if the configuration cannot be composed."""
    words = iter(as_hydra_reads(load_task(task).config_class, arguments.overrides))
    flags = [word for word in sys.argv[1:] if word not in arguments.overrides]
    sys.argv[1:] = [*flags, *words]
    # Hydra would print its own errors and exit with 1; with this set it raises them instead.
    wanted = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(**VERSION_BASE, config_path=str(CONFIGS), config_name=task)(_nothing)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_composition(error, task)) from error
    finally:
        os.environ["HYDRA_FULL_ERROR"] = wanted


def _nothing(composed: DictConfig) -> None:
    """Stand in for the program, which Hydra does not call when it only shows something."""
