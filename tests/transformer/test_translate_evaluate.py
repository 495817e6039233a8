"""A finished run's models: translating lines, scoring and drawing every kept one, averages."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import sacrebleu
import torch

from common.record.checkpoint import read_model
from transformer import translate
from transformer.corpus import Corpus
from transformer.evaluate import find
from transformer.evaluate import main as evaluate
from transformer.model import Transformer
from transformer.scores import paper_bleu, wordnet_problem
from transformer.search import Search, beam_search
from transformer.task import search_of
from transformer.translate import mean_of, open_run, read_config


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that the test may change."""
    return shutil.copytree(run_folder, tmp_path / "run")


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return a function that calls the command with lines on standard input and returns those on standard output."""

    def call(text: str, *arguments: Any) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        capsys.readouterr()
        assert translate.main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out.split("\n")[:-1]

    return call


def alone(run: Path, line: str) -> str:
    """One line by the model itself."""
    opened = open_run(run)
    search = search_of(opened.config)
    model = opened.translator([run / "checkpoints/best.pt"], search, 4096).model
    return opened.corpus.line(beam_search(model, opened.corpus.encode(line)[None], None, search)[0][0].tokens)


def test_lines_are_translated_in_their_order(run: Path, translated: Callable[..., list[str]]) -> None:
    lines = [
        "cat door.",
        "",
        "apple apple book egg fish gate hill.",
        "  ",
        "\u200b",
        "something unseen: caf\u00e9 \u2014 42!",
        "egg.",
    ]
    found = translated("\n".join(lines) + "\n", f"checkpoint={run}/checkpoints/best.pt", "batch_size=12")
    assert found == [alone(run, line) if line.strip(" \u200b") else "" for line in lines]


def test_many_lines_come_in_chunks(
    run: Path, translated: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "LINES_AT_A_TIME", 2)
    lines = ["cat.", "door egg.", "hill.", "fish fish.", "gate."]
    found = translated("\n".join(lines), f"checkpoint={run}/checkpoints/last.pt")
    assert len(found) == 5
    assert found == translated("\r\n".join(lines), f"checkpoint={run}/checkpoints/last.pt", f"run={run}")
    shutil.copy(run / "checkpoints/last.pt", run / "checkpoints/models/step_00000009.pt")
    assert found == translated("\n".join(lines), f"checkpoint={run}/checkpoints/models/step_00000009.pt")


def test_data_and_run_may_have_moved(run: Path, translated: Callable[..., list[str]], tmp_path: Path) -> None:
    expected = translated("cat egg.\n", f"checkpoint={run}/checkpoints/best.pt")
    moved = shutil.copytree(read_config(run).data.path, tmp_path / "elsewhere")
    model = shutil.copyfile(run / "checkpoints/best.pt", tmp_path / "model.pt")
    config = (run / "config.yaml").read_text().replace(read_config(run).data.path, "/nowhere")
    (run / "config.yaml").write_text(config)
    assert translated("cat egg.\n", f"checkpoint={model}", f"run={run}", f"data={moved}") == expected
    greedy = translated("cat egg.\n", "--checkpoint", model, f"--run={run}", "--data", moved, "--beam", 1)
    assert len(greedy) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["checkpoint=RUN/checkpoints/none.pt"], "none.pt: cannot be read as a model"),
        (["checkpoint=RUN/config.yaml", "run=RUN"], "config.yaml: cannot be read as a model"),
        (["checkpoint=RUN/checkpoints/best.pt", "run=/nowhere"], "/nowhere/config.yaml: cannot be read"),
        (["checkpoint=RUN/checkpoints/best.pt", "data=/nowhere"], "data.path=/nowhere: no such folder"),
        (["checkpoint=RUN/checkpoints/step_00000040/rank_0.pt", "run=RUN"], "expected a bare state dict"),
        (["checkpoint=RUN/checkpoints/best.pt", "beam=12"], "beam=12: expected less than half of the 24 tokens"),
    ],
)
def test_what_cannot_be_used_is_refused(
    run: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate.main([argument.replace("RUN", str(run)) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert problem in error


def test_a_line_that_is_not_utf_8_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"cat door.\nna\xefve\n")))
    assert translate.main([f"checkpoint={run}/checkpoints/best.pt"]) == 2
    assert "error: standard input, line 2: expected UTF-8, found byte 0xef" in capsys.readouterr().err


def test_a_model_of_another_size_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (run / "config.yaml").read_text().replace("width: 16", "width: 32")
    (run / "config.yaml").write_text(config)
    assert translate.main([f"checkpoint={run}/checkpoints/best.pt"]) == 2
    assert "expected a state dict of the run's model" in capsys.readouterr().err


# -- evaluate


def test_every_kept_model_is_scored(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate([f"run={run}", "average=2", "threads=1"]) == 0
    told = capsys.readouterr().out
    frame = pd.read_csv(run / "evaluation/test.csv")
    names = ["step_00000020", "step_00000030", "step_00000040", "best", "last", "average_2"]
    assert frame["model"].tolist() == names
    summary = json.loads((run / "summary.json").read_text())
    assert frame["step"].tolist() == [20, 30, 40, summary["best"]["validation"]["step"], 40, 40]
    record = json.loads((run / "evaluation/test.json").read_text())
    assert record["signatures"]["bleu"].startswith("nrefs:1|case:mixed")
    assert record["signatures"]["bleu"] in told
    assert "not comparable with sacreBLEU" in record["definitions"]["paper_bleu"]
    assert ("meteor" in frame) == (wordnet_problem() is None)
    assert (run / "evaluation/test.png").read_bytes().startswith(b"\x89PNG")
    corpus = Corpus(read_config(run).data)
    references, _ = corpus.references("test")
    for name, bleu in frame[["model", "bleu"]].itertuples(index=False):
        lines = (run / f"evaluation/test.{name}.txt").read_text().split("\n")[:-1]
        assert bleu == pytest.approx(sacrebleu.corpus_bleu(lines, [references]).score, rel=1e-5)
    last = frame[frame["model"].isin(["step_00000040", "last"])].drop(columns=["model"])
    assert last.iloc[0].equals(last.iloc[1])


def test_the_papers_bleu_is_that_of_greedy_translations(run: Path) -> None:
    assert evaluate([f"run={run}", "models=last"]) == 0
    (row,) = json.loads((run / "evaluation/test.json").read_text())["rows"]
    opened = open_run(run)
    corpus = opened.corpus
    greedy = opened.translator([run / "checkpoints/last.pt"], Search(1, 0.6, 50), 4096).split(corpus.split("test"))
    references = [corpus.words(tokens) for tokens in map(corpus.split("test").target_tokens, range(len(greedy)))]
    assert row["paper_bleu"] == pytest.approx(paper_bleu([corpus.words(tokens) for tokens in greedy], references))


def test_the_validation_loss_is_the_one_of_the_run(run: Path) -> None:
    assert evaluate([f"run={run}", "split=valid", "models=last"]) == 0
    (row,) = json.loads((run / "evaluation/valid.json").read_text())["rows"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "loss_smoothed"):
        assert row[name] == pytest.approx(rows[-1][name], rel=1e-5)
    assert row["model"] == "last"


def test_the_average_is_the_mean_of_the_weights(run: Path) -> None:
    files = sorted((run / "checkpoints/models").iterdir())[-2:]
    states = [torch.load(file, weights_only=True) for file in files]
    mean = mean_of([read_model(file) for file in files])
    for name, tensor in mean.items():
        assert torch.allclose(tensor, (states[0][name] + states[1][name]) / 2, atol=1e-7)
        assert tensor.dtype == states[0][name].dtype


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["run=/nowhere"], "/nowhere/config.yaml: cannot be read"),
        (["run=RUN", "average=9"], "average=9: expected at most the 3 models"),
        (["run=RUN", "split=train"], "split='train'"),
        (["run=RUN", "modells=best"], "modells: unknown key"),
    ],
)
def test_evaluate_refuses(
    run_folder: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate([argument.replace("RUN", str(run_folder)) for argument in arguments]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_without_models_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    assert evaluate([f"run={run}"]) == 2
    assert f"no model in {run}/checkpoints" in capsys.readouterr().err


def spoil(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(content) and None


def save(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    best = "checkpoints/best.pt"
    return lambda run: torch.save(change(torch.load(run / best, weights_only=True)), run / best)


DAMAGED = {
    "a cut model": (
        lambda run: (run / "checkpoints/best.pt").write_bytes((run / "checkpoints/best.pt").read_bytes()[:-9]),
        "best.pt: cannot be read as a model (the file is damaged",
    ),
    "another model": (save(lambda state: dict(list(state.items())[:2])), "best.pt: expected a state dict of the run's"),
    "no names": (save(lambda state: dict(enumerate(state.values()))), "best.pt: expected a bare state dict"),
    "a diverged model": (
        save(lambda state: {name: value * float("nan") for name, value in state.items()}),
        "best.pt: expected finite weights, but embedding.weight holds others",
    ),
    "no configuration": (spoil("config.yaml", b"caf\xe9: [1"), "config.yaml: cannot be read ("),
    "another task": (spoil("config.yaml", b"name: x\ndata: 1"), "no configuration of the transformer task: data=1: "),
    "no summary": (spoil("summary.json", b"\xff"), "summary.json: expected the summary of a run"),
    "another summary": (spoil("summary.json", b"[]"), "summary.json: expected the summary of a run"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_run_is_refused_in_one_line(damage: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, problem = DAMAGED[damage]
    change(run)
    capsys.readouterr()
    assert evaluate([f"run={run}", "models=best", "split=valid"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert not (run / "evaluation").exists()


def test_files_beside_the_kept_models_are_no_models(run: Path) -> None:
    (run / "checkpoints/models/step_of_mine.pt").write_bytes(b"")
    assert all(candidate.step is not None for candidate in find(run, "all", 0))


def test_a_model_that_is_not_finite_translates_into_nothing() -> None:
    """In training, where `training.on_nan=warn` goes on."""
    model = Transformer(24, 16, 16, 2, 1, 1, dropout=0.0)
    torch.nn.init.constant_(model.embedding.weight, torch.nan)
    assert [h.tokens for h in beam_search(model.eval(), torch.tensor([[5, 6, 2]]))[0]] == [()]
