"""From disk to batches: cutting, padding, shards, epochs; independent of the number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config.config import ConfigError
from transformer.data import ParallelText, TokenBatches
from transformer.model import PAD
from transformer.search import EOS

CPU = torch.device("cpu")


@pytest.fixture
def text(data_folder: Path) -> ParallelText:
    return ParallelText(data_folder, "train", "en", "de")


def batches_of(text: ParallelText, rank: int, ranks: int, budget: int, seed: int = 3) -> TokenBatches:
    return TokenBatches(text, rank, ranks, budget, seed, CPU)


def rows(tokens: torch.Tensor) -> list[list[int]]:
    return [[int(token) for token in row if token != PAD] for row in tokens]


def test_a_batch_holds_what_fairseq_reads(text: ParallelText, data_folder: Path, compat: Any) -> None:
    sides = [compat.read_tokens(data_folder, "train", "en-de", language) for language in ("en", "de")]
    chosen = np.array([4, 17, 250])
    batch = text.batch(chosen, CPU)
    assert rows(batch.source) == [sides[0][i].tolist() for i in chosen]
    assert rows(batch.target) == [sides[1][i].tolist() for i in chosen]
    assert batch.sentences == (4, 17, 250)
    assert batch.target_input[:, 0].tolist() == [EOS] * 3
    assert torch.equal(batch.target_input[:, 1:], batch.target[:, :-1])
    assert batch.source_mask is not None
    assert torch.equal(batch.source_mask[:, 0, 0], batch.source != PAD)


def test_sources_of_one_length_need_no_mask(text: ParallelText) -> None:
    same = np.flatnonzero(text.source_lengths == text.source_lengths[0])
    assert text.batch(same, CPU).source_mask is None


def test_pairs_are_cut_with_their_eos(data_folder: Path, text: ParallelText) -> None:
    cut = ParallelText(data_folder, "train", "en", "de", max_length=5)
    assert cut.longest == 5 < text.longest
    chosen = np.array([int(text.target_lengths.argmax()), int(text.target_lengths.argmin())])
    whole, short = rows(text.batch(chosen, CPU).target), rows(cut.batch(chosen, CPU).target)
    assert short[0] == [*whole[0][:4], EOS]
    assert short[1] == (whole[1] if len(whole[1]) <= 5 else [*whole[1][:4], EOS])
    assert cut.target_lengths[chosen].tolist() == [len(row) for row in short]


@pytest.mark.parametrize(("ranks", "epoch"), [(1, 0), (7, 5)])
def test_ranks_take_equally_many_batches_and_no_sentence_twice(text: ParallelText, ranks: int, epoch: int) -> None:
    data = [batches_of(text, rank, ranks, 60) for rank in range(ranks)]
    steps = {each.steps_per_epoch for each in data}
    assert len(steps) == 1
    seen: list[int] = []
    for each in data:
        batches = list(each.epoch(epoch))
        assert len(batches) == each.steps_per_epoch
        assert all(batch.sentences for batch in batches)
        assert all((batch.source != PAD).sum() <= 60 for batch in batches)
        assert all((batch.target != PAD).sum() <= 60 for batch in batches)
        seen += [sentence for batch in batches for sentence in batch.sentences]
    assert len(seen) == len(set(seen))
    if ranks == 1:
        assert len(seen) == len(text)


def test_an_epoch_goes_on_in_its_middle_and_differs_from_the_next(text: ParallelText) -> None:
    data = batches_of(text, 1, 2, 60)
    whole = [batch.sentences for batch in data.epoch(4)]
    for start in (0, 1, len(whole) - 1, len(whole)):
        assert [batch.sentences for batch in data.epoch(4, start)] == whole[start:]
    assert [batch.sentences for batch in batches_of(text, 1, 2, 60).epoch(4)] == whole
    assert [batch.sentences for batch in data.epoch(5)] != whole
    assert [batch.sentences for batch in batches_of(text, 1, 2, 60, seed=4).epoch(4)] != whole


def test_the_divisor_of_the_training_loss_is_the_mean_over_an_epochs_batches(text: ParallelText) -> None:
    data = batches_of(text, 0, 1, 60)
    tokens = [int((batch.target != PAD).sum()) for batch in data.epoch(0)]
    assert sum(tokens) / len(tokens) == pytest.approx(data.mean_target_tokens)
    assert {batch.mean_target_tokens for batch in data.epoch(1)} == {data.mean_target_tokens}


def test_what_does_not_fit_is_refused(data_folder: Path, text: ParallelText, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{text.longest - 1} tokens for a micro-batch.*has {text.longest}"):
        batches_of(text, 0, 1, text.longest - 1)
    with pytest.raises(ConfigError, match="1000 ranks take 60 tokens each"):
        batches_of(text, 0, 1000, 60)
    with pytest.raises(ConfigError, match=r"extra\.en-de\.en\.idx is missing"):
        ParallelText(data_folder, "extra", "en", "de")
    for suffix in (".idx", ".bin"):
        (tmp_path / f"train.en-de.en{suffix}").write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"train\.en-de\.en is not fairseq's mmap format"):
        ParallelText(tmp_path, "train", "en", "de")


def test_the_rest_of_an_epoch_is_dealt_to_fewer_ranks(text: ParallelText) -> None:
    def drawn(ranks: int, offset: int = 0, rounds: int | None = None) -> list[tuple[int, ...]]:
        each = [[b.sentences for b in batches_of(text, rank, ranks, 60).epoch(2, 0, offset)] for rank in range(ranks)]
        return [batch for together in list(zip(*each, strict=True))[:rounds] for batch in together]

    whole = drawn(1)
    rest = drawn(3, offset=8)
    assert drawn(4, rounds=2) + rest == whole[: 8 + len(rest)]
    assert len(whole) - 3 < 8 + len(rest) <= len(whole)
