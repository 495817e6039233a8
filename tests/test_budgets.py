"""The house has a budget of lines. Whoever goes over it takes something out, and does not raise the number."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# The most lines of Python in each room. A new feature pays for its lines with what it makes superfluous.
ROOMS = {
    "cnn": 2289,
    "common": 2002,  # without its rooms
    "common/config": 1047,
    "common/elastic": 1350,
    "common/experiments": 1850,
    "common/explorer": 1100,
    "common/launch": 783,
    "common/optim": 1384,
    "common/parallel": 4362,
    "common/planner": 1122,
    "common/record": 1080,
    "common/report": 2064,
    "common/simulate": 641,
    "common/topology": 1720,
    "common/training": 2080,
    "gpt2": 1615,
    "scripts": 1004,  # without its rooms
    "scripts/benchmarks": 1501,
    "scripts/lib": 330,
    "slurm": 950,
    "tests": 31129,
    "transformer": 2675,
}
SLACK = 0.05  # of a budget: what was won stays won
FILES = 236  # of all rooms but the tests
LONGEST_FILE, LONGEST_FUNCTION = 350, 60  # lines, docstrings included
LONGER = {  # and why
    "common/parallel/gossip/mixer.py": "the order in which messages are launched and merged stands in one place"
}


def files_of(room: str) -> Iterator[Path]:
    """Yield the files of a room, without those of rooms inside it."""
    inner = [ROOT / other for other in ROOMS if other.startswith(f"{room}/")]
    for file in sorted((ROOT / room).rglob("*.py")):
        if not any(file.is_relative_to(other) for other in inner):
            yield file


def lines_of(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


PRODUCT = [file for room in ROOMS if room != "tests" for file in files_of(room)]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_keep_their_budgets(room: str) -> None:
    used, budget = sum(map(lines_of, files_of(room))), ROOMS[room]
    assert used <= budget, f"{room}: {used} lines, expected at most {budget}: take something out"
    assert used >= (1 - SLACK) * budget, f"{room}: {used} lines: lower its budget of {budget}"


def test_every_folder_with_code_is_a_room_or_in_one() -> None:
    folders = {
        path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and any(path.rglob("*.py"))
    }
    assert folders - {"runs", "data"} == {room for room in ROOMS if "/" not in room}
    assert {f"common/{path.parent.name}" for path in ROOT.glob("common/*/*.py")} <= ROOMS.keys()
    assert len(PRODUCT) <= FILES, f"{len(PRODUCT)} files, expected at most {FILES}: merge what exists only to be small"


def test_files_and_functions_are_short() -> None:
    long = {str(file.relative_to(ROOT)) for file in PRODUCT if lines_of(file) > LONGEST_FILE}
    assert long == LONGER.keys()
    for file in PRODUCT:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = node.end_lineno - node.lineno + 1
                assert size <= LONGEST_FUNCTION, f"{file}: {node.name} has {size} lines"
