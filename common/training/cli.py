"""The command line of a task: `python -m cnn.train key=value ...`."""

import os
import sys

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from common.training.compose import CONFIGS, check, explain_composition
from common.training.config import ConfigError
from common.training.launch import execute, refuse
from common.training.multirun import run_all
from common.training.task import load_task


def main(task: str) -> None:
    """Run Hydra's command line for configs/<task>.yaml; ends the process with the run's exit code, or the largest."""
    arguments = get_args_parser().parse_args()
    if arguments.multirun and arguments.cfg is None and not arguments.help:
        sys.exit(run_all(task, arguments.overrides))  # Hydra's own ends with the first run, whose exit ends the process
    wanted = os.environ.get("HYDRA_FULL_ERROR", "0")

    def run(composed: DictConfig) -> None:
        os.environ["HYDRA_FULL_ERROR"] = wanted
        try:
            overrides = list(HydraConfig.get().overrides.task)
            sys.exit(execute(check(load_task(task), composed), overrides))
        except ConfigError as error:
            sys.exit(refuse(error))

    # Hydra would print its own errors and exit with 1; with this set it raises them instead.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=task)(run)()
    except (HydraException, OmegaConfBaseException) as error:
        os.environ["HYDRA_FULL_ERROR"] = wanted
        refused = ConfigError(explain_composition(error, task))
        refused.__cause__ = error
        sys.exit(refuse(refused))
