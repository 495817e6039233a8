"""Token files: what is refused, and in which words."""

import json

import numpy as np
import pytest

from gpt2.token_files import DataError, check_fits, open_tokens, read_header
from tests.gpt2.corpora import write_tokens


@pytest.fixture
def folder(tmp_path):
    write_tokens(tmp_path / "data", np.arange(100) % 32, np.arange(20))
    return tmp_path / "data"


def load(folder, context=8, vocabulary=32):
    header = read_header(folder)
    tokens = {split: open_tokens(folder, header, split) for split in ("train", "val")}
    for split in tokens:
        check_fits(folder, header, split, context, vocabulary)
    return tokens


def test_tokens_are_mapped_not_read(folder):
    tokens = load(folder)
    assert isinstance(tokens["train"], np.memmap)
    assert tokens["train"].tolist() == [i % 32 for i in range(100)]
    assert tokens["val"].tolist() == list(range(20))
    with pytest.raises(ValueError, match="read-only"):
        tokens["train"][0] = 1


def truncate(folder):
    file = folder / "train.bin"
    file.write_bytes(file.read_bytes()[:-3])


def lengthen(folder):
    (folder / "val.bin").write_bytes((folder / "val.bin").read_bytes() + b"\0\0")


def change_header(folder, **fields):
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps(header | fields))


BROKEN = {
    r"header\.json is missing; make the data with: python -m gpt2\.prepare output=": lambda f: [
        file.unlink() for file in f.iterdir()
    ],
    r"header\.json is missing \(a preparation was begun there": lambda f: (f / "header.json").unlink(),
    r"header\.json is not a header of prepared data": lambda f: (f / "header.json").write_text('{"format": 1}'),
    r"header\.json is not a header of prepared data \(.*split.fraction": lambda f: change_header(f, split={"seed": 1}),
    r"header\.json is not a header of prepared data \(.*settings": lambda f: change_header(f, settings=[]),
    r"header\.json is not a header of prepared data \(.*format Input should be 1": lambda f: change_header(f, format=9),
    r"train\.bin is missing \(No such file": lambda f: (f / "train.bin").unlink(),
    r"train\.bin is truncated: 197 bytes, but header\.json says 100 tokens, expected 200": truncate,
    r"val\.bin is longer than it should be: 42 bytes, but header\.json says 20 tokens, expected 40": lengthen,
    r"val\.bin is empty": lambda f: write_tokens(f, np.arange(9), np.arange(0)),
    r"val\.bin: 8 tokens, expected at least 9 \(model\.context=8": lambda f: write_tokens(
        f, np.arange(9), np.arange(8)
    ),
    r"model\.vocabulary=32: .* the largest in the files is 40; expected at least 41": lambda f: write_tokens(
        f, np.arange(41), np.arange(9), largest_token=40
    ),
    r"model\.vocabulary=32: .* encoding bytes with 33 tokens.* expected at least 33": lambda f: write_tokens(
        f, np.arange(9), np.arange(9), vocabulary_size=33
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_cannot_be_used_is_refused_by_name(message, folder):
    BROKEN[message](folder)
    with pytest.raises(DataError, match=message):
        load(folder)
