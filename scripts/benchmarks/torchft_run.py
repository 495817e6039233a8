"""Train the cnn task with torchft until killed: workers that average gradients, and new ones for those that die.

scripts.benchmarks.recovery runs it as `python -m scripts.benchmarks.torchft_run WORKERS LIGHTHOUSE_MS [overrides ...]`.
Every worker is a replica group of one process and notes its steps in STEPS_FOLDER. The lighthouse takes a worker for
dead that was silent for LIGHTHOUSE_MS and waits for others as long; 0: as torchft has it.
"""

import logging
import multiprocessing
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from common.launch.compose import compose_config
from common.training.optimization import build_optimizer
from common.training.stream import Stream
from common.training.task import load_task
from scripts.benchmarks.task import Note, write_note

MODULE = "scripts.benchmarks.torchft_run"
TIMEOUT = timedelta(seconds=30)


def main(workers: int, lighthouse_ms: int, overrides: list[str]) -> None:
    """Keep as many workers running as were asked for."""
    from torchft.coordination import LighthouseServer

    timeouts = dict.fromkeys(("heartbeat_timeout_ms", "join_timeout_ms"), lighthouse_ms) if lighthouse_ms else {}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, **timeouts)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchft", "cnn.task", "sklearn.datasets", "sklearn.model_selection", MODULE])
    running: dict[int, multiprocessing.process.BaseProcess] = {}
    while True:
        for rank in range(workers):
            if rank not in running or not running[rank].is_alive():
                running[rank] = context.Process(target=work, args=(lighthouse.address(), rank, workers, overrides))
                running[rank].start()
        time.sleep(0.02)


def work(lighthouse: str, rank: int, workers: int, overrides: list[str]) -> None:
    """Train as worker `rank` without end."""
    from torchft import Manager, ProcessGroupGloo

    logging.disable(logging.WARNING)  # torchft writes about every step
    config = compose_config("cnn", [*overrides, "workers=simulated", f"workers.count={workers}"])
    torch.set_num_threads(config.training.threads or torch.get_num_threads())
    torch.manual_seed(config.seed)
    task, device = load_task("cnn")(config), torch.device("cpu")
    model = task.build_model()
    optimizer, parts = build_optimizer(config.optimizer, config.lr, model), [*model.parameters()]
    data = task.train_data(rank, workers, config.training.batch_size // workers, device)
    stream = Stream(data, config.seed, rank, device, workers)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), timeout=TIMEOUT, min_replica_size=2, lighthouse_addr=lighthouse,
        state_dict=lambda: [part.state_dict() for part in (model, optimizer)],
        load_state_dict=lambda states: [p.load_state_dict(s) for p, s in zip((model, optimizer), states, strict=True)],
        rank=0, world_size=1, replica_id=f"worker_{rank}_", store_addr="localhost", store_port=store.port,
    )  # fmt: skip
    while True:
        begun = time.time()
        manager.start_quorum()
        optimizer.zero_grad()
        with stream.random.active():
            task.loss(model, next(stream)).backward()
        # One message for all gradients; torchft's DistributedDataParallel ends the survivors of a death.
        flat = torch.cat([part.grad.flatten() for part in parts])
        manager.allreduce(flat).wait()
        for part, mean in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.grad.copy_(mean.view_as(part))
        counts = manager.is_participating()
        if manager.should_commit():
            optimizer.step()
            if counts:  # what tells quorums apart has no public name
                write_note(Note(begun, manager.num_participants(), manager._quorum_id))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
