"""Tables and figures from benchmarks' records."""

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.image import imread

from common.cli import UsageError
from common.report.benchmark_tables import build_benchmark, load_benchmark
from scripts.figures import main as figures
from scripts.tables import main as tables

RECORDS = Path("results/benchmarks")
SCALING = """method,engine,topology,workers,hosts,ranks_per_host,mbit_per_s,compute,step_ms,step_ms_spread
AllReduce,ddp,complete,8,4,2,200,wait,2000,20
SGP (Exp),ours,one_peer_exponential,8,4,2,200,wait,1500,20
Decent (AER),ours,aer,8,4,2,200,wait,500,20
Decent (AER),ours,aer,16,8,2,200,wait,400,20
"""
COMMUNICATION = (
    "topology,workers,hosts,ranks_per_host,mbit_per_s,backend,iterations,tensors,seconds,seconds_per_iteration,"
    "bytes_per_host"
)


@pytest.fixture
def records() -> Path:
    RECORDS.mkdir(parents=True)
    (RECORDS / "scaling.csv").write_text(SCALING)
    return RECORDS


def test_ours_stand_below_the_published_ones(records):
    frame = build_benchmark(load_benchmark("figure6"), records)
    assert frame["source"].value_counts().to_dict() == {"published": 36, "ours": 4}
    ours = frame[frame["source"] == "ours"]
    assert ours["method"].tolist() == ["AllReduce", "SGP (Exp)", "Decent (AER)", "Decent (AER)"]
    assert ours["step_ms_ratio"].tolist() == [1.0, 0.75, 0.25, None]  # nothing to compare with for 16 workers
    assert ours["cluster"].iloc[0] == "2 ranks on a host, 200 Mbit/s"
    published = frame[(frame["cluster"] == "A40, 4 per node, 25 Gbps Ethernet") & (frame["workers"] == 32)]
    assert published["step_ms"].tolist() == [188.5, 112.4, 110.8, 67.9]
    assert published["step_ms_ratio"].tolist() == pytest.approx([1, 112.4 / 188.5, 110.8 / 188.5, 67.9 / 188.5])


def test_the_records_own_words_on_hardware_and_whole_numbers(records):
    (records / "scaling.md").write_text(
        "# Scaling\n\nFast.\n\n| a |\n\n## Columns\n\n- `a`: b\n\n## Where the numbers come from\n\n- Hardware: a box\n"
    )
    assert tables(["table=figure6", "output=out"]) == 0
    text = Path("out/figure6.md").read_text()
    assert (
        "- Ours: `results/benchmarks/scaling.csv`\n- Hardware: a box\n- This table: `python -m scripts.tables" in text
    )
    (records / "communication.csv").write_text(
        f"{COMMUNICATION}\nallreduce,8,4,2,200,gloo,20,3 x 25 MB fp32,4.0,0.2,100\n"
    )
    frame = build_benchmark(load_benchmark("table1"), records)
    assert str(frame["iterations"].iloc[-1]) == "20"


def test_files_are_written_and_a_missing_record_has_its_command(records, capsys):
    assert tables(["table=figure6", "output=out"]) == 0
    assert len(pd.read_csv("out/figure6.csv")) == 40
    assert "## Missing" not in Path("out/figure6.md").read_text()
    assert tables(["table=1", "output=out"]) == 0
    assert {path.name for path in Path("out").iterdir()} == {"figure6.csv", "figure6.md", "table1.csv", "table1.md"}
    missing = "all rows of ours: no communication.csv: python -m scripts.benchmarks.hosts measure=averaging"
    assert f"missing: {missing}" in capsys.readouterr().out
    text = Path("out/table1.md").read_text()
    assert text.endswith(f"\n## Missing\n\n- {missing}\n")
    assert "unknown" in text
    assert "- Unknown: setup_1 seconds, setup_2 seconds: " in text


def test_wrong_records_are_refused(records, capsys):
    (records / "scaling.csv").write_text(SCALING.replace("step_ms,", "ms,"))
    assert tables(["table=figure6"]) == 2
    assert "scaling.csv: expected columns step_ms" in capsys.readouterr().err
    (records / "scaling.csv").write_text("")
    assert tables(["table=figure6"]) == 2
    with pytest.raises(UsageError, match="table=figure: unknown; did you mean 'figure6'"):
        load_benchmark("figure")


def test_bars_of_both(records):
    assert figures(["figure=6", "output=out", "formats=[png,svg]"]) == 0
    assert imread("out/figure6.png").std() > 0.05
    svg = Path("out/figure6.svg").read_text()
    assert "published: A40, 4 per node" in svg
    assert "ours: 2 ranks on a host" in svg
