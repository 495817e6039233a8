"""Predictions for many workers: what is computed from them, and their picture."""

import math
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from common.cli import UsageError
from common.report.figures import drawing_of, load_figure
from common.runtime.cluster import Cluster
from common.topology import build
from scripts.benchmarks.extrapolation import main, rounds_to_agree


def test_rounds_until_workers_agree() -> None:
    cluster = Cluster(hosts=4, workers_per_host=2)
    assert rounds_to_agree("one_peer_exponential", cluster) == 3
    assert rounds_to_agree("one_peer_exponential between hosts", cluster) == 2
    assert (1 - build("ring", 8).spectral_gap()) ** rounds_to_agree("ring", cluster) == pytest.approx(0.01)


def test_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure_file = load_figure("extrapolation")
    with pytest.raises(UsageError, match=r"extrapolation\.csv is missing; make it with: python -m scripts"):
        drawing_of(figure_file, {}.get, tmp_path)
    assert main(["workers=4,16", "workers_per_host=4", "steps=50", f"output={tmp_path}"]) == 0
    frame = pd.read_csv(tmp_path / "extrapolation.csv")
    assert set(frame.workers) == {4, 16}
    assert list(frame.hosts[frame.topology == "complete"]) == [1, 1, 4, 4]
    for row in frame.itertuples():
        assert row.contraction_per_s == pytest.approx(-math.log(0.01) / row.agreement_s, rel=1e-4)
        assert row.agreement_s == pytest.approx(row.rounds * row.step_ms / 1000, rel=1e-4)
    assert (
        "Everything here is predicted by the runtime model, for workers_per_host 4, "
        in (tmp_path / "extrapolation.md").read_text()
    )
    figure = drawing_of(figure_file, {}.get, tmp_path).draw()
    assert isinstance(figure, Figure)
    assert "not measured" in figure.get_suptitle()
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels >= {"all-reduce, complete, aligned", "gossip, one peer exponential between hosts, aligned"}
    assert [ax.get_ylabel() for ax in figure.axes] == list(figure_file.values.values())
