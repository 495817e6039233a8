"""The benchmark of averaging: under a launcher and on emulated hosts it writes what it says."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from common.experiments.definitions import ROOT
from common.parallel import Outer
from scripts.benchmarks import engines
from scripts.benchmarks.arguments import AveragingArguments
from scripts.benchmarks.hosts import main
from scripts.benchmarks.tables import conclude
from tests.scripts.namespaces import needs_namespaces

SMALL = ["measure=averaging", "iterations=2", "tensor_mb=0.5", "tensors=2"]


def rows_of(file: Path) -> dict[str, dict[str, str]]:
    with file.open() as table:
        return {row["topology"]: row for row in csv.DictReader(table)}


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    program = [
        "-m",
        "scripts.benchmarks.hosts",
        *SMALL,
        "topologies=allreduce,complete,aer",
        f"output={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "communication.csv")
    assert list(rows) == ["allreduce", "complete", "aer"]
    for row in rows.values():
        assert (row["workers"], row["hosts"], row["ranks_per_host"], row["mbit_per_s"]) == ("2", "1", "2", "")
        assert float(row["seconds_per_iteration"]) == pytest.approx(float(row["seconds"]) / 2, rel=1e-4)
        assert row["bytes_per_host"] == ""
    text = (tmp_path / "communication.md").read_text()
    assert "Table 1 of arXiv 2410.11998" in text
    assert "not published, as far as is known here" in text


@pytest.mark.slow
@needs_namespaces
def test_on_emulated_hosts_bytes_are_those_of_the_topology(tmp_path: Path) -> None:
    # In another process with its own limit: it removes the hosts even if this test's time is over.
    chosen = ["layouts=2x1", "mbit_per_s=400", "delay_ms=0", "limit_s=150", "topologies=allreduce,one_peer_ring"]
    command = [sys.executable, "-m", "scripts.benchmarks.hosts", *SMALL, *chosen, f"output={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "communication.csv")
    for row in rows.values():  # two tensors of 0.5 MB: S leaves a host, by either way between two
        assert (row["hosts"], row["mbit_per_s"], row["backend"]) == ("2", "400", "gloo")
        assert float(row["bytes_per_host"]) == pytest.approx(1e6, rel=0.1)
        assert float(row["seconds_per_iteration"]) > 0.5 * 1e6 * 8 / 400e6  # no faster than the wire, but its bursts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topologies=allreduce,triangle"], "topologies=allreduce,triangle: 'triangle': "),
        (["layouts=4"], "layouts='4'"),
        (["iterations=0"], "iterations=0"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure=averaging", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_topologies_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    made: list[tuple] = []
    monkeypatch.setattr(
        "common.parallel.DecentralizedDataParallel", lambda *args, **options: made.append((args, options))
    )
    engines.gossip(nn.Linear(1, 1), "one_peer_ring/between_hosts/staggered", 2.0, L=2)
    (((_, topology), options),) = made
    assert topology.round(0).groups[0] == (0, 1, 2, 3)
    assert options == {"bucket_mb": 2.0, "timeout_s": engines.TIMEOUT_S, "phases": "staggered"}
    engines.gossip(nn.Linear(1, 1), "aer/atc/push_sum/10/4", 2.0, L=2)
    local = {"local_steps": 10, "merge_after": 4, "outer": Outer(lr=0.4, momentum=0.9)}
    assert made[1][1] == {"bucket_mb": 2.0, "timeout_s": engines.TIMEOUT_S, "order": "atc", "push_sum": True} | local
    with pytest.raises(ValueError, match="one rank each"):
        engines.gossip(nn.Linear(1, 1), "one_peer_ring/between_hosts", 2.0, L=1)


def test_the_conclusion_names_the_fastest() -> None:
    place = {"workers": 8, "hosts": 4, "ranks_per_host": 2, "mbit_per_s": 200.0}
    rows = [place | {"topology": name, "seconds": s} for name, s in (("allreduce", 4.0), ("aer", 1.0), ("ring", 5.0))]
    assert (
        "4 hosts x 2 at 200 Mbit/s: aer takes 0.25 of all-reduce's time."
        in conclude(AveragingArguments(measure="averaging"), rows)[0]
    )
