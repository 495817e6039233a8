"""The comparison of predicted step times with known ones: what it writes, and what it refuses."""

import csv
from pathlib import Path

import pytest

from scripts.benchmarks.runtime_model import main

HEADER = "engine,model,hosts,ranks_per_host,mbit_per_s,topology,step_ms,compute_ms,payload_mb,bucket_mb,"
HEADER += "condition,steps,rounds"


def test_against_measured_rows(tmp_path: Path) -> None:
    file = tmp_path / "parallel.csv"
    rows = ["alone,gpt,4,1,200,fused,103,100,10,2,even,40,2", "ours,gpt,4,1,200,one_peer_ring,420,100,10,2,even,40,2"]
    file.write_text("\n".join([HEADER, *rows, "ours,gpt,4,1,200,one_peer_ring,99,0,10,2,even,40,2"]) + "\n")
    assert main(["against=parallel", f"measured={file}", f"output={tmp_path}"]) == 0
    with (tmp_path / "parallel_prediction.csv").open() as table:
        (row,) = csv.DictReader(table)
    assert float(row["update_ms"]) == 3
    assert float(row["predicted_ms"]) == pytest.approx(80 / 0.2 * 1514 / 1448, rel=0.02)  # the wire's time
    text = (tmp_path / "parallel_prediction.md").read_text()
    assert "Median error of 1 rows: " in text
    assert "Left out: ours, one_peer_ring, 4 x 1, 200 Mbit/s: a real model's compute time" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["against=parallel", "measured=nowhere.csv"],
            "measured=nowhere.csv: no such file; scripts.benchmarks.parallel",
        ),
        (["against=figure7"], "against='figure7'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_table_without_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parallel.csv").write_text("engine,step_ms\nddp,3\n")
    assert main(["against=parallel", f"measured={tmp_path}/parallel.csv"]) == 2
    assert "columns model, hosts" in capsys.readouterr().err
