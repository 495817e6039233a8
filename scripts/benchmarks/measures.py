"""What runs on every rank of scripts.benchmarks.hosts, and how it is timed.

torchrun ... -m scripts.benchmarks.measures measure=... rows=FILE ...          scripts.benchmarks.hosts starts it
"""

# ruff: noqa: E402
import time

BEGAN = time.time()  # before the other imports, which take most of the startup time

import contextlib
import json
import os
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.cli import UsageError, main_function
from common.parallel.collectives import gather_objects
from common.parallel.process_groups import process_group
from common.planner.conditions import CONDITIONS
from common.rank_environment import from_launcher
from scripts.benchmarks.arguments import (
    BETWEEN,
    METHODS,
    AveragingArguments,
    HostsArguments,
    Row,
    ScalingArguments,
    StepArguments,
    read,
)
from scripts.benchmarks.engines import MODELS, TIMEOUT_S, EmulatedCompute, Engine, engine_of, equal_layers, gossip

WARM_UP = 6  # steps of measure=step before the timed ones
ONCE = ("peak_mb", "startup_s", "first_step_s", "ready_s")  # measured once per process


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
            workers, L = dist.get_world_size(), from_launcher("LOCAL_WORLD_SIZE") or 1
            if workers % L:
                raise ValueError(f"{workers} ranks, {L} of them on this host: expected equally many on each")
            known = {
                "workers": workers,
                "hosts": workers // L,
                "ranks_per_host": L,
                "mbit_per_s": None if arguments.mbit_per_s is None else float(arguments.mbit_per_s),
            }
            rows = [known | row for row in measure(arguments, device, L)]
            dist.barrier()
            return rows if dist.get_rank() == 0 else None
    except ValueError as error:
        raise UsageError(str(error)) from None


def seconds_of(step: Callable[[], object], device: torch.device, count: int) -> float:
    """Return the seconds of a step of this rank, mean over `count`."""
    begin = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / count


def rounds(engine: Engine, one: Callable[[int], float], count: int, steps: int) -> Row:
    """Return what this rank measures in rounds of steps: seconds of a step in each, and per step bytes and waiting."""
    dist.barrier()
    before, waited = bytes_sent_by_host(), engine.waited_s()
    seconds = [one(steps) for _ in range(count)]
    if waited is not None:
        waited = (engine.waited_s() - waited) / (steps * count)
    dist.barrier()  # only now has every rank sent everything
    sent = None if before is None else (bytes_sent_by_host() - before) / (steps * count)
    with contextlib.suppress(RuntimeError):
        engine.close()
    return {"rounds": seconds, "sent": sent, "waited": waited}


def bytes_sent_by_host() -> int | None:
    """Return the bytes, headers included, that the interface GLOO_SOCKET_IFNAME has sent; None where none is named."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, values = line.partition(":")
        if device.strip() == name:
            return int(values.split()[8])
    return None


def mean_over_hosts(everywhere: Sequence[Row], L: int) -> float | None:
    """Return the mean number of bytes that a host sends, from each host's first rank; None if unknown."""
    firsts = [rank["sent"] for rank in everywhere[::L]]
    return None if None in firsts else statistics.mean(firsts)


def say(text: str) -> None:
    """Print a line on stderr, from rank 0."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


# -- averaging


def averaging(arguments: AveragingArguments, device: torch.device, L: int) -> Iterator[Row]:
    """Yield a row for each topology; print why if one does not exist for these workers."""
    for name in arguments.topologies.split(","):
        try:
            engine = averager(name, device, L, arguments)
        except (ValueError, TypeError) as error:
            say(f"{name}: skipped: {error}")
            continue
        one = partial(seconds_of, engine.update, device)
        one(2)  # the first ones open connections
        everywhere = gather_objects(rounds(engine, one, 1, arguments.iterations))
        slowest = max(rank["rounds"][0] for rank in everywhere)
        yield {
            "topology": name,
            "backend": dist.get_backend(),
            "iterations": arguments.iterations,
            "tensors": f"{arguments.tensors} x {arguments.tensor_mb:g} MB fp32",
            "seconds": slowest * arguments.iterations,
            "seconds_per_iteration": slowest,
            "bytes_per_host": mean_over_hosts(everywhere, L),
        }


def averager(name: str, device: torch.device, L: int, arguments: AveragingArguments) -> Engine:
    """Return an engine whose update averages. Raises ValueError if the topology does not exist. Collective."""
    numel = round(arguments.tensor_mb * 1e6 / 4)
    tensors = [torch.zeros(numel, device=device) for _ in range(arguments.tensors)]
    module = nn.ParameterList(map(nn.Parameter, tensors))

    def all_reduce() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            tensor.div_(dist.get_world_size())

    if name == "allreduce":
        return Engine(module, all_reduce)
    model = gossip(module, name.replace(BETWEEN, "/between_hosts"), arguments.tensor_mb * 1e6 / 2**20, L)  # one each

    def gossip_once() -> None:
        model.mixer.launch()
        model.mixer.merge()

    return Engine(model, gossip_once, model.close)


# -- steps


def training_step(engine: Engine, loss: Callable[[nn.Module], Tensor]) -> Callable[[], None]:
    """Return a step of training."""

    def step() -> None:
        loss(engine.model).backward()
        engine.update()

    return step


def means_of(everywhere: Sequence[Row]) -> list[float]:
    """Return the seconds of a step in each round, mean over ranks."""
    return [statistics.mean(seconds) for seconds in zip(*(rank["rounds"] for rank in everywhere), strict=True)]


def scaling(arguments: ScalingArguments, device: torch.device, L: int) -> Iterator[Row]:
    """Yield a row for each method; print why if one does not exist for these workers."""
    compute_ms = arguments.compute_ms / dist.get_world_size()
    for method in (METHODS[name] for name in arguments.methods.split(",")):
        layers = equal_layers(arguments.payload_mb, device)
        module = EmulatedCompute(layers, compute_ms)
        bucket_mb = method.bucket_mb or arguments.bucket_mb
        try:
            engine = engine_of(method.engine, module, method.topology, bucket_mb, L, method.accumulation_steps)
        except ValueError as error:
            say(f"{method.label}: skipped: {error}")
            continue
        one = partial(seconds_of, training_step(engine, lambda model: model()), device)
        one(arguments.steps)
        everywhere = gather_objects(rounds(engine, one, arguments.blocks, arguments.steps))
        low, median, high = statistics.quantiles(means_of(everywhere), n=4)
        name, *options = method.topology.split("/")
        yield {
            "method": method.label,
            "engine": "ddp" if method.engine == "allreduce" else "ours",
            "topology": name + " between hosts" * ("between_hosts" in options),
            "payload_mb": sum(p.nbytes for p in module.parameters()) / 1e6,
            "compute": f"wait of {compute_ms:g} ms",
            "step_ms": 1000 * median,
            "step_ms_spread": 1000 * (high - low),
            "bytes_per_host": mean_over_hosts(everywhere, L),
        }


def step(arguments: StepArguments, device: torch.device, L: int) -> Iterator[Row]:
    """Yield a row for each compute_ms, for the one engine that `arguments` name."""
    for index, compute_ms in enumerate(map(float, arguments.compute_ms.split(","))):
        measured = step_of(arguments, compute_ms, device, L)
        everywhere = gather_objects(measured)
        means, waited = means_of(everywhere), [rank["waited"] for rank in everywhere]
        yield {
            "compute_ms": compute_ms,
            "step_ms": 1000 * statistics.median(means),
            "step_ms_spread": 1000 * (max(means) - min(means)),
            "waited_ms": None if None in waited else 1000 * statistics.mean(waited),
            "bytes_per_host": max(rank["sent"] or 0 for rank in everywhere),
            "payload_mb": measured["payload_mb"],
            # A process starts once, and its peak never falls.
            **{name: None if index > 0 else max(rank[name] for rank in everywhere) for name in ONCE},
        }


def step_of(arguments: StepArguments, compute_ms: float, device: torch.device, L: int) -> Row:
    """Return what this rank measures: seconds of a step in each round and of the start, bytes of its host in a step."""
    torch.manual_seed(0)
    module, loss = MODELS[arguments.models]()
    payload = sum(p.nbytes for p in module.parameters())
    if compute_ms:
        # The engine sees the module's parameters under the emulation, as it would see them in the module.
        condition, rank = CONDITIONS[arguments.conditions], dist.get_rank()
        factor = condition.slow_host if rank < L else 1.0  # the first host is the slow one
        module = EmulatedCompute(module, compute_ms, condition.variation_of(factor, (0, rank)))
        loss = lambda model: model()  # noqa: E731
    bucket_mb = arguments.bucket_of(arguments.engines)
    engine = engine_of(arguments.engines, module, arguments.topologies, bucket_mb, L)
    one = partial(seconds_of, training_step(engine, loss), device)
    started = time.time() - BEGAN
    dist.barrier()
    first = one(1)
    dist.barrier()
    one(WARM_UP - 1)
    dist.barrier()
    warm = time.time() - BEGAN
    found = rounds(engine, one, arguments.rounds, arguments.steps)
    ready = warm - WARM_UP * statistics.median(found["rounds"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    once = {"peak_mb": peak, "startup_s": started, "first_step_s": first, "ready_s": ready}
    return found | once | {"payload_mb": payload / 1e6}


if __name__ == "__main__":
    sys.exit(main())
