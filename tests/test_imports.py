"""The arrows of the architecture: no circles among modules, nothing in `common` imports a task, no task another."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("cnn", "transformer", "gpt2")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("common", *TASKS, "scripts", "slurm")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imported(path: Path) -> Iterator[str]:
    """Yield the project's modules that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield from {name if name in MODULES else name.rpartition(".")[0]} & MODULES.keys()


@cache
def graph() -> dict[str, set[str]]:
    return {name: set(imported(path)) - {name} for name, path in MODULES.items()}


@pytest.mark.slow
def test_what_is_imported_before_workers_are_forked_does_not_ask_for_gpus() -> None:
    """Where NVML is missing, to ask starts CUDA, and a process that is forked after that cannot use it."""
    code = """
import importlib, torch
def ask(*_):
    raise SystemExit("CUDA may have started")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = ask
import common.launch.processes, torch._dynamo
for task in ("cnn", "transformer", "gpt2"):
    for late in importlib.import_module(f"{task}.task").TASK.late_imports:
        importlib.import_module(late)
assert not torch.cuda.is_initialized()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_modules_import_each_other_in_one_direction() -> None:
    try:
        list(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_common_imports_no_task_and_tasks_no_other() -> None:
    wrong = [
        f"{name} -> {other}"
        for name, others in graph().items()
        for other in others
        if other.split(".")[0] in TASKS and name.split(".")[0] in ({"common", *TASKS} - {other.split(".")[0]})
    ]
    assert not wrong


# What a room of common/ may import besides the modules of common/ itself.
ROOMS = {
    "topology": (),
    "config": ("topology",),
    "optim": (),
    "parallel": ("optim", "topology"),
    "simulate": ("optim", "parallel", "topology"),
    "planner": ("topology",),
    "record": ("config", "parallel"),
    "training": ("config", "optim", "parallel", "record", "simulate"),
    "elastic": ("config", "parallel", "record", "training"),
    "launch": ("config", "elastic", "parallel", "record", "training"),
    "experiments": ("config", "planner", "topology"),
    "report": ("experiments", "planner"),
    "explorer": ("config", "experiments", "planner", "record", "report", "topology"),
}


def test_rooms_of_common_import_only_rooms_below_them() -> None:
    arrows = {
        (name.split(".")[1], other.split(".")[1])
        for name, others in graph().items()
        for other in others
        if name.startswith("common.") and other.startswith("common.")
    }
    rooms = {path.name for path in (ROOT / "common").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms == ROOMS.keys()
    allowed = {(room, below) for room, others in ROOMS.items() for below in (room, *others)}
    assert {(room, below) for room, below in arrows if room in rooms and below in rooms} <= allowed


def test_what_makes_runs_needs_nothing_that_shows_them() -> None:
    needs = {
        name
        for name in graph()
        if name.startswith(("common.experiments", "scripts.lib.making", "scripts.lib.submitting"))
    }
    assert not [f"{name} -> {other}" for name in needs for other in graph()[name] if other.startswith("common.report")]
    code = """
import sys, common.experiments.load, scripts.lib.making, slurm.submit
sys.exit(", ".join({"matplotlib", "scipy", "torch"} & {*sys.modules}) or 0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")
