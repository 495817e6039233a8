"""What many ranks cost before they train: counted in real processes."""

import pytest
import torch

from scripts.benchmarks.startup import KNOWN, main, of_topology
from tests.distributed.processes import run_processes


def rows(rank: int, n: int) -> list[dict[str, object]]:
    return [row for name in KNOWN for row in of_topology(name, torch.device("cpu"), 1, steps=2)]


@pytest.mark.slow
def test_groups_connections_and_memory() -> None:
    first, second = run_processes(rows, 2)
    assert first == second
    by_name = {row["topology"]: row for row in first}
    assert by_name.keys() >= {"allreduce", "complete", "one_peer_exponential", "ring"}  # aer needs more workers
    for row in by_name.values():
        assert row["groups"] == 2  # all ranks; and for messages between workers
        assert row["connections"] >= row["groups"]  # each connects the two
        assert row["resident_mb"] > max(row["wrapper_mb"], 50)
        assert row["wrap_s"] > 0
        assert row["step_ms"] > 0
        assert row["step_cpu_ms"] > 0


def test_an_unknown_topology(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topologies=complte"]) == 2
    assert "topologies=complte: 'complte': did you mean 'complete'?" in capsys.readouterr().err
