"""Restoring, and which buffers are averaged."""

import pytest
import torch
from torch import nn

from common.parallel import averaging, collectives
from common.parallel.averaging import average_buffers_, averageable_buffers, restored


def test_restored_bit_for_bit_also_after_an_exception() -> None:
    tensors = [torch.tensor([1.0, -0.0, torch.inf]), torch.tensor([3], dtype=torch.bfloat16)]
    module = nn.Module()
    module.register_buffer("held", tensors[0])
    before = [tensor.clone() for tensor in tensors]

    def ruin() -> None:
        with restored(module, tensors):
            for tensor in tensors:
                tensor.zero_()
            module.held = module.held + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ruin()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)
        assert torch.equal(tensor.signbit(), old.signbit())
    assert module.held is tensors[0]


def test_averageable_buffers_are_persistent_and_floating_point() -> None:
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(2))
    module.register_buffer("narrow", torch.zeros(2, dtype=torch.bfloat16))
    module.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    module.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
    module.register_buffer("table", torch.zeros(2), persistent=False)
    module.child = nn.BatchNorm1d(2)
    module.same = module.child
    buffers = averageable_buffers(module)
    expected = [module.get_buffer(name) for name in ("mean", "child.running_mean", "child.running_var")]
    assert [id(b) for b in buffers if b.dtype == torch.float32] == [id(b) for b in expected]
    assert len(buffers) == 4


def doubled(tensors: list[torch.Tensor], n: int, group: object) -> None:
    for tensor in tensors:
        tensor.mul_(2)


@pytest.mark.slow  # importing what PyTorch computes tensors without data with takes seconds
def test_buffers_of_one_dtype_on_two_devices_travel_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []

    def mean(tensors: list[torch.Tensor], n: int, group: object) -> None:
        sent.extend((tensor.device.type, tensor.numel()) for tensor in tensors)
        doubled(tensors, n, group)

    monkeypatch.setattr(averaging, "mean_over_ranks_", mean)
    monkeypatch.setattr(torch.Tensor, "isfinite", lambda _: torch.tensor(True))  # meta tensors have no values
    buffers = [torch.ones(2), torch.ones(3, device="meta"), torch.ones(1, 1)]
    average_buffers_(buffers, 2, None)
    assert sent == [("cpu", 3), ("meta", 3)]
    assert buffers[0].tolist() == [2, 2]
    assert buffers[2].tolist() == [[2]]


def test_buffers_on_the_cpu_travel_by_way_of_the_gpu_where_the_group_knows_only_those(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[torch.Tensor] = []
    monkeypatch.setattr(collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: moved.append(tensor.clone()) or moved[-1])
    monkeypatch.setattr(averaging, "mean_over_ranks_", doubled)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda message, **_: message.zero_())
    monkeypatch.setattr(collectives, "_equal_on_all_ranks", lambda *_: False)
    buffers = [torch.ones(2), torch.ones(1, dtype=torch.float64)]
    average_buffers_(buffers, 2, None)
    assert [buffer.tolist() for buffer in buffers] == [[2, 2], [2]]
    collectives.broadcast_from_first(buffers)
    assert [buffer.tolist() for buffer in buffers] == [[0, 0], [0]]
    assert len(moved) == 4
