"""What runs on every rank of scripts.benchmarks.hosts, and how it is timed.

torchrun ... -m scripts.benchmarks.measures measure=... rows=FILE ...          scripts.benchmarks.hosts starts it
"""

# ruff: noqa: E402
import time

BEGAN = time.time()  # before the other imports: they are nearly all of a start

import contextlib
import json
import math
import os
import resource
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from common.cli import UsageError, main_function
from common.parallel.collectives import gather_objects
from common.parallel.process_groups import process_group
from common.planner.conditions import CONDITIONS, Condition
from scripts.benchmarks.arguments import (
    BETWEEN,
    METHODS,
    STAGGERED,
    AveragingArguments,
    HostsArguments,
    Row,
    ScalingArguments,
    StepArguments,
    read,
)
from scripts.benchmarks.engines import ENGINES, LAYERS, MODELS, TIMEOUT_S, Engine, Layers, gossip, of_method
from scripts.benchmarks.rounds import median_and_spread
from scripts.emulate.compute import EmulatedCompute

WARM_UP = 6  # steps before the timed ones
ONCE = ("peak_mb", "startup_s", "first_step_s", "ready_s")  # of each process


@main_function
def main(argv: Sequence[str]) -> int:
    """Measure on emulated hosts; rank 0 leaves the rows in a file."""
    arguments = read(argv)
    rows = measured(arguments)
    if rows is not None:
        Path(arguments.rows).write_text(json.dumps(rows), encoding="utf-8")
    return 0


def measured(arguments: HostsArguments) -> list[Row] | None:
    """Return what all ranks of this launcher measure, on rank 0; None on others. Raises UsageError."""
    measure = {"averaging": averaging, "scaling": scaling, "step": step}[arguments.measure]
    if arguments.measure == "step":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # emulated hosts share the machine's cores, and nothing else
        torch.set_num_threads(1)
    try:
        with process_group(TIMEOUT_S) as device:
            names, L = layout()
            known = {
                "workers": len(names),
                "hosts": len(names) // L,
                "ranks_per_host": L,
                "mbit_per_s": None if arguments.mbit_per_s is None else float(arguments.mbit_per_s),
            }
            rows = [known | row for row in measure(arguments, device, L)]
            dist.barrier()
            return rows if dist.get_rank() == 0 else None
    except ValueError as error:
        raise UsageError(str(error)) from None


def layout() -> tuple[list[str], int]:
    """Return (every rank's host, number of ranks on each), from the launcher's LOCAL_WORLD_SIZE or the hosts' names.

    Raises ValueError unless every host has the same number of consecutive ranks.
    """
    # Emulated hosts share their name: the launcher's group tells them apart.
    name = socket.gethostname() + (f"#{os.environ['GROUP_RANK']}" if "GROUP_RANK" in os.environ else "")
    names = gather_objects(name)
    L = int(os.environ.get("LOCAL_WORLD_SIZE", names.count(name)))
    blocks = [names[start : start + L] for start in range(0, len(names), L)]
    alike = all(block == [block[0]] * L for block in blocks)
    if not alike or len({block[0] for block in blocks}) < len(blocks):
        raise ValueError(f"ranks on hosts {', '.join(names)}: expected equally many on each, one host after another")
    return names, L


def steps(engine: Engine, loss: Callable[[nn.Module], Tensor], count: int, device: torch.device) -> float:
    """Return the seconds of a step of this rank, mean over `count`."""
    begin = time.perf_counter()
    for _ in range(count):
        loss(engine.model).backward()
        engine.update()
    finish(device)
    return (time.perf_counter() - begin) / count


def rounds(engine: Engine, one: Callable[[int], float], count: int, steps: int) -> dict[str, object]:
    """Return what this rank measures in rounds of steps: seconds of a step in each, and per step bytes and waiting."""
    before, waited = bytes_sent_by_host(), engine.waited_s()
    seconds = [one(steps) for _ in range(count)]
    if waited is not None:
        waited = (engine.waited_s() - waited) / (steps * count)
    dist.barrier()  # only now has everybody sent all that it had to send
    sent = None if before is None else (bytes_sent_by_host() - before) / (steps * count)
    with contextlib.suppress(RuntimeError):
        engine.close()
    return {"rounds": seconds, "sent": sent, "waited": waited}


def step(arguments: StepArguments, device: torch.device, L: int) -> Iterator[Row]:
    """Yield a row of the one engine that `arguments` name for each compute_ms."""
    for index, compute_ms in enumerate(map(float, arguments.compute_ms.split(","))):
        measured = step_of(arguments, compute_ms, device, L)
        measured["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        if index > 0:  # a process starts once, and its peak never falls
            measured |= dict.fromkeys(ONCE)
        yield summary(gather_objects(measured)) | {"compute_ms": compute_ms}


def step_of(arguments: StepArguments, compute_ms: float, device: torch.device, L: int) -> dict[str, object]:
    """Return what this rank measures: seconds of a step in each round and of the start, bytes of its host in a step."""
    torch.manual_seed(0)
    module, loss = MODELS[arguments.models]()
    payload = sum(p.nbytes for p in module.parameters())
    if compute_ms:
        # The engine sees the module's parameters under the emulation, as it would see them in the module.
        condition = CONDITIONS[arguments.conditions]
        factor = condition.slow_host if dist.get_rank() < L else 1.0  # the first host is the slow one
        module, loss = emulated(module, compute_ms, condition, factor), lambda model: model()
    bucket_mb = arguments.bucket_of(arguments.engines)
    engine = ENGINES[arguments.engines](module, arguments.topologies, bucket_mb, L)
    one = partial(steps, engine, loss, device=device)
    started = time.time() - BEGAN
    dist.barrier()
    first = one(1)
    dist.barrier()
    one(WARM_UP - 1)
    dist.barrier()
    warm = time.time() - BEGAN
    found = rounds(engine, one, arguments.rounds, arguments.steps)
    ready = warm - WARM_UP * statistics.median(found["rounds"])
    return found | {"payload_mb": payload / 1e6, "startup_s": started, "first_step_s": first, "ready_s": ready}


def emulated(module: nn.Module, compute_ms: float, condition: Condition, factor: float) -> EmulatedCompute:
    """Return the module with this rank's waits in place of its computing."""
    return EmulatedCompute(module, compute_ms, condition=condition, factor=factor, seed=(0, dist.get_rank()))


def summary(everywhere: Sequence[dict]) -> Row:
    """Return one row from what all ranks measured."""
    means = [statistics.mean(seconds) for seconds in zip(*(rank["rounds"] for rank in everywhere), strict=True)]
    waited = [rank["waited"] for rank in everywhere]
    return {
        "step_ms": 1000 * statistics.median(means),
        "step_ms_spread": 1000 * (max(means) - min(means)),
        "waited_ms": None if None in waited else 1000 * statistics.mean(waited),
        "bytes_per_host": max(rank["sent"] or 0 for rank in everywhere),
        **{name: max((r[name] for r in everywhere if r[name] is not None), default=None) for name in ONCE},
        "payload_mb": everywhere[0]["payload_mb"],
    }


def scaling(arguments: ScalingArguments, device: torch.device, L: int) -> Iterator[Row]:
    """Yield a row for each method; print why where one does not exist for these workers."""
    for method in (METHODS[name] for name in arguments.methods.split(",")):
        module, compute = share_of_batch(arguments, device, L)
        try:
            engine = of_method(module, method, arguments.bucket_mb, L)
        except ValueError as error:
            say(f"{method.label}: skipped: {error}")
            continue
        one = partial(steps, engine, lambda model: model(), device=device)
        one(arguments.steps)
        dist.barrier()
        everywhere = gather_objects(rounds(engine, one, arguments.blocks, arguments.steps))
        means = [statistics.mean(seconds) for seconds in zip(*(rank["rounds"] for rank in everywhere), strict=True)]
        median, spread = median_and_spread(means)
        name, *options = method.topology.split("/")
        yield {
            "method": method.label,
            "engine": "ddp" if method.all_reduces else "ours",
            "topology": name + " between hosts" * ("between_hosts" in options),
            "payload_mb": sum(p.nbytes for p in module.parameters()) / 1e6,
            "compute": compute,
            "step_ms": 1000 * median,
            "step_ms_spread": 1000 * spread,
            "bytes_per_host": mean_over_hosts([rank["sent"] for rank in everywhere], L),
        }


def share_of_batch(arguments: ScalingArguments, device: torch.device, L: int) -> tuple[nn.Module, str]:
    """Return a worker's share of the global batch: a module whose forward() gives the loss, and its description."""
    n, rank = dist.get_world_size(), dist.get_rank()
    module = Layers(arguments.payload_mb, math.ceil(arguments.samples / n), device)
    if not arguments.compute_ms:
        return module, f"{LAYERS} linear layers, {len(module.inputs)} samples"
    compute_ms, factor = arguments.compute_ms / n, 1.0
    said = [f"wait of {compute_ms:g} ms"]
    if arguments.jitter:
        said.append(f"jitter {arguments.jitter:g}")
    if arguments.slow_host:
        host, times = arguments.slow_host.split("@")
        if not 1 <= int(host) <= n // L:
            raise UsageError(f"slow_host={arguments.slow_host}: expected a host from 1 to {n // L}")
        said.append(f"host {host} {times} times slower")
        factor = float(times) if rank // L + 1 == int(host) else 1.0
    return emulated(module, compute_ms, Condition("jitter", variation=arguments.jitter), factor), ", ".join(said)


def averaging(arguments: AveragingArguments, device: torch.device, L: int) -> Iterator[Row]:
    """Yield a row for each topology; print why where one does not exist for these workers."""
    for name in arguments.topologies.split(","):
        try:
            iterate, close = averager(name, device, L, arguments)
        except (ValueError, TypeError) as error:
            say(f"{name}: skipped: {error}")
            continue
        for _ in range(2):  # they open connections
            iterate()
        finish(device)
        dist.barrier()
        sent, begin = bytes_sent_by_host(), time.perf_counter()
        for _ in tqdm(range(arguments.iterations), desc=name, disable=dist.get_rank() != 0, mininterval=5):
            iterate()
        finish(device)
        seconds = max(gather_objects(time.perf_counter() - begin))
        used = None if sent is None else (bytes_sent_by_host() - sent) / arguments.iterations
        close()
        yield {
            "topology": name,
            "backend": dist.get_backend(),
            "iterations": arguments.iterations,
            "tensors": f"{arguments.tensors} x {arguments.tensor_mb:g} MB fp32",
            "seconds": seconds,
            "seconds_per_iteration": seconds / arguments.iterations,
            "bytes_per_host": mean_over_hosts(gather_objects(used), L),
        }


def averager(
    name: str, device: torch.device, L: int, arguments: AveragingArguments
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return (one iteration, close). Raises ValueError where the topology does not exist. Collective."""
    numel = round(arguments.tensor_mb * 1e6 / 4)
    tensors = [torch.zeros(numel, device=device) for _ in range(arguments.tensors)]
    if name == "allreduce":

        def all_reduce() -> None:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for one, tensor in zip(works, tensors, strict=True):
                one.wait()
                tensor.div_(dist.get_world_size())

        return all_reduce, lambda: None
    module = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)
    topology = name.replace(BETWEEN, "/between_hosts").replace(STAGGERED, "/staggered")
    model = gossip(module, topology, arguments.bucket_mb or arguments.tensor_mb * 1e6 / 2**20, L)

    def iterate() -> None:
        model.mixer.launch()
        model.mixer.merge()

    return iterate, model.close


def bytes_sent_by_host() -> int | None:
    """Return the bytes, headers included, that the interface GLOO_SOCKET_IFNAME has sent; None where none is named."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, values = line.partition(":")
        if device.strip() == name:
            return int(values.split()[8])
    return None


def mean_over_hosts(values: Sequence[float | None], L: int) -> float | None:
    """Return the mean of the values of each host's first rank, None if one of them is None."""
    firsts = values[::L]
    return None if None in firsts else sum(firsts) / len(firsts)


def finish(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def say(text: str) -> None:
    """Print a line on stderr, from rank 0."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
