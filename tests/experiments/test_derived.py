"""What leaves a host: counted edge by edge, and from runs whose traffic is known."""

from pathlib import Path
from typing import Any

import pytest

from common.experiments.derived import leaving_share
from common.experiments.runs import FinishedRun, RunError


def run(
    topology: dict[str, Any], parallel: dict[str, Any], engine: str | None = None, per_host: int = 2
) -> FinishedRun:
    config = {"workers": {"count": 8, "per_host": per_host}, "topology": topology}
    config["parallel"] = {"method": "decentralized", "message_dtype": None} | parallel
    return FinishedRun(Path("r"), config, {"emulated": {"engine": engine}}, {}, None)


AER, BETWEEN = {"name": "aer"}, {"name": "one_peer_exponential", "between_hosts": True}
EXPONENTIAL = {"name": "one_peer_exponential"}


@pytest.mark.parametrize(
    ("found", "share"),
    [
        (run({"name": "complete"}, {"method": "allreduce"}), 1.0),
        (run({"name": "complete"}, {"method": "allreduce"}, per_host=8), 0.0),
        # A worker sends one payload inside, and half of what its host sends: one payload, on AER in every second step.
        (run(BETWEEN, {}), 1 / 1.5),
        (run(BETWEEN, {"message_dtype": "bfloat16"}), 0.5 / 1.25),
        (run(AER, {}), 0.5 / 1.25),
        # Of shifts by 1, 2 and 4 the first stays inside for every second worker.
        (run(EXPONENTIAL, {}), (1 + 2 + 2) / 3),
        (run(EXPONENTIAL, {"message_dtype": "int8"}), (1 + 2 + 2) / 3),
        (run(EXPONENTIAL, {}, per_host=1), 1.0),
        (run({"name": "complete"}, {}, engine="decent_dp"), 1.0),
    ],
)
def test_share_that_leaves_a_host(found: FinishedRun, share: float) -> None:
    assert leaving_share(found) == pytest.approx(share)


def test_a_run_without_hosts() -> None:
    with pytest.raises(RunError, match="what leaves a host is not known"):
        leaving_share(run(AER, {}, per_host=None))
