"""The gpt2 task: what it evaluates, what it says of itself, what it refuses."""

import math

import numpy as np
import pytest
import torch

from common.config.config import ConfigError
from common.launch.compose import compose_config
from gpt2.documents import STDLIB_WITHOUT
from gpt2.task import TASK, known_peak_tflops, utilisation
from tests.gpt2.corpora import TINY, pattern, write_tokens

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    write_tokens(tmp_path / "data", pattern(3000), pattern(411, seed=1))
    return tmp_path / "data"


def make(folder, *overrides):
    tokens = ["data=tokens", f"data.folder={folder}", "training.device=cpu", *TINY]
    return TASK(compose_config("gpt2", [*tokens, *overrides]))


@pytest.mark.parametrize(("shards", "batches"), [(1, "null"), (7, "5"), (600, "null")])
def test_evaluation_does_not_depend_on_the_number_of_shards(folder, shards, batches):
    task = make(folder, f"data.evaluation_batches={batches}", "evaluation.batch_size=6")
    torch.manual_seed(0)
    model = task.build_model().eval()
    sums = dict.fromkeys(task.sums, 0.0)
    with torch.no_grad():
        for shard in range(shards):
            for batch in task.evaluation_data(shard, shards, 6, CPU):
                for name, value in task.evaluate(model, batch).items():
                    sums[name] += value.item()
        metrics = task.metrics(sums)
        expected = {}
        for split, seed, length in (("train_loss", 0, 3000), ("loss", 1, 411)):
            tokens = torch.from_numpy(pattern(length, seed))
            spread = [round(i * (length - 9) / 29) for i in range(30)]
            starts = range(0, length - 1, 8) if batches == "null" else spread
            pieces = [tokens[start : start + 9][None] for start in starts]
            logits = torch.cat([model(piece[:, :-1])[0] for piece in pieces])
            targets = torch.cat([piece[0, 1:] for piece in pieces])
            expected[split] = torch.nn.functional.cross_entropy(logits, targets).item()
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert metrics["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(expected["loss"]), rel=1e-4)
    assert metrics["unigram_entropy"] == 3.0


@pytest.mark.parametrize("shards", [1, 3])
def test_drawn_windows_are_dealt_to_the_shards_and_new_after_every_step(folder, shards):
    task = make(folder, "data.evaluation_windows=drawn", "data.evaluation_batches=5", "evaluation.batch_size=6")

    def drawn():
        batches = [batch for shard in range(shards) for batch in task.evaluation_data(shard, shards, 6, CPU)]
        return {split: sorted(w.tolist() for s, b in batches if s == split for w in b) for split in ("train", "val")}

    task.before_evaluation(1000)
    first = drawn()
    assert {split: len(windows) for split, windows in first.items()} == {"train": 30, "val": 30}
    assert drawn() == first
    task.before_evaluation(2000)
    assert drawn()["train"] != first["train"]


def test_how_many_windows_are_drawn_must_be_said(folder):
    with pytest.raises(ConfigError, match="evaluation_batches=null with evaluation_windows=drawn"):
        make(folder, "data.evaluation_windows=drawn", "data.evaluation_batches=null")


def test_simulated_workers_may_be_batched(folder):
    make(folder, "workers=simulated", "workers.count=2", "workers.batched=true")


def test_loss_is_that_of_the_next_token(folder):
    task = make(folder)
    torch.manual_seed(0)
    model, batch = task.build_model(), next(task.train_data(0, 1, 4, CPU).epoch(0))
    logits = model(batch[:, :-1]).log_softmax(-1)
    chosen = logits.gather(-1, batch[:, 1:, None])
    assert task.loss(model, batch).item() == pytest.approx(-chosen.mean().item(), rel=1e-5)


def test_it_says_its_size_its_data_and_the_entropy(folder, capsys):
    task = make(folder)
    parameters = sum(p.numel() for p in task.build_model().parameters())
    said = capsys.readouterr().err
    assert f"{parameters:,} parameters" in said
    assert "MFLOP per token" in said
    assert "3,000 training and 411 validation tokens (bytes), unigram entropy 3.0000 nats" in said
    make(folder, "logging.progress=false")
    assert capsys.readouterr().err == ""


def test_throughput_in_tokens_and_model_flops(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a GPU that the run does not use has no part
    parameters = 32 * 16 + 12 * 16 * 16 + 3 * 16
    flops = 6 * parameters + 12 * 1 * 16 * 8
    task = make(folder, "peak_tflops=0.5", "workers.count=4", "topology=ring")
    figures = task.throughput(samples_per_s=1000.0)
    assert figures["tokens_per_s"] == 8000.0
    assert figures["mfu"] == pytest.approx(8000 * flops / (4 * 0.5e12))
    simulated = make(folder, "peak_tflops=0.5", "workers=simulated", "workers.count=4")
    assert simulated.throughput(1000.0)["mfu"] == pytest.approx(4 * figures["mfu"])
    assert make(folder).throughput(1000.0).keys() == {"tokens_per_s"}  # nobody knows a CPU's peak


def test_known_peaks():
    names = {"NVIDIA A100-SXM4-40GB": 312.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA H100 80GB HBM3": 989.0}
    names |= {"Tesla V100-SXM2-16GB": 125.0, "NVIDIA RTX A4000": None, "NVIDIA A40": 149.7}
    assert {name: known_peak_tflops(name) for name in names} == names


def test_utilisation_of_the_papers_own_log():
    """177.9 ms a step of 480 sequences on 16 A100: 2.76 M tokens/s at 0.855 GFLOP each is 47 % of their peak."""
    assert utilisation(480 * 1024 / 0.1779, 854_770_176, 312.0, 16) == pytest.approx(0.473, abs=1e-3)


REFUSED = {
    "model.context=411: .*|val.bin: 411 tokens, expected at least 412": ["model.context=411"],
    "train.bin: 3000 tokens, expected at least 401 for each of 8 ranks": [
        "workers=simulated",
        "workers.count=8",
        "training.batch_size=8",
        "model.context=400",
        "data.shard=contiguous",
    ],
    "model.vocabulary=31": ["model.vocabulary=31"],
    "header.json is missing": ["data.folder=nowhere"],
    "heads=3: expected a divisor of model.width=16": ["model.heads=3"],
    "data.shard='other'": ["data.shard=other"],
    "model.layer: .*|Could not override|no such key": ["model.layer=3"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_by_name(message, folder):
    with pytest.raises(ConfigError, match=message):
        make(folder, *REFUSED[message])


def test_a_damaged_file_is_refused_as_configuration(folder):
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"data\.folder=.*train\.bin is truncated: 5999 bytes"):
        make(folder)


def test_the_embedded_corpus_is_prepared_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt2.documents.STDLIB_WITHOUT", {*STDLIB_WITHOUT, "email"})
    folder = tmp_path / "stdlib"
    overrides = [f"data.folder={folder}", "data.tokenizer=bytes", "model.vocabulary=257"]
    overrides += [o for o in TINY if "vocabulary" not in o]
    TASK(compose_config("gpt2", overrides))
    before = (folder / "train.bin").stat().st_mtime_ns
    task = TASK(compose_config("gpt2", overrides))
    assert (folder / "train.bin").stat().st_mtime_ns == before
    assert 2.5 < task.metrics(dict.fromkeys(task.sums, 1.0))["unigram_entropy"] < 3.7  # of Python, in nats per byte
    text = bytes(np.fromfile(folder / "val.bin", "<u2")[:-1].clip(0, 255).astype(np.uint8)).decode(errors="replace")
    assert "def __init__(self" in text
    message = r"holds other data \(validation_fraction: 0\.05 there, 0\.2 now\); expected a new folder"
    with pytest.raises(ConfigError, match=message):
        TASK(compose_config("gpt2", [*overrides, "data.validation_fraction=0.2"]))
    monkeypatch.undo()  # as with the sources of another version of Python
    with pytest.raises(ConfigError, match=r"data\.folder=.*sha256 of the inputs: "):
        TASK(compose_config("gpt2", overrides))
