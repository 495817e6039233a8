"""Windows: where they are cut, what decides it, and that ranks and restarts change nothing."""

from itertools import islice

import numpy as np
import pytest
import torch

from common.training.stream import BEGINNING, Stream
from gpt2.data import Windows, drawn_starts, evaluation_batches, evaluation_starts
from gpt2.token_files import DataError

CPU = torch.device("cpu")
TOKENS = np.arange(1000, dtype=np.uint16)  # a window is known by its first token


def windows(rank=0, ranks=1, batch_size=4, seed=0, shard="independent", tokens=TOKENS, context=10, first_ranks=None):
    return Windows(tokens, context, 1000, batch_size, rank, ranks, seed, shard, CPU, first_ranks or ranks)


def firsts(data, batches):
    stream = Stream(data, seed=0, rank=0, device=CPU)
    return [batch[:, 0].tolist() for batch in islice(stream, batches)]


def test_a_window_is_a_piece_of_the_file_and_the_token_after_it():
    batch = next(windows().epoch(0))
    assert (batch.shape, batch.dtype) == ((4, 11), torch.int64)
    assert torch.equal(batch, batch[:, :1] + torch.arange(11))


@pytest.mark.parametrize("length", [11, 1000])
def test_every_start_is_as_likely_and_none_is_outside(length):
    data = windows(batch_size=20_000, tokens=TOKENS[:length])
    counts = np.bincount(data.starts(0), minlength=length - 10)
    assert len(counts) == length - 10
    expected = 20_000 / (length - 10)
    assert (abs(counts - expected) < 6 * expected**0.5 + 1).all()


@pytest.mark.parametrize("shard", ["independent", "contiguous", "global"])
def test_batches_depend_on_seed_rank_and_step_alone(shard):
    first = firsts(windows(1, 2, shard=shard), 60)
    assert first == firsts(windows(1, 2, shard=shard), 60)
    for other in (windows(0, 2, shard=shard), windows(1, 2, shard=shard, seed=1)):
        assert not any(a == b for a, b in zip(first, firsts(other, 60), strict=True))
    assert len({tuple(batch) for batch in first}) == 60


def test_contiguous_parts_are_side_by_side_and_each_is_drawn_from_as_a_file_of_its_own():
    ranks, part = 3, 333
    for rank in range(ranks):
        drawn = windows(rank, ranks, 500, shard="contiguous").starts(0)
        alone = windows(rank, ranks, 500, tokens=TOKENS[:part]).starts(0)
        assert (drawn == rank * part + alone).all()


def test_resuming_needs_only_the_step():
    data = windows()
    whole = firsts(data, 60)
    assert data.steps_per_epoch == 25
    for drawn in (1, 24, 25, 26, 50):
        stream = Stream(windows(), seed=0, rank=0, device=CPU)
        stream.load_state_dict(stream.state_dict() | {"drawn": drawn})
        assert [batch[:, 0].tolist() for batch in islice(stream, 60 - drawn)] == whole[drawn:]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 2), (8, 1), (1, 8)])
def test_global_windows_are_the_same_for_any_number_of_ranks_and_micro_batches(ranks, micro_batches):
    size = 16 // (ranks * micro_batches)
    shares = [firsts(windows(r, ranks, size, shard="global"), 5 * micro_batches) for r in range(ranks)]
    updates = []
    for first in range(0, 5 * micro_batches, micro_batches):
        batches = [batch for share in shares for batch in share[first : first + micro_batches]]
        updates.append(sorted(start for batch in batches for start in batch))
    assert updates == [sorted(batch) for batch in firsts(windows(0, 1, 16, shard="global"), 5)]


@pytest.mark.parametrize(("ranks", "batch_size", "steps"), [(2, 4, 12), (64, 4, 1)])
def test_an_epoch_is_as_many_windows_as_lie_side_by_side(ranks, batch_size, steps):
    assert windows(0, ranks, batch_size).steps_per_epoch == steps


def test_a_token_outside_the_vocabulary_is_named_with_its_place():
    tokens = TOKENS.copy()
    tokens[500] = 60_000
    with pytest.raises(DataError, match=r"token 60000 at position 500, expected less than model\.vocabulary=1000"):
        firsts(windows(tokens=tokens), 100)


@pytest.mark.parametrize(("length", "context"), [(101, 10), (105, 10), (11, 10)])
def test_a_whole_split_is_evaluated_with_every_token_predicted_once(length, context):
    starts = evaluation_starts(length, context, None)
    batches = list(evaluation_batches(TOKENS[:length], starts, context, 1000, 3, CPU))
    assert sorted(torch.cat([batch[:, 1:].flatten() for batch in batches]).tolist()) == list(range(1, length))
    assert all(torch.equal(batch, batch[:, :1] + torch.arange(batch.shape[1])) for batch in batches)
    assert all(len(batch) == 3 for batch in batches[:-2])


@pytest.mark.parametrize("count", [1, 7])
def test_some_windows_are_spread_evenly(count):
    starts = evaluation_starts(1000, 100, count)
    assert len(set(starts)) == count
    assert starts[0] == 0
    if count > 1:
        assert starts[-1] == 1000 - 1 - 100
        gaps = np.diff(starts)
        assert gaps.max() - gaps.min() <= 1


def test_more_windows_than_there_are_is_the_whole_split():
    assert evaluation_starts(1000, 100, 500) == evaluation_starts(1000, 100, None) == list(range(0, 999, 100))


def test_drawn_windows_depend_on_seed_split_and_step_alone():
    first = drawn_starts(1000, 100, 50, seed=1, split=0, step=7)
    assert first == drawn_starts(1000, 100, 50, seed=1, split=0, step=7)
    others = [(2, 0, 7), (1, 1, 7), (1, 0, 8)]
    assert all(first != drawn_starts(1000, 100, 50, *other) for other in others)
    training = windows(batch_size=50, seed=1, context=100).starts(7)
    assert first != training.tolist()


def test_the_rest_of_an_epoch_is_dealt_to_fewer_ranks():
    """Windows of shard=global are one sequence, whoever takes them."""

    def drawn(ranks: int, offset: int, rounds: int) -> list[list[int]]:
        shares = [windows(rank, ranks, shard="global").epoch(0, 0, offset) for rank in range(ranks)]
        return [batch[:, 0].tolist() for together in islice(zip(*shares, strict=False), rounds) for batch in together]

    whole = drawn(1, 0, 14)
    assert drawn(4, 0, 2) + drawn(3, 8, 2) == whole


@pytest.mark.parametrize("shard", ["independent", "contiguous"])
@pytest.mark.parametrize("sizes", [(2, 3, 2), (3, 2, 3), (1, 4, 3)], ids=str)
def test_no_window_is_drawn_twice_after_workers_joined_or_left(shard, sizes, monkeypatch):
    """A window is known by the step of the stream of random numbers that decides where it begins."""
    drawn = []

    def note(key, counter, count, below):
        drawn.append((key, counter))
        return np.zeros(count, np.int64)

    monkeypatch.setattr("gpt2.data._random_starts", note)
    dealing = BEGINNING
    for ranks in sizes:
        for rank in range(ranks):
            data = windows(rank, ranks, shard=shard, first_ranks=sizes[0])
            stream = Stream(data, seed=0, rank=rank, device=CPU, ranks=ranks, dealing=dealing)
            for _ in range(2 * data.steps_per_epoch + 5):
                next(stream)
        dealing = stream.rest()
    assert len(drawn) == len(set(drawn))
