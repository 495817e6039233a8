"""Start of a run whose workers may leave and join: its agent, the other hosts' part, and one of its processes."""

import os
import signal
import socket
import sys
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from common.config.base import FORMER_BOOKKEEPING
from common.config.config import Config, ConfigError
from common.config.elastic import Workers, ranks_of, split
from common.elastic.agent import Agent
from common.elastic.host import LocalHost
from common.elastic.loop import train_elastically
from common.elastic.membership import Member
from common.elastic.remote import RefusedError, serve
from common.elastic.wire import LOCAL, Hello, listen, only_here
from common.interruptible import server_context
from common.launch.compose import from_launcher
from common.launch.rank import refuse
from common.parallel.making_groups import NewGroups, groups_of_members
from common.record import FAILED, FINISHED, INTERRUPTED
from common.record.checkpoint import CheckpointError
from common.record.run_folder import RunFolder, checkpoints_of, claimed, fingerprint
from common.training.device import prepare_device
from common.training.run import new_run
from common.training.signals import SIGNALS
from common.training.task import load_task


def run_elastically(config: Config, overrides: list[str]) -> int:
    """Run this host's part of a run whose workers go on when others die; return the exit code of the run.

    The leading host, or the only one, runs the agent. Raises ConfigError, or FinishedError as `claimed` does.
    """
    if config.n < 2:
        where = f"elastic.min_workers={config.elastic.min_workers}"
        raise ConfigError(f"{where} with workers.count={config.n}: expected at least 2 workers")
    make_groups(config, 0, torch.device("cpu"))  # to fail at once if this torch cannot
    listener = listen_for_hosts(config)
    if config.elastic.agent is not None and listener is None:
        return serve_agent(config, overrides)
    with claimed(config) as start:
        saved = checkpoints_of(config).members() if config.resume else None
        first = Workers(saved) if saved else config.all_workers
        agent = Agent(
            local_host(config, overrides),
            config.ranks,
            ranks_of(first, config.ranks_per_worker),
            config.elastic,
            config.parallel.timeout_s,
            per_worker=config.ranks_per_worker,
            per_host=(config.workers.per_host or config.n) * config.ranks_per_worker if listener else None,
            listener=listener,
            address=split(config.elastic.agent)[0] if config.elastic.agent else LOCAL,
            fingerprint=fingerprint(config, FORMER_BOOKKEEPING),  # hosts must wait and give up alike
            start=start,
            secret=os.environ.get("ELASTIC_SECRET", ""),
        )
        return agent.run()


def listen_for_hosts(config: Config) -> socket.socket | None:
    """Listen for other hosts if this one leads: ELASTIC_LEADS is not 0 and the agent's address is on this host.

    Raises ConfigError if that fails, or other hosts could not reach the address.
    """
    address, leads = config.elastic.agent, os.environ.get("ELASTIC_LEADS")
    if address is None or leads == "0":
        return None
    try:
        listener = listen(address)
    except (OSError, ValueError) as error:
        raise ConfigError(f"elastic.agent={address}: {error}") from error
    if listener is None:
        if leads == "1":
            raise ConfigError(f"elastic.agent={address}: expected a free port and an address of this host, which leads")
        return None
    place, named = listener.getsockname()[0], split(address)[0]
    if only_here(place) and (config.workers.per_host or config.n) < config.n:
        if named not in (place, "localhost"):
            listener.close()
            raise ConfigError(
                f"elastic.agent={address}: {named} is {place} on this host, where others cannot reach it; expected the "
                "address that they know"
            )
        print(f"elastic.agent={address}: {place} can be reached from this machine only", file=sys.stderr)
    if not (only_here(place) or os.environ.get("ELASTIC_SECRET")):
        print(
            f"elastic.agent={address}: ELASTIC_SECRET (the same on all hosts) is not set: anyone who reaches this port "
            "and knows the configuration can join the run",
            file=sys.stderr,
        )
    return listener


def serve_agent(config: Config, overrides: list[str]) -> int:
    """Run workers of this host for the agent on another host; return the exit code of the run."""
    agent, hello = config.elastic.agent or "", Hello(socket.gethostname(), fingerprint(config, FORMER_BOOKKEEPING))
    try:
        secret = os.environ.get("ELASTIC_SECRET", "")
        return serve(agent, local_host(config, overrides), hello, config.parallel.timeout_s, secret)
    except RefusedError as error:
        raise ConfigError(f"elastic.agent={error}") from error


def preloaded(task: str) -> list[str]:
    """Return the modules to import in the server from which workers are forked."""
    launching = ["common.launch.fork_server", f"{task}.task", "common.launch.processes"]
    return [*launching, "torch._dynamo", *load_task(task).late_imports]


def local_host(config: Config, overrides: list[str]) -> LocalHost:
    """Return this host, whose workers are forked from a server that imports everything once."""
    if from_launcher("RANK") is not None:
        where = f"elastic.min_workers={config.elastic.min_workers}"
        raise ConfigError(f"{where} under torchrun: expected a plain start: dead workers would end the job")
    context = server_context(preloaded(config.task))
    # The server starts now, to warm up a host that waits to replace another, and ignores SIGTERM, which Slurm sends to
    # all processes: without the server, workers that are still saving would seem to be dead.
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


def make_groups(config: Config, number: int, device: torch.device) -> NewGroups:
    """Return the maker of a process's groups. Raises ConfigError if this torch or this device does not support it."""
    if device.type != "cpu" and config.ranks_per_worker > 1:
        # NCCL reports too late that an average of gradients is torn.
        raise ConfigError(f"parallel.ranks_per_worker={config.ranks_per_worker} with elastic on GPUs: expected 1")
    try:
        return groups_of_members(config.elastic.groups, number, device)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def run_member(task: str, values: dict, overrides: list[str], number: int, connection: Connection) -> None:
    """Run a local process that the agent has started, and end it with the run's exit code. number: of its rank."""
    # The server that it was forked from ignores SIGTERM; before it trains there is nothing to save.
    for asks in SIGNALS:
        signal.signal(asks, signal.SIG_DFL)
    config = load_task(task).config_class.model_validate(values)
    per_host = (config.workers.per_host or config.n) * config.ranks_per_worker
    os.environ |= {"LOCAL_RANK": str(number % per_host), "LOCAL_WORLD_SIZE": str(per_host)}
    recorder, code = None, FAILED
    try:
        task_class = load_task(task)
        device = prepare_device(config, task_class.fixed_shapes, distributed=True)
        member = Member(number, connection, make_groups(config, number, device))
        run = new_run(task_class(config), config, device, number, None)
        recorder = run.recorder
        status = train_elastically(run, member, lambda start: RunFolder(config, overrides, start))
        member.disconnect(lost=False)
        code = FINISHED if status == "finished" else INTERRUPTED
    except (ConfigError, CheckpointError) as error:
        if number > 0:
            time.sleep(1)  # rank 0 says what is wrong; the agent ends all others when the first one ends
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
