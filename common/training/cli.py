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
from common.training.task import load_task

ONE_RUN = "a command trains one run; python -m scripts.reproduce trains all runs of a table"


def main(task: str) -> None:
    """Run Hydra's command line for configs/<task>.yaml; ends the process with the run's exit code."""
    if wants_multirun():
        sys.exit(refuse(ConfigError(f"--multirun (-m, hydra.mode=MULTIRUN): {ONE_RUN}")))
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
        advice = "To sweep over it, add --multirun to your command line"  # Hydra's, on key=1,2
        refused = ConfigError(explain_composition(error, task).replace(advice, f"For several runs: {ONE_RUN}"))
        refused.__cause__ = error
        sys.exit(refuse(refused))


def wants_multirun() -> bool:
    """Return whether sys.argv asks Hydra for several runs, of which the first one's exit would end the process."""
    arguments = get_args_parser().parse_args()
    modes = [text.partition("=") for text in arguments.overrides]
    return arguments.multirun or any(key.lstrip("+") == "hydra.mode" and mode != "RUN" for key, _, mode in modes)
