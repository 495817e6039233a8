"""The embedded corpus: right names, numbers in one split only, made once."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.config.config import ConfigError
from common.launch.compose import compose_config
from transformer.config import NumberNames
from transformer.corpus import Corpus
from transformer.preparation.packaged import name_line, number_name_pairs
from transformer.prepare import main, make_embedded

SMALL = ["data.numbers=400", "data.held_out=50", "data.train_lines=60", "data.held_out_lines=20", "data.merges=40"]


def configured(path: Path | str = "unused", *more: str, pair: str = "en_de") -> NumberNames:
    return compose_config("transformer", [f"data=number_names_{pair}", *SMALL, f"data.path={path}", *more]).data


@pytest.mark.parametrize(
    ("language", "line"),
    [
        ("en", "twenty-four; one thousand and eleven"),
        ("de", "vierundzwanzig; eintausendelf"),
        ("fr", "vingt-quatre ; mille onze"),
    ],
)
def test_names(language: str, line: str) -> None:
    assert name_line([24, 1011], language) == line


def test_an_unknown_language_is_an_error() -> None:
    with pytest.raises(ConfigError, match="num2words does not know the language 'xx'"):
        name_line([1], "xx")


@pytest.mark.parametrize("pair", ["en_de", "en_fr"])
def test_every_number_is_in_one_split_only(pair: str) -> None:
    data = configured(pair=pair)
    names = {name_line([number], data.target): number for number in range(data.numbers)}
    numbers: dict[str, set[int]] = {}
    for split, pairs in number_name_pairs(data).items():
        lines = list(pairs)
        assert len(lines) == {"train": 60, "valid": 20, "test": 20}[split]
        found = [[names[name] for name in re.split(" ?; ", target)] for _, target in lines]
        assert all(1 <= len(each) <= data.longest for each in found)
        assert [name_line(each, "en") for each in found] == [source for source, _ in lines]
        numbers[split] = {number for each in found for number in each}
    assert not numbers["train"] & (numbers["valid"] | numbers["test"])
    assert not numbers["valid"] & numbers["test"]
    assert list(number_name_pairs(data)["test"]) == list(number_name_pairs(data)["test"])


@pytest.mark.usefixtures("compat")
def test_it_is_made_once_by_whoever_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = configured(tmp_path / "numbers")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(make_embedded, [data] * 3))
    assert capsys.readouterr().err.count("making") == 1
    corpus = Corpus(data)
    assert [len(corpus.split(split)) for split in ("train", "valid", "test")] == [60, 20, 20]
    lines, raw = corpus.references("valid")
    assert raw
    assert [corpus.line(corpus.split("valid").target_tokens(i)) for i in range(20)] == lines
    make_embedded(configured(tmp_path / "numbers", "data.max_length=9"))  # cutting is not part of the corpus
    with pytest.raises(ConfigError, match=r"data\.path=.*holds other data"):
        make_embedded(configured(tmp_path / "numbers", "data.longest=2"))
    (tmp_path / "numbers/dict.en.txt").write_text("")
    with pytest.raises(ConfigError, match=r"dict\.en\.txt: not the file that was prepared.* remove the folder"):
        make_embedded(data)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "it's, mine"
    folder.mkdir()
    assert main(["corpus=number_names_en_de", f"output={folder}"]) == 2
    assert "not made by transformer.prepare" in capsys.readouterr().err
    assert not list(folder.iterdir())
    assert main(["corpus=number_names_en_de", "merges=3"]) == 2
    assert "merges=3: not for corpus=number_names_en_de, which has no such options" in capsys.readouterr().err


def test_too_many_held_out_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"held_out=200: expected less than half of data\.numbers=400"):
        configured("unused", "data.held_out=200")
