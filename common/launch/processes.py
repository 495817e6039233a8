"""Start of a run: in this process, under torchrun or srun, or in local processes that are started here."""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from common.config.config import Config, ConfigError
from common.config.elastic import ranks_of, split
from common.elastic.agent import Agent
from common.elastic.host import LocalHost, RefusedError, serve
from common.elastic.loop import train_elastically
from common.elastic.membership import Member
from common.elastic.wire import LOCAL, Hello, listen, only_here
from common.launch.compose import LauncherError, compose_config, from_launcher
from common.parallel.collectives import gather_objects
from common.parallel.process_groups import gpu_shortage, local_device, open_process_group
from common.parallel.pulse import open_pulse
from common.record.checkpoint import CheckpointError, Checkpoints
from common.record.exits import BAD_CONFIGURATION, FAILED, FINISHED, INTERRUPTED
from common.record.run_folder import (
    FinishedError,
    RunFolder,
    claimed,
    fingerprint,
    first_fingerprint,
    open_on_first,
    read_status,
)
from common.sockets import shorten_socket_paths
from common.training.loop import train
from common.training.numerics import configure_gpu, require_determinism
from common.training.recorder import Recorder
from common.training.session import Setup
from common.training.signals import SIGNALS
from common.training.task import load_task

# Patience with ranks that prepare data or, as rank 0, write models while others wait, in the default process group. A
# rank that hangs in training is found after parallel.timeout_s, by the groups of the model; one that is stopped, 10 s
# later at the latest, by its pulse.
ALONE_S = 1800.0
# Patience of other ranks with rank 0, which says what is wrong with all: launchers end all when the first one ends, and
# one rank may be slower to import than others. torch's launcher ends them at once when rank 0 has spoken.
SPEAKER_S = {True: 15.0, False: 1.0}


def launch(task: str, overrides: list[str]) -> int:
    """Compose configs/<task>.yaml with the overrides, check it, run it; return the exit code."""
    try:
        config = compose_config(task, overrides)
        return execute(config, overrides)
    except ConfigError as error:
        return refuse(error)


def refuse(error: Exception, alike: bool = True) -> int:
    """Print what is wrong with the configuration or data; with HYDRA_FULL_ERROR=1 also where it was found.

    Of several ranks rank 0 speaks. Another one does if it is still there after that: rank 0 had nothing to say.

    alike: whether the error is that of all ranks for certain
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


def execute(config: Config, overrides: list[str]) -> int:
    """Run a checked configuration where its workers live; return the exit code."""
    check_start(config)
    door = open_door(config)
    if config.elastic.agent is not None and door is None:
        return serve_agent(config, overrides)
    elastic = config.elastic.min_workers is not None
    if not elastic and (config.workers.kind == "simulated" or config.ranks == 1 or from_launcher("RANK") is not None):
        return run_here(config, overrides)
    try:
        with claimed(config) as start:
            if elastic:
                return run_elastically(config, overrides, door, start)
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
        begun = any(Path(config.run_dir).glob("checkpoints/step_*/manifest.json"))
        if config.init_from is not None and not begun and not Path(config.init_from).is_file():
            raise ConfigError(f"init_from={config.init_from}: cannot be read: no such file")


def preloaded(task: str) -> list[str]:
    """Return the modules that the server imports from which workers are forked."""
    return ["common.launch.fork_server", f"{task}.task", __name__, "torch._dynamo", *load_task(task).late_imports]


def open_door(config: Config) -> socket.socket | None:
    """Listen for other hosts, if this is the one that leads: ELASTIC_LEADS is not 0 and it has that address.

    Raises ConfigError if nobody can listen there, or not where the other hosts look for it.
    """
    address, leads = config.elastic.agent, os.environ.get("ELASTIC_LEADS")
    if address is None or leads == "0":
        return None
    try:
        door = listen(address)
    except (OSError, ValueError) as error:
        raise ConfigError(f"elastic.agent={address}: {error}") from error
    if door is None:
        if leads == "1":
            raise ConfigError(f"elastic.agent={address}: expected a free port and an address of this host, which leads")
        return None
    place, named = door.getsockname()[0], split(address)[0]
    if only_here(place) and (config.workers.per_host or config.n) < config.n:
        if named not in (place, "localhost"):
            door.close()
            raise ConfigError(
                f"elastic.agent={address}: {named} is {place} on this host, where others cannot reach it; expected the "
                "address that they know"
            )
        print(f"elastic.agent={address}: only this machine reaches {place}, no other host", file=sys.stderr)
    if not (only_here(place) or os.environ.get("ELASTIC_SECRET")):
        print(
            f"elastic.agent={address}: without ELASTIC_SECRET, the same on all hosts, whoever reaches this port and "
            "knows the configuration can join the run",
            file=sys.stderr,
        )
    return door


def run_elastically(config: Config, overrides: list[str], door: socket.socket | None, start: str) -> int:
    """Start workers that go on when others die, see common.elastic.agent; return the exit code of the run.

    door:  where other hosts ask to be taken, if there are any
    start: for which this process has claimed the run folder
    """
    if config.n < 2:
        where = f"elastic.min_workers={config.elastic.min_workers}"
        raise ConfigError(f"{where} with workers.count={config.n}: expected at least 2 workers")
    first = (make_checkpoints(config).members() if config.resume else None) or tuple(range(config.n))
    agent = Agent(
        local_host(config, overrides),
        config.ranks,
        ranks_of(first, config.ranks_per_worker),
        config.elastic,
        config.parallel.timeout_s,
        per_worker=config.ranks_per_worker,
        per_host=(config.workers.per_host or config.n) * config.ranks_per_worker if door else None,
        door=door,
        address=split(config.elastic.agent)[0] if config.elastic.agent else LOCAL,
        fingerprint=fingerprint(config),
        start=start,
        secret=os.environ.get("ELASTIC_SECRET", ""),
    )
    return agent.run()


def serve_agent(config: Config, overrides: list[str]) -> int:
    """Run workers of this host for the agent of another one; return the exit code of the run."""
    agent, hello = config.elastic.agent or "", Hello(socket.gethostname(), fingerprint(config))
    try:
        secret = os.environ.get("ELASTIC_SECRET", "")
        return serve(agent, local_host(config, overrides), hello, config.parallel.timeout_s, secret)
    except RefusedError as error:
        raise ConfigError(f"elastic.agent={error}") from error


def local_host(config: Config, overrides: list[str]) -> LocalHost:
    """Return this host, whose workers are forked from a server that imports everything once."""
    if from_launcher("RANK") is not None:
        where = f"elastic.min_workers={config.elastic.min_workers}"
        raise ConfigError(f"{where} under torchrun: expected a plain start: dead workers would end the job")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded(config.task))
    shorten_socket_paths()
    # A host that waits to replace another one is warm. Slurm sends SIGTERM to all processes: without the server the
    # workers, which save, would seem to be dead.
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGTERM, former)

    def process(number: int, connection: Connection) -> BaseProcess:
        return context.Process(
            target=run_member,
            args=(config.task, config.model_dump(), overrides, number, connection),
            name=f"rank {number}",
        )

    return LocalHost(process)


def run_in_local_processes(config: Config, overrides: list[str], start: str) -> int:
    """Start workers on this machine through torch's elastic launcher; return the exit code.

    They are forked from a server that imports everything once and stays warm for the next run. start: for which this
    process has claimed the run folder
    """
    multiprocessing.set_forkserver_preload(preloaded(config.task))
    shorten_socket_paths()
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
        local_addr="localhost",  # by its own name a host may not find itself
        signals_to_handle="",  # those below
        shutdown_timeout=int(ALONE_S),  # to save after a signal; after a failure torch waits for 30 s
    )
    # Workers print their own errors, the first one first; the launcher would only repeat them.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)
    # Elastic passes signals on to the workers, which save and stop, or end at once (SIGQUIT, and while they start).
    former = {number: signal.signal(number, stop_workers) for number in (*SIGNALS, signal.SIGQUIT)}
    try:
        elastic_launch(launcher, run_worker)(config.task, config.model_dump(), overrides, start)
    except SignalException as error:
        status = read_status(Path(config.run_dir))
        if error.sigval is signal.SIGQUIT or status == "failed":
            return FAILED
        return FINISHED if status == "finished" else INTERRUPTED  # also if nothing was trained yet
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"error: worker process {rank} died: {failure.message}", file=sys.stderr)
        return failure.exitcode if failure.exitcode in (BAD_CONFIGURATION, INTERRUPTED) else FAILED
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return FINISHED


def stop_workers(number: int, frame: FrameType | None) -> None:
    """Raise, as signal handler of the launching process, what makes elastic send the signal to the workers, once."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise SignalException(f"received signal {number}", signal.Signals(number))


@record
def run_worker(task: str, values: dict, overrides: list[str], start: str) -> None:
    """Run a local worker process, for which the launcher has set RANK and the other variables.

    Exits with the run's code: any but 0 makes the launcher end the other workers at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it starts it has nothing to save, and nothing to say
    code = run_here(load_task(task).config_class.model_validate(values), overrides, start)
    if code != FINISHED:
        sys.exit(code)


def run_member(task: str, values: dict, overrides: list[str], number: int, connection: Connection) -> None:
    """Run a local process that its agent has started; ends it with the run's exit code. number: of its rank."""
    for (
        asks
    ) in SIGNALS:  # the server that it was forked from ignores SIGTERM; before it trains there is nothing to save
        signal.signal(asks, signal.SIG_DFL)
    config = load_task(task).config_class.model_validate(values)
    per_host = (config.workers.per_host or config.n) * config.ranks_per_worker
    os.environ |= {"LOCAL_RANK": str(number % per_host), "LOCAL_WORLD_SIZE": str(per_host)}
    member, recorder, code = Member(number, connection), None, FAILED
    try:
        device = pick_device(config)
        if device.type != "cpu":
            raise ConfigError("elastic.min_workers on GPUs: expected training.device=cpu")
        torch.set_num_threads(config.training.threads or threads_per_process(distributed=True))
        loaded = load_task(task)(config)
        recorder = Recorder(config, loaded, None)
        setup = Setup(loaded, config, device, number, None, recorder, make_checkpoints(config))
        status = train_elastically(setup, member, lambda start: RunFolder(config, overrides, start))
        member.disconnect(lost=False)
        code = FINISHED if status == "finished" else INTERRUPTED
    except (ConfigError, CheckpointError) as error:
        if number > 0:
            time.sleep(1)  # rank 0 tells what is wrong; the agent ends all others when the first one ends
        code = refuse(error)
        if recorder is not None and recorder.folder is not None:
            recorder.folder.withdraw()
    except Exception as error:
        print(f"rank {number} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        if recorder is not None and recorder.folder is not None:  # a rank that takes it over writes how the run ends
            recorder.folder.fail(error)
    if recorder is not None and recorder.folder is not None:
        recorder.folder.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of broken connections may never end


def make_checkpoints(config: Config) -> Checkpoints:
    """Return the checkpoints of a run."""
    folder, keep = Path(config.run_dir) / "checkpoints", config.training.checkpoints_kept
    return Checkpoints(folder, fingerprint(config), keep, also=(first_fingerprint(config),))


def run_here(config: Config, overrides: list[str], start: str | None = None) -> int:
    """Run this process's part; return the exit code. A rank that fails among others ends its process instead.

    start: for which the launching process has claimed the run folder, if there is one
    """
    launched = from_launcher("RANK")
    distributed = launched is not None and config.workers.kind == "processes"
    rank = launched if launched is not None and distributed else 0
    folder, pulse, code = None, None, FAILED
    try:
        require_determinism(config.training.deterministic)
        device = pick_device(config)
        if device.type == "cuda":
            configure_gpu(config.training, load_task(config.task).fixed_shapes)
        simulated = config.workers.kind == "simulated" and device.type == "cpu"
        alone = simulated and not os.environ.get("OMP_NUM_THREADS")
        torch.set_num_threads(config.training.threads or (1 if alone else threads_per_process(distributed)))
        if distributed:
            pulse = open_pulse(config.parallel.timeout_s)
        task = load_task(config.task)(config)
        if distributed:
            try:
                open_process_group(device, max(config.parallel.timeout_s, ALONE_S))
            except ValueError as error:
                raise ConfigError(str(error)) from error
        # Not earlier: others, which may begin later, learn from rank 0 whether it is refused.
        folder = open_on_first(lambda: RunFolder(config, overrides, start))
        hosts = gather_objects(socket.gethostname())
        if folder is not None:
            folder.record_hosts(hosts)
        recorder = Recorder(config, task, folder)
        status = train(Setup(task, config, device, rank, folder, recorder, make_checkpoints(config)))
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

    Closing waits for collectives in flight. On GPUs they never end without the peers, so that the launcher would learn
    of a failure only when NCCL's watchdog loses patience, and of neither its exit code nor its message.
    """
    if code in (FINISHED, INTERRUPTED) or dist.get_world_size() == 1:
        dist.destroy_process_group()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def pick_device(config: Config) -> torch.device:
    """Return the configured device; each local process has its own GPU.

    With training.device=auto all take the CPU if there are too few GPUs. With cuda that raises ConfigError.
    """
    wanted = config.training.device
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "cuda":
        shortage = gpu_shortage() if torch.cuda.is_available() else "no GPU is available"
        if shortage is not None:
            raise ConfigError(f"training.device=cuda: {shortage}; expected a GPU for each of them, or cpu or auto")
    return local_device()


def threads_per_process(distributed: bool) -> int:
    """Return OMP_NUM_THREADS, or the number of CPU threads with which the local processes together use each core once.

    torchrun sets the variable to 1 where the user has not: that is not a wish.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and multiprocessing.parent_process() is None and wanted == "1"
    if wanted.isdecimal() and int(wanted) > 0 and not by_torchrun:
        return int(wanted)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (from_launcher("LOCAL_WORLD_SIZE") or 1 if distributed else 1))
