"""The command line of a task: `python -m cnn.train key=value ...`."""

import contextlib
import os
import sys
from argparse import Namespace
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from common.config.config import ConfigError
from common.config.overrides import CONFIGS, as_hydra_reads
from common.launch.compose import explain_composition
from common.launch.multirun import run_all
from common.launch.processes import launch, refuse
from common.record import INTERRUPTED
from common.training.signals import StoppedError, stopped_at_once
from common.training.task import load_task

ONE_OF = ("run", "multirun", "cfg", "info", "shell_completion")


def main(task: str) -> None:
    """Run Hydra's command line for configs/<task>.yaml; ends the process with the run's exit code, or the largest."""
    arguments = get_args_parser().parse_args()
    try:
        check_flags(task, arguments)
        if arguments.help or arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion:
            show(task, arguments)
            return
    except ConfigError as error:
        sys.exit(refuse(error))
    folder = [f"hydra.searchpath=[file://{Path(arguments.config_dir).resolve()}]"] if arguments.config_dir else []
    try:
        # A launcher ends its processes by signals, at once if need be.
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


def show(task: str, arguments: Namespace) -> None:
    """Let Hydra print help or the configuration. Raises ConfigError if the configuration cannot be composed."""
    words = iter(as_hydra_reads(load_task(task).config_class, arguments.overrides))
    flags = [word for word in sys.argv[1:] if word not in arguments.overrides]
    sys.argv[1:] = [*flags, *words]
    # Hydra would print its own errors and exit with 1; with this set it raises them instead.
    wanted = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=task)(_nothing)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_composition(error, task)) from error
    finally:
        os.environ["HYDRA_FULL_ERROR"] = wanted


def _nothing(composed: DictConfig) -> None:
    """Stand for the program, which Hydra does not call where it only shows something."""
