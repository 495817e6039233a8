"""profile=true: a trace in which communication and computation are named, and its picture."""

import json
from pathlib import Path

import pytest

from common.launch.processes import launch
from scripts.plot_trace import main, read_spans
from tests.training.runs import RUN


def test_messages_travel_during_the_passes(tmp_path: Path) -> None:
    # An evaluation or a checkpoint waits for what travels.
    rare = ["training.checkpoint_every=1000", "evaluation.every=1000"]
    arguments = [*RUN, *rare, "workers.count=2", "training.steps=20", "profile=true", f"run_dir={tmp_path}/run"]
    assert launch("cnn", arguments) == 0
    for rank in range(2):
        spans = read_spans(tmp_path / "run" / "trace" / f"rank_{rank}.json")
        assert [len(spans[name]) for name in ("step", "forward", "backward", "optimizer")] == [4, 4, 4, 4]
        assert len(spans["gossip::launch"]) == len(spans["gossip::merge"]) == 4
        for (forward, _), (backward, length) in zip(spans["forward"][1:], spans["backward"][1:], strict=True):
            assert any(
                begin < forward and begin + last > backward + length for begin, last in spans["messages in flight"]
            )
    assert main([f"trace={tmp_path}/run/trace/rank_0.json"]) == 0
    assert (tmp_path / "run" / "trace" / "rank_0.png").read_bytes().startswith(b"\x89PNG")


def test_simulated_workers_are_traced_too(tmp_path: Path, capsys) -> None:
    arguments = [*RUN, "workers=simulated", "workers.count=2", "training.steps=20", "profile=true"]
    assert launch("cnn", [*arguments, f"run_dir={tmp_path}/run"]) == 0
    assert len(read_spans(tmp_path / "run" / "trace" / "rank_0.json")["forward"]) == 8
    assert f"trace: {tmp_path}/run/trace/rank_0.json\n" in capsys.readouterr().err


def test_too_few_steps_for_a_trace_are_told(tmp_path: Path, capsys) -> None:
    arguments = [*RUN, "workers=simulated", "workers.count=2", "training.steps=12", "profile=true"]
    assert launch("cnn", [*arguments, f"run_dir={tmp_path}/run"]) == 0
    assert "profile=true: no trace: it begins with step 13 of a start" in capsys.readouterr().err


def test_what_is_no_trace_is_refused(tmp_path: Path, capsys) -> None:
    file = tmp_path / "trace.json"
    assert main([f"trace={file}"]) == 2
    file.write_text(json.dumps({"traceEvents": []}))
    assert main([f"trace={file}"]) == 2
    assert "profile=true" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "[1, 2]",
        '{"traceEvents": 5}',
        '{"traceEvents": [null]}',
        '{"traceEvents": [{"ph": "X", "cat": "user_annotation"}]}',
        '{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": "x"}]}',
    ],
)
def test_json_that_is_no_trace_is_refused(content: str, tmp_path, capsys) -> None:
    (tmp_path / "a.json").write_text(content)
    assert main([f"trace={tmp_path / 'a.json'}"]) == 2
    assert f"trace={tmp_path / 'a.json'}: expected a trace of profile=true (" in capsys.readouterr().err
