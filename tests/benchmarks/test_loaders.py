"""The benchmark of the loaders: a tiny run writes its table; what it concludes."""

from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from scripts.benchmarks import loaders as bench_loaders


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed (see `make env`)")
def test_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HEIGHT": 30, "WIDTH": 40, "FILES": 8, "BATCH": 8, "UNTIMED": 1}.items():
        monkeypatch.setattr(bench_loaders, name, value)
    assert bench_loaders.main(["pixels=16", "images=512", "workers=1", "rounds=2", f"output={tmp_path}"]) == 0
    frame = pd.read_csv(tmp_path / "loaders.csv")
    assert list(frame.columns) == list(bench_loaders.COLUMNS)
    assert list(frame.loader) == ["bare", "ffcv", "torchvision"]
    assert (frame.images_per_s > 0).all()
    assert frame.ratio_to_bare[0] == 1
    markdown = (tmp_path / "loaders.md").read_text()
    assert "8 synthetic JPEGs of 40 x 30 pixels" in markdown
    assert "ffcv 1." in markdown
    assert (
        f"`python -m scripts.benchmarks.loaders pixels=16 images=512 workers=1 rounds=2 output={tmp_path}`" in markdown
    )


def test_the_conclusion_has_the_ratios_of_each_size() -> None:
    rows = [
        {"pixels": pixels, "loader": loader, "ratio_to_bare": ratio}
        for pixels, ours in ((176, 1.03), (224, 0.94))
        for loader, ratio in (("bare", 1.0), ("ffcv", ours), ("torchvision", 0.5))
    ]
    sentence = bench_loaders.conclude(pd.DataFrame(rows))
    assert "At 176 and 224 pixels our FFCV loader is 1.03 and 0.94 times as fast" in sentence
    assert "2.1 and 1.9 times as fast as our torchvision loader" in sentence


def test_the_synthetic_photographs_compress_like_photographs(tmp_path: Path) -> None:
    random = bench_loaders.np.random.default_rng(1)
    for number in range(2):
        file = tmp_path / f"{number}.jpg"
        bench_loaders.synthetic_photograph(random).save(file, quality=bench_loaders.QUALITY)
        assert 50_000 < file.stat().st_size < 110_000  # of ImageNet's typical size


@pytest.mark.parametrize("argument", ["images=300", "images=256", "pixels=a", "rounds=1"])
def test_wrong_arguments_are_one_line_and_exit_code_2(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_loaders.main([argument]) == 2
    error = capsys.readouterr().err
    assert argument.split("=")[0] in error
    assert error.count("\n") == 1
