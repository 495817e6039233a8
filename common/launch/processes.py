"""Start of a run: in this process, under torchrun or srun, or in local processes that are started here."""

import logging
import signal
import sys
import uuid
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from common.config.config import Config, ConfigError
from common.interruptible import server_context
from common.launch.compose import compose_config, from_launcher
from common.launch.elastic import preloaded, run_elastically
from common.launch.rank import ALONE_S, refuse, run_rank
from common.record import BAD_CONFIGURATION, FAILED, FINISHED, FOLDERS, INTERRUPTED, read_status
from common.record.run_folder import FinishedError, claimed
from common.torch_internals import shutdown_timeout
from common.training.interruption import Interruption
from common.training.signals import SIGNALS
from common.training.task import load_task


def launch(task: str, overrides: list[str]) -> int:
    """Compose configs/<task>.yaml with the overrides, check it, run it; return the exit code."""
    try:
        config = compose_config(task, overrides)
        return execute(config, overrides)
    except ConfigError as error:
        return refuse(error)


def execute(config: Config, overrides: list[str]) -> int:
    """Run a checked configuration where its workers live; return the exit code."""
    check_start(config)
    try:
        if config.elastic.min_workers is not None:
            return run_elastically(config, overrides)
        if config.workers.kind == "simulated" or config.ranks == 1 or from_launcher("RANK") is not None:
            return run_rank(config, overrides)
        with claimed(config) as start:
            return run_in_local_processes(config, overrides, start)
    except FinishedError as error:
        print(error, file=sys.stderr)
        return FINISHED


def check_start(config: Config) -> None:
    """Raise ConfigError for errors that do not depend on the workers, before any worker or folder exists."""
    tasks = from_launcher("WORLD_SIZE") or from_launcher("SLURM_STEP_NUM_TASKS") or 1
    if config.workers.kind == "simulated" and tasks > 1:
        raise ConfigError(f"workers=simulated in {tasks} processes of a launcher: expected one, which simulates all")
    if tasks > 1 and from_launcher("WORLD_SIZE") == tasks and from_launcher("RANK") is None:
        raise ConfigError(f"WORLD_SIZE={tasks} in the environment without RANK: expected both, or neither")
    task = load_task(config.task)
    if not isinstance(config, task.config_class):
        raise ConfigError(f"task={config.task}: expected a task with the configuration of this command")
    if from_launcher("RANK") is None and read_status(Path(config.run_dir)) != "finished":
        task.check_files(config)
        begun = any(Path(config.run_dir).glob(f"checkpoints/{FOLDERS}/manifest.json"))
        if config.init_from is not None and not begun and not Path(config.init_from).is_file():
            raise ConfigError(f"init_from={config.init_from}: cannot be read: no such file")


def run_in_local_processes(config: Config, overrides: list[str], start: str) -> int:
    """Start workers on this machine through torch's elastic launcher; return the exit code.

    They are forked from a server that imports everything once and stays warm for the next run. start: the start for
    which this process has claimed the run folder
    """
    server_context(preloaded(config.task))
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="forkserver",
        monitor_interval=0.1,
        local_addr="localhost",  # a host may not find itself under its own name
        signals_to_handle="",  # handled below
        **shutdown_timeout(int(ALONE_S)),  # to save after a signal; after a failure torch waits for 30 s
    )
    # Workers print their own errors, the first one first; the launcher would only repeat them.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)
    # Elastic passes signals on to the workers, which save and stop, or end at once (SIGQUIT, and while they start).
    former = {number: signal.signal(number, stop_workers) for number in (*SIGNALS, signal.SIGQUIT)}
    summary = Path(config.run_dir) / "summary.json"
    earlier = summary.stat().st_mtime_ns if summary.exists() else None
    try:
        elastic_launch(launcher, run_worker)(config.task, config.model_dump(), overrides, start)
    except SignalException as error:
        status = read_status(summary.parent)
        if error.sigval is signal.SIGQUIT or (status == "failed" and summary.stat().st_mtime_ns != earlier):
            return FAILED
        return FINISHED if status == "finished" else INTERRUPTED  # also if nothing was trained yet
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"error: worker process {rank} died: {failure.message}", file=sys.stderr)
        if failure.exitcode == INTERRUPTED and read_status(summary.parent) == "finished":
            return FINISHED
        return failure.exitcode if failure.exitcode in (BAD_CONFIGURATION, INTERRUPTED) else FAILED
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return FINISHED


def stop_workers(number: int, frame: FrameType | None) -> None:
    """Handle a signal in the launching process, once: raise the exception by which elastic sends it to the workers."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise SignalException(f"received signal {number}", signal.Signals(number))


@record
def run_worker(task: str, values: dict, overrides: list[str], start: str) -> None:
    """Run a local worker process, for which the launcher has set RANK and the other variables.

    Exits with the run's code: any but 0 makes the launcher end the other workers at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it starts it has nothing to save, and nothing to say
    code = run_rank(load_task(task).config_class.model_validate(values), overrides, start)
    if code != FINISHED or Interruption.heard:  # torch would wait for a launcher that was interrupted too
        sys.exit(code or INTERRUPTED)
