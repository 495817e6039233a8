"""Sampling: what is drawn from, what is decoded, what the command line takes."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from common.cli import parse
from common.launch.processes import launch
from gpt2.config import Shape
from gpt2.model import GPT2
from gpt2.sample import SampleArguments, choose, main, next_logits, write
from gpt2.tokenizer import load_tokenizer
from tests.gpt2.corpora import write_tokens

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 3.0])


def arguments(**changes: object) -> SampleArguments:
    return SampleArguments(run="run", **changes)


def drawn(count: int = 4000, **changes: object) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(int(choose(LOGITS, arguments(**changes), generator)) for _ in range(count))


@pytest.mark.parametrize(("temperature", "top_k", "kept"), [(0.5, None, 5), (2.0, 3, 3), (1.0, 9, 5)])
def test_tokens_are_drawn_by_temperature_among_the_top_k(temperature: float, top_k: int | None, kept: int) -> None:
    counts = drawn(temperature=temperature, top_k=top_k)
    weights = np.exp(LOGITS.numpy().astype(np.float64) / temperature)
    weights[np.argsort(weights)[: 5 - kept]] = 0
    expected = 4000 * weights / weights.sum()
    for token in range(5):
        assert abs(counts[token] - expected[token]) <= 5 * expected[token] ** 0.5


def test_temperature_0_takes_the_likeliest() -> None:
    assert drawn(20, temperature=0) == {4: 20}
    assert drawn(20, temperature=1e-300) == {4: 20}


def test_rows_that_only_pad_the_embedding_are_never_drawn_and_the_context_slides() -> None:
    torch.manual_seed(0)
    model = GPT2(Shape(layers=1, heads=2, width=16, vocabulary=320, context=8)).eval()
    tokens = torch.randint(257, (1, 20))
    logits = next_logits(model, tokens, 257)
    assert logits.shape == (257,)
    assert torch.equal(logits, model(tokens[:, -8:])[0, -1, :257])


class Counting(torch.nn.Module):
    """Says that the token after t is t + 1, and after "e" that the text ends."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = Shape(layers=1, heads=1, width=4, vocabulary=300, context=4)
        self.tokens = torch.nn.Embedding(1, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        following = torch.where(tokens == ord("e"), 256, (tokens + 1) % 300)
        return 50 * torch.nn.functional.one_hot(following, 300).float()


@pytest.mark.parametrize(("prompt", "tokens", "text"), [("a", 10, "abcde"), ("a", 2, "abc"), ("xyab", 5, "xyabcde")])
def test_a_text_begins_with_the_prompt_and_ends_at_end_of_text(prompt: str, tokens: int, text: str) -> None:
    texts = list(write(Counting(), load_tokenizer("bytes", Path()), arguments(prompt=prompt, tokens=tokens, samples=2)))
    assert texts == [text, text]


@pytest.mark.parametrize("prompt", ["{x: [", "3", "null", "f = '${x}'", " é\n", "a=b"])
def test_a_prompt_is_taken_as_typed(prompt: str) -> None:
    parsed = parse(SampleArguments, [f"prompt={prompt}", "run=r", "tokens=7"], "gpt2.sample", "Write text.")
    assert (parsed.prompt, parsed.run, parsed.tokens) == (prompt, "r", 7)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    text = np.frombuffer(b"the cat sat on the mat. " * 60, np.uint8)
    write_tokens(folder / "data", text, text, vocabulary_size=257, largest_token=116, end_of_text=256)
    shape = ["model.layers=1", "model.heads=2", "model.width=32", "model.context=16", "model.vocabulary=257"]
    training = ["training.steps=200", "training.batch_size=16", "optimizer.lr=0.01", "schedule.warmup=5"]
    quiet = ["training.threads=1", "training.device=cpu", "logging.progress=false"]
    data = ["data=tokens", f"data.folder={folder / 'data'}"]
    workers = ["workers=simulated", "workers.count=1", "optimizer=adamw"]
    assert launch("gpt2", [*data, *shape, *training, *quiet, *workers, f"run_dir={folder / 'run'}"]) == 0
    return folder / "run"


def test_a_trained_model_writes_its_corpus(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"run={run}", "prompt=the cat", "tokens=60", "temperature=0", "checkpoint=last"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("the cat")
    assert len(out) == len("the cat") + 60 + 1
    assert " the mat. " in out


def test_the_seed_decides(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*settings: str) -> str:
        assert main([f"run={run}", "tokens=40", "temperature=1.5", *settings]) == 0
        return capsys.readouterr().out

    assert text("seed=1") == text("seed=1")
    assert text("seed=1") != text("seed=2")
    two = text("seed=1", "samples=2").split("-" * 80 + "\n")
    assert two[0] == text("seed=1")
    assert len({two[0], two[1]}) == 2


def test_what_cannot_be_sampled_from_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("task: cnn\nmodel: {name: resnet18}\n")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    for folder, message in (
        (tmp_path / "nowhere", "expected the config.yaml of a gpt2 run"),
        (tmp_path, "expected the config.yaml of a gpt2 run"),
        (broken, "best.pt: cannot be read"),
    ):
        assert main([f"run={folder}"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    for setting in ("temperature=-1", "top_k=0", "tokens=0", "device=tpu", "checkpoint=first"):
        assert main([f"run={run}", setting]) == 2
        assert setting.split("=")[0] in capsys.readouterr().err


def test_a_damaged_model_is_refused_in_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    model, config = tmp_path / "checkpoints/best.pt", (run / "config.yaml").read_bytes()
    (tmp_path / "config.yaml").write_bytes(config)
    state = torch.load(run / "checkpoints/best.pt", weights_only=True)
    for change, problem in {
        lambda: model.write_bytes(b""): "best.pt: cannot be read as a model (the file is damaged",
        lambda: torch.save({**state, "norm.weight": 3}, model): "best.pt: expected a bare state dict",
        lambda: torch.save({"weight": torch.zeros(1)}, model): "best.pt: expected a state dict of this model: Error(s)",
        lambda: torch.save({name: value / 0 for name, value in state.items()}, model): "best.pt: expected finite",
        lambda: (tmp_path / "config.yaml").write_bytes(b"caf\xe9: 1"): "expected the config.yaml of a gpt2 run",
    }.items():
        change()
        assert main([f"run={tmp_path}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert "init_from" not in line
        assert problem in line


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["run=somewhere", "device=cuda"]) == 2
    assert capsys.readouterr().err == "error: device=cuda: no GPU is available, expected cpu\n"
