"""Batches by tokens: nothing lost, nothing empty, nothing too large."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.batching import LEAST_FILLED, batch_by_tokens

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=120)


@settings(max_examples=60, deadline=None)
@given(pairs=LENGTHS, budget=st.integers(1, 120), seed=st.none() | st.integers(0, 9))
def test_every_sentence_is_in_one_batch_within_the_budget(
    pairs: list[tuple[int, int]], budget: int, seed: int | None
) -> None:
    sources, targets = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    generator = None if seed is None else np.random.default_rng(seed)
    batches = batch_by_tokens(sources, targets, budget, generator)
    found = [batches[k].tolist() for k in range(len(batches))]
    assert sorted(itertools.chain(*found)) == list(range(len(pairs)))
    for sentences in found:
        assert sentences  # none is empty
        if len(sentences) > 1:
            assert sources[sentences].sum() <= budget
            assert targets[sentences].sum() <= budget
    for sentences, following in itertools.pairwise(found):
        more = [*sentences, following[0]]  # a batch ends only where the next sentence does not fit
        assert max(sources[more].sum(), targets[more].sum()) > budget


def test_sentences_of_a_batch_are_alike_so_that_little_is_padded() -> None:
    generator = np.random.default_rng(0)
    sources = generator.integers(5, 60, size=4000)
    targets = np.maximum(1, sources + generator.integers(-5, 6, size=4000))
    batches = batch_by_tokens(sources, targets, 1000)
    padded = sum(sources[batches[k]].max() * len(batches[k]) for k in range(len(batches)))
    assert padded < 1.02 * sources.sum()


def test_epochs_have_other_batches_of_the_same_sizes() -> None:
    lengths = np.random.default_rng(0).integers(3, 9, size=300)
    first, again, other = (
        batch_by_tokens(lengths, lengths, 60, np.random.default_rng((7, epoch))) for epoch in (0, 0, 1)
    )
    assert first.order.tolist() == again.order.tolist() != other.order.tolist()
    assert first.starts.tolist() == again.starts.tolist() == other.starts.tolist()


def in_one_pass(pairs: list[tuple[int, int]], budget: int) -> list[int]:
    """Where batches begin by the rule of the paper's code, sentence by sentence, for pairs in the order of batches."""
    starts, batch = [0], pairs[:1]
    for number, pair in enumerate(pairs[1:], start=1):
        more = [*batch, pair]
        sides = list(zip(*more, strict=True))
        filled = min(sum(side) / (max(side) * len(side)) for side in sides)
        if sum(map(sum, sides)) > 2 * budget or filled < LEAST_FILLED:
            starts.append(number)
            more = [pair]
        batch = more
    return [*starts, len(pairs)]


@settings(max_examples=60, deadline=None)
@given(pairs=LENGTHS.filter(bool), budget=st.integers(1, 120), seed=st.integers(0, 9))
def test_batches_limited_by_both_sides_are_those_of_the_papers_rule(
    pairs: list[tuple[int, int]], budget: int, seed: int
) -> None:
    sources, targets = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    batches = batch_by_tokens(sources, targets, budget, np.random.default_rng(seed), "both_sides")
    sorted_pairs = [pairs[i] for i in batches.order]
    assert sorted(batches.order.tolist()) == list(range(len(pairs)))
    assert [sum(pair) for pair in sorted_pairs] == sorted(map(sum, pairs))
    assert batches.starts.tolist() == in_one_pass(sorted_pairs, budget)
    assert batches.starts.tolist() == batch_by_tokens(sources, targets, budget, limit="both_sides").starts.tolist()
