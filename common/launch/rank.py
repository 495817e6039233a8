"""One process of a run: from a checked configuration to the training loop, and how it ends."""

import os
import socket
import sys
import time
import traceback

import torch.distributed as dist

from common.config.config import Config, ConfigError
from common.launch.compose import LauncherError, from_launcher
from common.parallel.collectives import gather_objects
from common.parallel.process_groups import open_process_group
from common.parallel.pulse import open_pulse
from common.record import BAD_CONFIGURATION, FAILED, FINISHED, INTERRUPTED
from common.record.checkpoint import CheckpointError
from common.record.run_folder import FinishedError, RunFolder, open_on_first
from common.training.device import prepare_device
from common.training.loop import train
from common.training.run import new_run
from common.training.task import load_task

# The least timeout of the default process group, where ranks wait while others prepare data or rank 0 writes a model. A
# rank that hangs in training is found after parallel.timeout_s, by the groups of the model; a rank that was stopped is
# found by its pulse, 10 s later at the latest.
ALONE_S = 1800.0
# How long other ranks leave it to rank 0 to report a shared error: launchers end all ranks when the first one ends, and
# a rank may be slow to import. torch's launcher (True) ends them as soon as rank 0 has spoken.
SPEAKER_S = {True: 15.0, False: 1.0}


def run_rank(config: Config, overrides: list[str], start: str | None = None) -> int:
    """Run this process's part; return the exit code. A rank that fails among others ends its process instead.

    start: the start for which the launching process has claimed the run folder, if there is one
    """
    launched = from_launcher("RANK")
    distributed = launched is not None and config.workers.kind == "processes"
    rank = launched if launched is not None and distributed else 0
    folder, pulse, code = None, None, FAILED
    try:
        task_class = load_task(config.task)
        device = prepare_device(config, task_class.fixed_shapes, distributed)
        if distributed:
            pulse = open_pulse(config.parallel.timeout_s)
        task = task_class(config)
        if distributed:
            try:
                open_process_group(device, max(config.parallel.timeout_s, ALONE_S))
            except ValueError as error:
                raise ConfigError(str(error)) from error
        # Not earlier: other ranks, which may start later, learn from rank 0 whether the folder is refused.
        folder = open_on_first(lambda: RunFolder(config, overrides, start))
        hosts = gather_objects(socket.gethostname())
        if folder is not None:
            folder.record_hosts(hosts)
        status = train(new_run(task, config, device, rank, folder))
        code = FINISHED if status == "finished" else INTERRUPTED
    except FinishedError as error:
        code = FINISHED
        if rank == 0:
            print(error, file=sys.stderr)
    except (ConfigError, CheckpointError) as error:
        if folder is not None:
            folder.withdraw()
        code = refuse(error, alike=False)
    except Exception as error:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        if folder is not None:
            folder.fail(error)
    finally:
        if folder is not None:
            folder.close()
        if pulse is not None:
            pulse.close()
        if distributed and dist.is_initialized():
            leave_process_group(code)
    return code


def leave_process_group(code: int) -> None:
    """Close the process group after success; after a failure among several ranks end this process at once.

    Closing waits for collectives in flight. On GPUs these never end without the peers, so the launcher would learn of a
    failure only after the timeout of NCCL's watchdog, and would get neither its exit code nor its message.
    """
    if code in (FINISHED, INTERRUPTED) or dist.get_world_size() == 1:
        dist.destroy_process_group()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(error: Exception, alike: bool = True) -> int:
    """Print what is wrong with the configuration or data; with HYDRA_FULL_ERROR=1 also where it was found.

    Of several ranks, rank 0 speaks. Another rank speaks if it is still alive after a wait: rank 0 had nothing to say.

    alike: whether all ranks are certain to have this error
    """
    rank = int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() else 0
    if rank > 0:
        under_torch = "TORCHELASTIC_RUN_ID" in os.environ
        time.sleep(SPEAKER_S[under_torch])
        if alike and not under_torch and not isinstance(error, LauncherError):
            return BAD_CONFIGURATION
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    print(f"{f'rank {rank}: ' if rank else ''}error: {error}", file=sys.stderr, flush=True)
    return BAD_CONFIGURATION
