"""The arrows of the architecture: no circles among modules, nothing in `common` imports a task, no task another."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

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
