"""Several runs by one command line: `python -m cnn.train -m seed=1,2 optimizer.lr=1e-3,2e-3`, one after the other."""

import os
import shlex
import sys

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from common.cli import one_line
from common.config.config import Config, ConfigError
from common.config.overrides import as_hydra_reads, quoted
from common.launch.compose import compose_config, from_launcher
from common.launch.processes import INTERRUPTED, execute, refuse
from common.training.task import load_task


def run_all(task: str, overrides: list[str]) -> int:
    """Train every combination of the values that overrides list; return the largest exit code.

    All are checked before the first one starts. A run that is interrupted ends the command; the same command with
    resume=true goes on.
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

    Where several would get one run_dir, each takes a folder in it, named after the values in which they differ.
    Raises ConfigError for the first combination that cannot be run.
    """
    words = as_hydra_reads(load_task(task).config_class, overrides)
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
        runs.append((job, config))
    return runs
