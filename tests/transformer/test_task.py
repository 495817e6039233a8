"""Losses are weighted by tokens, and evaluation depends neither on shards nor on batches."""

from collections.abc import Callable
from typing import Any

import pytest
import sacrebleu
import torch
from torch import nn

from common.config.config import ConfigError
from common.launch.compose import compose_config
from transformer.model import PAD
from transformer.scores import wordnet_problem
from transformer.search import beam_search
from transformer.task import Translation, search_of

CPU = torch.device("cpu")
Make = Callable[..., Translation]


@pytest.fixture
def make(small: list[str]) -> Make:
    return lambda *more: Translation(compose_config("transformer", [*small, *more]))


def model_of(task: Translation) -> nn.Module:
    """Weights that are not near any symmetry, so that translations end."""
    torch.manual_seed(0)
    model = task.build_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def evaluated(task: Translation, model: nn.Module, shards: int, batch_size: int) -> dict[str, float]:
    sums = dict.fromkeys(task.sums, 0.0)
    for shard in range(shards):
        for batch in task.evaluation_data(shard, shards, batch_size, CPU):
            values = task.evaluate(model, batch)
            assert values.keys() == set(task.sums)
            for name, value in values.items():
                sums[name] += float(value)
    return task.metrics(sums)


@pytest.mark.parametrize(("shards", "batch_size"), [(3, 50), (64, 7)])
def test_losses_depend_neither_on_shards_nor_on_batches(make: Make, shards: int, batch_size: int) -> None:
    task = make()
    model = model_of(task)
    expected = evaluated(task, model, 1, 10_000)
    assert expected.keys() == {"loss", "loss_smoothed"}
    assert evaluated(task, model, shards, batch_size) == pytest.approx(expected, rel=1e-5)


def test_scores_depend_neither_on_shards_nor_on_batches(make: Make) -> None:
    task = make("decoding.in_training=true", "decoding.extra_length=2")
    model = model_of(task)
    expected = evaluated(task, model, 1, 10_000)
    assert expected.keys() == {"loss", "loss_smoothed", "bleu"} | (set() if wordnet_problem() else {"meteor"})
    assert evaluated(task, model, 3, 60) == pytest.approx(expected, rel=1e-5)


def test_the_losses_are_means_over_target_tokens(make: Make) -> None:
    task = make()
    model = model_of(task)
    log_probabilities: list[torch.Tensor] = []
    uniform: list[torch.Tensor] = []
    for batch in task.evaluation_data(0, 1, 1, CPU):  # one sentence in each
        with torch.no_grad():
            logits = model(batch.source, batch.target_input).log_softmax(-1)[0]
        log_probabilities.append(logits.gather(1, batch.target[0][:, None])[:, 0])
        uniform.append(logits.sum(1) - log_probabilities[-1])
    right, wrong = torch.cat(log_probabilities), torch.cat(uniform)
    found = evaluated(task, model, 2, 100)
    over_all = evaluated(make("smoothed_over=all_tokens"), model, 2, 100)
    vocabulary = model.embedding.num_embeddings
    assert found["loss"] == pytest.approx(-right.mean().item(), rel=1e-5)
    # eps is spread over the V - 1 wrong tokens, as in fairseq
    smoothed = -(0.9 * right + 0.1 * wrong / (vocabulary - 1)).mean()
    assert found["loss_smoothed"] == pytest.approx(smoothed.item(), rel=1e-5)
    # or over all V, as in PyTorch
    smoothed = -(0.9 * right + 0.1 * (right + wrong) / vocabulary).mean()
    assert over_all == pytest.approx({"loss": found["loss"], "loss_smoothed": smoothed.item()}, rel=1e-5)


def test_bleu_is_that_of_the_raw_references(make: Make) -> None:
    task = make("decoding.in_training=true", "decoding.extra_length=2")
    model, hypotheses = model_of(task), {}
    for batch in task.evaluation_data(0, 1, 10_000, CPU):
        for sentence, (best, *_) in zip(
            batch.sentences, beam_search(model, batch.source, batch.source_mask, search_of(task._config)), strict=True
        ):
            hypotheses[sentence] = task._corpus.line(best.tokens)
    lines = [hypotheses[i] for i in range(len(hypotheses))]
    references, raw = task._corpus.references("valid")
    assert raw
    expected = sacrebleu.corpus_bleu(lines, [references]).score
    assert evaluated(task, model, 1, 100)["bleu"] == pytest.approx(expected)


def test_the_mean_gradient_of_all_ranks_counts_every_token_alike(make: Make) -> None:
    ranks, task = 5, make("model.dropout=0.0")
    model = model_of(task).train()
    data = [task.train_data(rank, ranks, 60, CPU) for rank in range(ranks)]
    batches = [next(each.epoch(0)) for each in data]
    assert len({int((batch.target != PAD).sum()) for batch in batches}) > 1
    for batch in batches:
        (task.loss(model, batch) / ranks).backward()
    of_ranks = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    total = sum(task.loss(model, batch) * batch.mean_target_tokens for batch in batches)  # sums over tokens
    total.backward()
    scale = 1 / (ranks * data[0].mean_target_tokens)
    for ours, parameter in zip(of_ranks, model.parameters(), strict=True):
        assert torch.allclose(ours, parameter.grad * scale, rtol=1e-4, atol=1e-7)


def test_a_batch_may_be_divided_by_its_own_tokens_and_smoothed_as_in_pytorch(make: Make) -> None:
    """The loss of the paper's code: torch.nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)."""
    task = make("model.dropout=0.0", "loss_divisor=own_tokens", "smoothed_over=all_tokens", "token_limit=both_sides")
    model, criterion = model_of(task).train(), nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    for batch in task.train_data(0, 2, 60, CPU).epoch(0):
        logits = model(batch.source, batch.target_input, batch.source_mask)
        expected = criterion(logits.flatten(0, 1), batch.target.flatten())
        assert task.loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)
        assert (batch.source != PAD).sum() + (batch.target != PAD).sum() <= 2 * 60


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["data.path=/nowhere"], "data.path=/nowhere: no such folder; `python -m transformer.prepare --help`"),
        (["data.target=fr"], "dict.fr.txt cannot be read"),
    ],
)
def test_data_that_are_not_there_are_refused(make: Make, more: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(*more)
    assert problem in str(error.value)


def test_two_dictionaries_are_refused(make: Make, data_folder: Any, tmp_path: Any) -> None:
    for file in data_folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "dict.de.txt").write_text("other 1\n")
    with pytest.raises(ConfigError, match="expected a joint dictionary"):
        make(f"data.path={tmp_path}")


def test_a_width_that_the_heads_do_not_divide_is_refused(small: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"width=18: expected an even multiple of model\.heads=4"):
        compose_config("transformer", [*small, "model.width=18", "model.heads=4"])
