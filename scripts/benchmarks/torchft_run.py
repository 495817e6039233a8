"""Train the cnn task with torchft: a lighthouse, workers that average gradients, and new ones for those that die.

python -m scripts.benchmarks.torchft_run workers=4 [patience_ms=300] [overrides=[model.width=4,...]]

Every worker notes its steps in STEPS_FOLDER. It is a replica group of torchft of one process. The program runs until
it is killed.
"""

import logging
import multiprocessing
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.distributed import TCPStore

from common.cli import Arguments, main_function, parse
from common.training.compose import compose_config
from common.training.optimization import build_optimizer
from common.training.stream import Stream
from common.training.task import load_task
from scripts.benchmarks.timed.notes import Note, Notes

MODULE = "scripts.benchmarks.torchft_run"
TASK = "cnn"
LOOK_EVERY_S = 0.02  # for dead workers
TIMEOUT = timedelta(seconds=30)


class RunArguments(Arguments):
    """Command line of scripts.benchmarks.torchft_run.

    patience_ms: how long the lighthouse takes a silent worker for alive, and waits for others; None: as torchft has it
    """

    workers: PositiveInt = 4
    patience_ms: PositiveInt | None = None
    overrides: tuple[str, ...] = ()


@main_function
def main(argv: Sequence[str]) -> int:
    """Keep as many workers running as were asked for."""
    from torchft.coordination import LighthouseServer

    arguments = parse(RunArguments, argv, MODULE, "Train with torchft.")
    milliseconds = arguments.patience_ms
    patience = {} if milliseconds is None else dict.fromkeys(("heartbeat_timeout_ms", "join_timeout_ms"), milliseconds)
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, **patience)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchft", "cnn.task", "sklearn.datasets", "sklearn.model_selection", MODULE])

    def start(rank: int) -> BaseProcess:
        process = context.Process(target=work, args=(lighthouse.address(), rank, arguments))
        process.start()
        return process

    workers = [start(rank) for rank in range(arguments.workers)]
    while True:
        workers = [worker if worker.is_alive() else start(rank) for rank, worker in enumerate(workers)]
        time.sleep(LOOK_EVERY_S)


def work(lighthouse: str, rank: int, arguments: RunArguments) -> None:
    """Train as worker `rank` without end."""
    from torchft import Manager, ProcessGroupGloo

    logging.disable(logging.WARNING)  # torchft writes about every step
    config = compose_config(TASK, [*arguments.overrides, "workers=simulated", f"workers.count={arguments.workers}"])
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    torch.manual_seed(config.seed)
    task, device = load_task(TASK)(config), torch.device("cpu")
    model = task.build_model()
    optimizer = build_optimizer(config.optimizer, config.lr, model)
    local_batch = config.training.batch_size // arguments.workers
    data = task.train_data(rank, arguments.workers, local_batch, device)
    stream = Stream(data, config.seed, rank, device, arguments.workers)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, dict]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=2,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker_{rank}_",
    )
    notes = Notes()
    while True:
        begun = time.time()
        manager.start_quorum()
        optimizer.zero_grad()
        with stream.random.active():
            task.loss(model, next(stream)).backward()
        average(manager, [parameter.grad for parameter in model.parameters()])
        counts = manager.is_participating()
        if manager.should_commit():
            optimizer.step()
            if counts:
                # What tells quorums apart has no public name.
                notes.write(Note(begun, manager.num_participants(), manager._quorum_id))


def average(manager: Any, gradients: Sequence[Tensor]) -> None:
    """Average gradients in one message; torchft's DistributedDataParallel ends the survivors of a death."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


if __name__ == "__main__":
    sys.exit(main())
