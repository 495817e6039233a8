"""Chunks hold every element once, of one kind, within the limit; scaling keeps the factor's precision."""

import pytest
import torch

from common.optim.foreach import chunked, scale_


@pytest.mark.parametrize("limit", [4, 64, 200, 1 << 20])
def test_chunks_partition_the_tensors(limit, monkeypatch):
    monkeypatch.setattr("common.optim.foreach.CPU_CHUNK_BYTES", limit)
    shapes = [(7, 3), (), (50,), (0, 2), (1, 30), (4, 2, 2)]
    keys = [1, 1, 2, 1, 2, 1]
    dtypes = [torch.float32, torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    first = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    second = [torch.zeros(shape) for shape in shapes]
    for key, chunk in chunked((first, second), keys=keys):
        a, b = chunk
        assert [x.shape for x in a] == [x.shape for x in b]
        assert len({x.dtype for x in a}) == 1
        # One row of 30 cannot be cut; all else keeps the limit.
        assert sum(x.nbytes for x in a) <= max(limit, 60)
        for tensor in (*a, *b):
            tensor += key
    for key, a, b in zip(keys, first, second, strict=True):
        assert (a == key).all()
        assert (b == key).all()


def test_scale_does_not_round_the_factor():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = (values.double() * 0.9).bfloat16()
    scaled = [values.clone(), values.clone()]
    scale_(scaled, 0.9)
    assert torch.equal(scaled[0], expected)
    assert torch.equal(scaled[1], expected)


def test_entries_of_different_number_are_refused():
    with pytest.raises(ValueError, match="zip"):
        list(chunked(([torch.zeros(1)], []), keys=[0]))
