"""Reading ahead: the same batches, errors in their place, no thread left behind."""

import threading
import time

import pytest
import torch

from gpt2.prefetch import prefetch, read_ahead


def batches(count, fails_at=None):
    for i in range(count):
        if i == fails_at:
            raise RuntimeError("the disk is broken")
        yield torch.full((2,), i)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("depth", [1, 3])
def test_the_same_batches_in_the_same_order(depth):
    assert [int(batch[0]) for batch in read_ahead(batches(20), depth)] == list(range(20))
    assert not threads()


def test_it_reads_ahead_but_not_further_than_the_depth():
    asked = []

    def source():
        for i in range(20):
            asked.append(i)
            yield torch.tensor(i)

    iterator = read_ahead(source(), depth=3)
    next(iterator)
    end = time.monotonic() + 10
    while len(asked) < 5 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(asked) == 5  # one taken, three ready, one in hand
    iterator.close()
    assert not threads()


def test_an_error_comes_where_its_batch_would_have_been():
    iterator = read_ahead(batches(9, fails_at=4))
    assert [int(next(iterator)[0]) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="the disk is broken"):
        next(iterator)
    assert not threads()


def test_on_the_cpu_nothing_is_read_ahead():
    iterator = prefetch(batches(9), torch.device("cpu"))
    next(iterator)
    assert not threads()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_batches_arrive_there():
    found = list(prefetch(batches(9), torch.device("cuda")))
    assert all(batch.is_cuda for batch in found)
    assert [int(batch[0]) for batch in found] == list(range(9))
