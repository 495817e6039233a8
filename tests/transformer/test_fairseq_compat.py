"""fairseq under today's Python: what its import leaves alone, the data that it reads, and what to do without it."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config.config import ConfigError
from common.launch.compose import compose_config
from transformer.corpus import Corpus


def test_positions_beyond_two_gib(compat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of several processes are merged; NumPy 2 would add up their lengths in 32 bits."""
    data, target = compat.fairseq.data.indexed_dataset, tmp_path / "train.en-fr.fr"
    monkeypatch.setattr(data, "_warmup_mmap_file", lambda _: None)  # it would read gigabytes of zeros
    with compat.TokenData.Index.writer(f"{tmp_path}/part.idx", np.uint16) as index:
        index.write([10**8] * 11 + [3])
    (tmp_path / "part.bin").touch()
    builder = data.MMapIndexedDatasetBuilder(f"{target}.bin", dtype=np.uint16)
    for _ in range(2):
        builder.merge_file_(f"{tmp_path}/part")
    builder.finalize(f"{target}.idx")
    os.truncate(f"{target}.bin", 2 * 2 * (11 * 10**8 + 3))
    side = compat.read_tokens(tmp_path, "train", "en-fr", "fr")
    assert side[23].tolist() == [0, 0, 0]
    content = bytearray(Path(f"{target}.idx").read_bytes())
    content[-1] = 255
    Path(f"{target}.idx").write_bytes(content)
    with pytest.raises(ConfigError, match=r"train\.en-fr\.fr\.idx has wrong positions, as older versions wrote"):
        compat.read_tokens(tmp_path, "train", "en-fr", "fr")


def test_its_entries_in_hydras_store_do_not_get_in_our_way(compat: Any) -> None:
    from hydra.core.config_store import ConfigStore

    assert not {"optimizer", "model", "task", "criterion"} & ConfigStore.instance().repo.keys()
    config = compose_config("transformer", ["optimizer=adam", "model=transformer_tiny", "parallel=allreduce"])
    assert config.optimizer.name == "adam"


@pytest.mark.slow
def test_its_import_changes_nothing_for_others(compat: Any) -> None:
    code = (
        "import dataclasses, hydra.experimental, logging, torch\n"
        "def count(): raise SystemExit('GPUs were counted, which may start CUDA before a fork')\n"
        "torch.cuda.device_count = count\n"
        "log = logging.root\n"
        "state = lambda: (dataclasses.dataclass, torch.cuda.device_count, log.level, list(log.handlers))\n"
        "before = state()\n"
        "for name in ('compose', 'initialize'): vars(hydra.experimental).pop(name, None)  # Hydra 1.4 has none\n"
        "import transformer.fairseq_compat\n"
        "assert callable(hydra.experimental.compose)\n"
        "assert before == state()\n"
        "assert logging.root.manager.disable == 0"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_what_preprocess_makes_is_read(compat: Any, tmp_path: Path) -> None:
    texts, folder = tmp_path / "texts", tmp_path / "folder"
    texts.mkdir()
    lines = {"en": ["a b@@ c", "d"], "de": ["A", "B@@ C D"]}
    for split in ("train", "valid", "test"):
        for language, content in lines.items():
            (texts / f"{split}.{language}").write_text("\n".join(content) + "\n")
    level = logging.getLogger("fairseq_cli.preprocess").level
    compat.binarize(texts, folder, "en", "de", jobs=1)
    assert logging.getLogger("fairseq_cli.preprocess").level == level
    assert not (folder / "preprocess.log").exists()
    data = compose_config(
        "transformer", ["data=folder", "data.source=en", "data.target=de", f"data.path={folder}"]
    ).data
    corpus = Corpus(data)
    assert [corpus.words(corpus.split("train").target_tokens(i)) for i in (0, 1)] == ["A", "BC D"]
    assert corpus.references("test") == (["A", "BC D"], False)  # no raw lines: detokenized ones
    with pytest.raises(ConfigError, match=r"bpe\.codes: cannot be read"):
        corpus.encode("a line")
    again = tmp_path / "again"
    compat.binarize(texts, again, "en", "de", jobs=1, dictionary=folder / "dict.en.txt")
    assert (again / "train.en-de.de.bin").read_bytes() == (folder / "train.en-de.de.bin").read_bytes()


def test_without_fairseq_the_error_says_how_to_install_it(compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fairseq", None)
    with pytest.raises(compat.FairseqMissing, match=r"pip install --no-deps fairseq==0\.12\.2") as error:
        compat._import()
    assert isinstance(error.value, ConfigError)  # exit code 2, one line
    assert isinstance(error.value, ImportError)
