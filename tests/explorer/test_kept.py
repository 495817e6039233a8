"""The tracked page is what its command makes."""

import pytest

from common.experiments.definitions import ROOT
from scripts.report import PAGE, main


@pytest.mark.slow
def test_every_number_of_the_kept_page_follows_from_the_records(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    status = main(["--check"])
    assert (status, capsys.readouterr().err) == (0, ""), f"python -m scripts.report makes {PAGE} anew"
