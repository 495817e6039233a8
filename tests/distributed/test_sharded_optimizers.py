"""The optimizers on DTensors: each rank updates its shards, and together they are what the whole tensors become."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from common.optim import AccumAdam, AccumAdamW, DmSGD, QGDmSGD, compiled
from common.optim.foreach import CPU_CHUNK_BYTES
from tests.distributed.processes import run_processes
from tests.naming import case

# Larger than a chunk even on one rank, unevenly shared, only on the first rank, empty everywhere, one-dimensional.
SHAPES = [(601, 450), (7, 5), (1, 3), (0, 4), (33,)]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "accumadamw": lambda p: AccumAdamW(p, lr=0.01, weight_decay=0.1, accumulation_steps=3),
    "accumadamw plain loop": lambda p: AccumAdamW(p, lr=0.01, weight_decay=0.1, accumulation_steps=3, foreach=False),
    "accumadam": lambda p: AccumAdam(p, lr=0.01, weight_decay=0.1, accumulation_steps=2),
    "accumadamw without windows": lambda p: AccumAdamW(p, lr=0.01, accumulation_steps=1),
    "dmsgd": lambda p: DmSGD(p, lr=0.01, weight_decay=0.1),
    "qg_dmsgd": lambda p: QGDmSGD(p, lr=0.01, weight_decay=0.1),
}
FUSED = {"fused accumadamw": lambda p: AccumAdamW(p, lr=0.01, weight_decay=0.1, accumulation_steps=3, fused=True)}


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def trained(optimizers: dict[str, Callable], place: Callable[[Tensor], Tensor]) -> dict[str, list[Tensor]]:
    """Return parameters and state after some steps of each optimizer on tensors placed by `place`, whole."""
    results = {}
    for name, build in optimizers.items():
        parameters = [nn.Parameter(place(value)) for value in values(0)]
        optimizer = build(parameters)
        for step in range(1, 6):
            for parameter, gradient in zip(parameters, values(step), strict=True):
                parameter.grad = place(gradient)
            versions = [parameter._version for parameter in parameters]
            optimizer.step()
            assert all(p._version > version for p, version in zip(parameters, versions, strict=True))
        state = [v for p in parameters for v in optimizer.state[p].values() if isinstance(v, Tensor)]
        results[name] = [whole(tensor) for tensor in [*parameters, *state]]
    return results


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def compare(rank: int, n: int, optimizers: list[str]) -> None:
    mesh = init_device_mesh("cpu", (n,))
    chosen = {name: (OPTIMIZERS | FUSED)[name] for name in optimizers}
    expected = trained(chosen, lambda tensor: tensor)
    for placement in (Shard(0), Replicate()):
        got = trained(chosen, lambda tensor, placement=placement: distribute_tensor(tensor, mesh, [placement]))
        for name, tensors in expected.items():
            assert len(got[name]) == len(tensors) > len(SHAPES)
            for shard, tensor in zip(got[name], tensors, strict=True):
                with case(name, placement, tuple(tensor.shape)):
                    torch.testing.assert_close(shard, tensor, rtol=0, atol=0)


def test_shards_become_what_the_whole_becomes_bit_for_bit() -> None:
    assert 4 * SHAPES[0][0] // 2 * SHAPES[0][1] > CPU_CHUNK_BYTES
    run_processes(compare, 2, list(OPTIMIZERS))


@pytest.mark.slow
def test_fused() -> None:
    run_processes(compare, 2, list(FUSED))


def state_is_placed_as_parameters(rank: int, n: int) -> None:
    compiled.fused_kernel = compiled.written_kernel  # takes no time to compile
    mesh = init_device_mesh("cpu", (n,))
    for fused in (False, True):
        parameter = nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))
        optimizers = [AccumAdamW([parameter], fused=fused) for _ in range(2)]
        parameter.grad = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
        optimizers[0].step()
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        optimizers[1].step()
        for optimizer in optimizers:
            state = optimizer.state[parameter]
            for name in ("exp_avg", "exp_avg_sq", "accumulator"):
                assert state[name].placements == (Shard(0),)
                assert state[name].shape == (5, 3)
        assert optimizers[1].state[parameter]["step"] == 2
        torch.testing.assert_close(whole(state["accumulator"]), torch.full((5, 3), 0.5), rtol=0, atol=0)


def test_state_is_placed_as_parameters_and_loads() -> None:
    run_processes(state_is_placed_as_parameters, 2)


def other_placements(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (n,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()])
    options = [{"foreach": None}, {"foreach": False}, {"fused": True}]
    for optimizer in [*(AccumAdamW([parameter], **option) for option in options), DmSGD([parameter], lr=0.1)]:
        with pytest.raises(RuntimeError, match=r"shape \(4, 3\) is placed as .*Replicate.*gradient.*Partial.*expected"):
            optimizer.step()


def test_gradients_placed_otherwise_are_refused() -> None:
    run_processes(other_placements, 2)
