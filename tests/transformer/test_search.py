"""Beam search against fairseq's SequenceGenerator, token by token, and against exhaustive search."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.transformer.conftest import VOCABULARY
from transformer.model import PAD, Transformer, cross_entropy, mask_of
from transformer.search import EOS, Hypothesis, Search, beam_search

WORDS = 24  # of the language that the trained model learns


def random_sentences(lengths: list[int], words: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, 4 + words, (n,), generator=generator) for n in lengths]
    return [torch.cat([row, torch.tensor([EOS])]) for row in rows]


def pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


@pytest.fixture(scope="module")
def trained() -> Transformer:
    """Learns for some seconds to turn sentences round, and is still unsure of itself."""
    torch.manual_seed(0)
    model = Transformer(VOCABULARY, 32, 64, 4, 1, 2, dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    for step in range(250):
        n = 2 + step % 9
        source = torch.randint(4, 4 + WORDS, (32, n))
        end = torch.full((32, 1), EOS)
        target = torch.cat([source.flip(1), end], dim=1)
        logits = model(torch.cat([source, end], dim=1), torch.cat([end, target[:, :-1]], dim=1))
        (cross_entropy(logits, target, 0.1) / target.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def fairseq_search(model: Transformer, source: Tensor, search: Search) -> list[list[Any]]:
    """Return what SequenceGenerator finds with the same weights."""
    from tests.transformer.fairseq_twin import generator_of, sample_of

    return generator_of(model, search).generate([], sample_of(source))


def assert_same(ours: list[list[Hypothesis]], theirs: list[list[Any]]) -> None:
    for mine, others in zip(ours, theirs, strict=True):
        assert [h.tokens for h in mine] == [tuple(o["tokens"].tolist()[:-1]) for o in others]
        assert [h.score for h in mine] == pytest.approx([o["score"].item() for o in others], abs=1e-4)


@pytest.mark.parametrize("search", [Search(), Search(beam=5, length_penalty=1.0), Search(beam=1)])
def test_sentences_of_a_trained_model(trained: Transformer, compat: Any, search: Search) -> None:
    best, rows = [], []
    for length in range(1, 13, 2):  # one length in a batch: fairseq has one limit for all its sentences
        batch = random_sentences([length] * 8, WORDS, seed=length)
        ours = beam_search(trained, pad(batch), None, search)
        assert_same(ours, fairseq_search(trained, pad(batch), search))
        best += [hypotheses[0].tokens for hypotheses in ours]
        rows += batch
    right = sum(b == tuple(row[:-1].flip(0).tolist()) for b, row in zip(best, rows, strict=True))
    assert 4 < right < 47  # it has learned something, and the search has something to decide
    assert len(set(best)) > 30


def test_padded_batches_of_a_trained_model(trained: Transformer, compat: Any) -> None:
    rows = random_sentences([1 + 7 * i % 12 for i in range(60)], WORDS, seed=7)
    same = 0
    for first in range(0, 60, 30):
        source = pad(rows[first : first + 30])
        ours = beam_search(trained, source, mask_of(source))
        theirs = fairseq_search(trained, source, Search())
        for row, mine, others in zip(rows[first : first + 30], ours, theirs, strict=True):
            # Up to its own limit a sentence is searched alike; fairseq goes on to that of the longest one.
            if all(len(other["tokens"]) <= len(row) + 50 for other in others):
                assert_same([mine], [others])
                same += 1
    assert same >= 50


@pytest.mark.parametrize("extra_length", [0, 3])
def test_hypotheses_that_are_stopped_by_the_limit(model: Transformer, compat: Any, extra_length: int) -> None:
    source = pad(random_sentences([5] * 20, 90, seed=0))  # one length: fairseq has one limit for the batch
    search = Search(beam=4, extra_length=extra_length)
    ours = beam_search(model, source, None, search)
    assert_same(ours, fairseq_search(model, source, search))
    assert max(len(h.tokens) for hypotheses in ours for h in hypotheses) == 6 + extra_length


def test_scores_are_the_models_own_and_a_beam_of_one_is_greedy(model: Transformer) -> None:
    for row in random_sentences([3, 6], 90, seed=5):
        for hypothesis in beam_search(model, row[None], None, Search(extra_length=2))[0]:
            target = torch.tensor([[*hypothesis.tokens, EOS]])
            logits = model(row[None], torch.cat([torch.tensor([[EOS]]), target[:, :-1]], dim=1))
            expected = -cross_entropy(logits, target, 0.0).item() / target.numel() ** 0.6
            assert hypothesis.score == pytest.approx(expected, abs=1e-5)
        greedy = [EOS]
        while len(greedy) <= len(row) + 2:
            logits = model(row[None], torch.tensor([greedy]))[0, -1]
            logits[PAD] = logits[EOS if len(greedy) == 1 else PAD] = -torch.inf
            if (chosen := int(logits.argmax())) == EOS:
                break
            greedy.append(chosen)
        (found,) = beam_search(model, row[None], None, Search(beam=1, extra_length=2))[0]
        assert found.tokens == tuple(greedy[1:])


def test_too_small_a_vocabulary_for_the_beam_is_an_error() -> None:
    small = Transformer(12, 8, 16, 2, 1, 1, 0.0).eval()
    with pytest.raises(ValueError, match="beam=6: expected less than half of the 12 tokens"):
        beam_search(small, torch.tensor([[5, EOS]]), None, Search(beam=6))
