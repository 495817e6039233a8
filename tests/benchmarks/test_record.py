"""What a benchmark writes."""

import csv
from pathlib import Path

from scripts.benchmarks.record import Benchmark


def test_writes_table_definitions_and_origin(tmp_path: Path, capsys) -> None:
    columns = {"name": "what was timed", "rate": "per second", "note": "where there is one"}
    benchmark = Benchmark("speed", "How fast", columns, {"rate": ",.0f"})
    rows = [{"name": "a", "rate": 1234.5678}, {"name": "b", "rate": 5.0, "note": "slow"}]
    benchmark.write(rows, ["One.", "Two."], f"{tmp_path}/new/folder", "python -m x", "1 used", packages=("pytest",))
    with (tmp_path / "new" / "folder" / "speed.csv").open() as file:
        assert list(csv.DictReader(file)) == [
            {"name": "a", "rate": "1234.57", "note": ""},
            {"name": "b", "rate": "5", "note": "slow"},
        ]
    lines = (tmp_path / "new" / "folder" / "speed.md").read_text().splitlines()
    assert lines[:5] == ["# How fast", "", "One.", "", "Two."]
    assert [cell.strip() for cell in lines[8].split("|")[1:-1]] == ["a", "1,235", ""]
    assert "- `rate`: per second" in lines
    assert any(line.startswith("- Hardware: ") and line.endswith("of which 1 used") for line in lines)
    assert any(line.startswith("- Software: python 3") and "pytest " in line for line in lines)
    assert lines[-1] == "- Made by `python -m x`"
    assert "speed.csv" in capsys.readouterr().out
