"""Ranks that exchange messages train as the simulator does, in every way to communicate."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.parallel import Outer
from common.topology import NAMES
from tests.cuda.test_processes import on_streams
from tests.distributed.comparison import assert_equal_to_simulator
from tests.distributed.scenarios import Scenario, in_process, simulated
from tests.distributed.sharded import in_sharded_process
from tests.gpu.device import Device, on_gpu, on_slow_cpu_too

CHECK = 7, "ranks train as simulated workers do"
SIZES = (2, 4, 5, 7, 8)  # numbers of ranks; the largest that fits sees every case, unless ranks share a GPU
OPTIMIZERS = ("momentum", "accumadamw", "fused_accumadamw")
TRANSPORTS = ("auto", "send_recv", "subgroup")
# (parameters, messages): the largest allowed difference; parameters are of the order of 1.
TOLERANCES = {
    (torch.float32, None): 5e-4,
    (torch.bfloat16, None): 0.06,
    (torch.float32, torch.bfloat16): 0.04,
    (torch.float32, torch.float16): 0.01,
    (torch.float32, torch.int8): 0.04,
}
ON_CPU = ((torch.bfloat16, None), (torch.float32, torch.int8))
LATE = [(4, 1, 1), (4, 2, 1), (4, 4, 1), (6, 2, 3)]  # merged at once, late, a round late, by fragments
SHARED = ("complete", "one_peer_exponential", "aer")


def local(steps: int, merge_after: int, fragments: int) -> dict[str, Any]:
    outer = Outer(lr=0.4, momentum=0.5)
    return {"local_steps": steps, "merge_after": merge_after, "fragments": fragments, "outer": outer}


def hosts(n: int) -> list[int]:
    return [1, n // 2] if n > 2 and n % 2 == 0 else [1]


def cases(n: int, dtype: torch.dtype, message_dtype: torch.dtype | None, every: bool) -> Iterator[Scenario]:
    """Yield all combinations of topology, order, phases and transport, or each topology with both orders.

    Optimizers, hosts, and otherwise transports, take turns.
    """
    optimizers, sizes, transports = (itertools.cycle(choices) for choices in (OPTIMIZERS, hosts(n), TRANSPORTS))
    options = {} if message_dtype is None else {"message_dtype": message_dtype}
    for name, order, phases in itertools.product(NAMES, ("awc", "atc"), ("aligned", "staggered")):
        if every or phases == "aligned" or (name, order) == ("aer", "awc"):
            for transport in TRANSPORTS if every else [next(transports)]:
                chosen = {} if transport == "auto" else {"transport": transport}
                yield Scenario(
                    topology=name, workers_per_host=next(sizes), optimizer=next(optimizers), dtype=dtype,
                    order=order, phases=phases, options=options | chosen,
                )  # fmt: skip
    if (dtype, message_dtype) == (torch.float32, None):
        for name in NAMES:
            yield Scenario(topology=name, workers_per_host=hosts(n)[-1], optimizer="fused_accumadamw")
        for name in SHARED:
            base = Scenario(topology=name, workers_per_host=hosts(n)[-1])
            yield from (replace(base, optimizer="accumadamw", local=local(*late)) for late in LATE)
            yield replace(base, optimizer="momentum", order="atc", local=local(4, 0, 1))


def sharded_cases() -> Iterator[Scenario]:
    base = Scenario(ranks_per_worker=2, options={"timeout_s": 60})
    yield from (replace(base, topology=name, optimizer=how) for name in SHARED for how in OPTIMIZERS)
    yield replace(base, topology="one_peer_exponential", optimizer="momentum", local=local(4, 2, 1))


def exists(scenario: Scenario, n: int) -> bool:
    try:
        simulated(n // scenario.ranks_per_worker, scenario)
    except (ValueError, TypeError):
        return False
    return True


def compare(
    device: Device,
    n: int,
    scenarios: Iterable[Scenario],
    tolerance: float,
    run: Callable[..., Any],
    backend: str = "staged",
) -> int:
    """Check the scenarios that exist for n ranks and return their number."""
    steps = {"steps": 50 if device.on_gpu else 12, "device": device.name, "compiled": device.on_gpu}
    chosen = [replace(scenario, **steps) for scenario in scenarios if exists(scenario, n)][:: 1 if device.on_gpu else 3]
    timeout = 60.0 + 10 * len(chosen)
    assert_equal_to_simulator(n, chosen, 0, tolerance, device.backend if device.on_gpu else backend, run, timeout)
    return len(chosen)


@pytest.mark.parametrize("dtypes", TOLERANCES, ids=str)
@on_slow_cpu_too
def test_every_way_to_communicate(
    dtypes: tuple[torch.dtype, torch.dtype | None], device: Device, figure: Callable[[str], None]
) -> None:
    if not device.on_gpu and dtypes not in ON_CPU:
        pytest.skip("on CPUs tests.distributed and tests.cuda do this")
    sizes = [n for n in SIZES if n <= device.ranks] if device.on_gpu else [4]
    for n in sizes:
        every = device.gpus > 1 and n == sizes[-1]
        run = in_process if device.on_gpu else on_streams
        count = compare(device, n, cases(n, *dtypes, every), TOLERANCES[dtypes], run)
        figure(f"{count} cases on {n} ranks")
    figure(device.carriers)


@on_gpu
def test_workers_that_share_out_their_parameters(device: Device, figure: Callable[[str], None]) -> None:
    if device.backend == "staged":
        pytest.skip("FSDP needs NCCL, which does not let ranks share a GPU here")
    for n in (n for n in SIZES if n <= device.ranks and n % 2 == 0):
        count = compare(device, n, sharded_cases(), TOLERANCES[torch.float32, None], in_sharded_process)
        figure(f"{count} cases with shards on {n} ranks")
