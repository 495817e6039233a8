"""At the start everybody has what rank 0 has, under the names of the bare module."""

from unittest import mock

import torch
from torch import Tensor, nn

from common.parallel import AllReduceDataParallel, DecentralizedDataParallel
from tests.distributed import models
from tests.distributed.processes import run_processes


class Everything(nn.Module):
    """Trained and frozen parameters and buffers of many dtypes and layouts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        # Contiguous in both memory formats at once.
        self.pointwise = nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last)
        self.tied = nn.ParameterList([self.conv.weight])
        self.narrow = nn.Parameter(torch.randn(7).bfloat16())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.frozen = nn.Parameter(torch.randn(4, 5).t(), requires_grad=False)
        self.count = nn.Parameter(torch.randint(0, 2**60, (3,), generator=generator), requires_grad=False)
        self.register_buffer("mean", torch.randn(3, generator=generator))
        self.register_buffer("wide", torch.randn(3, generator=generator).double() / 3)
        self.register_buffer("index", torch.randint(-(2**62), 2**62, (2, 2), generator=generator))
        self.register_buffer("mask", torch.rand(9, generator=generator) < 0.5)
        self.register_buffer("step", torch.tensor(seed))
        self.register_buffer("secret", torch.randn(2, generator=generator), persistent=False)
        for parameter in self.parameters():
            if parameter.is_floating_point():
                nn.init.normal_(parameter, generator=generator)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def wrapped(rank: int, n: int) -> list[tuple[dict, dict, list[str]]]:
    results = []
    for wrapper in (AllReduceDataParallel, lambda module: DecentralizedDataParallel(module, "ring")):
        module = Everything(seed=rank)
        strides = {name: tensor.stride() for name, tensor in tensors(module).items()}
        model = wrapper(module)
        assert {name: tensor.stride() for name, tensor in tensors(module).items()} == strides
        assert module.tied[0] is module.conv.weight
        results.append((tensors(module), dict(model.state_dict()), [name for name, _ in model.named_parameters()]))
    return results


def test_rank_0_reaches_everybody_bit_for_bit() -> None:
    bare = Everything(seed=0)
    expected = tensors(bare)
    for results in run_processes(wrapped, 3):
        for got, state, names in results:
            assert got.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(got[name], value), name
                assert got[name].dtype == value.dtype
            assert state.keys() == bare.state_dict().keys()
            assert names == [name for name, _ in bare.named_parameters()]
            Everything(seed=5).load_state_dict(state, strict=True)


def broadcasts(rank: int, n: int, seeds: tuple[int, ...]) -> int:
    with mock.patch("torch.distributed.broadcast", wraps=torch.distributed.broadcast) as broadcast:
        DecentralizedDataParallel(Everything(seed=seeds[rank]), "ring")
    return broadcast.call_count


def test_nothing_is_sent_to_ranks_that_have_the_same_bits() -> None:
    assert run_processes(broadcasts, 3, (4, 4, 4)) == [0, 0, 0]
    one_differs = run_processes(broadcasts, 3, (4, 4, 5))
    assert one_differs[0] > 0
    assert len(set(one_differs)) == 1


GROUPS = {  # beside the one of all ranks for control, and the one for messages between peers
    "one_peer_exponential": 2,
    "random_matching": 2,
    "base_k": 2,
    "ring": 2,
    "complete": 2 + 2,  # shards are all-reduced between 4 hosts of two ranks, by each rank of a host
    "aer": 2,  # shards travel between pairs
}


def groups_opened(rank: int, n: int) -> dict[str, int]:
    opened = {}
    for topology in GROUPS:
        with mock.patch("torch.distributed.new_group", wraps=torch.distributed.new_group) as new_group:
            DecentralizedDataParallel(models.mlp(), topology, workers_per_host=2)
        opened[topology] = new_group.call_count
    return opened


def test_few_process_groups() -> None:
    assert run_processes(groups_opened, 8) == [GROUPS] * 8
