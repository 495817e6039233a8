"""Preparation: boundaries, the split, resuming, what a finished folder says of itself, and the same bytes as ever."""

import hashlib
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from gpt2 import encode
from gpt2 import prepare as module
from gpt2.prepare import PUBLIC, PUBLIC_TOKENS, PrepareArguments, describe, main, prepare, validation_documents
from gpt2.token_files import DTYPE, DataError, read_header
from gpt2.tokenizer import WORDS, load_tokenizer, train_bpe
from tests.gpt2.test_documents import WRITERS, write_parquet
from tests.waiting import LIMIT_S, wait_for

TEXTS = [f"text number {i}: {'word ' * (i % 9)}\n" for i in range(60)]
MADE = {"train.bin", "val.bin", "header.json", "inputs.sha256"}


def arguments(folder, source, **settings):
    values = {"tokenizer": "bytes", "validation_fraction": 0.1, "processes": 1}
    return PrepareArguments(output=str(folder), source=str(source), **values | settings)


def split_documents(folder, split):
    """Return the texts of a prepared file, cut at end-of-text."""
    header = read_header(folder)
    tokenizer = load_tokenizer(header.encoding, folder)
    tokens = np.fromfile(folder / f"{split}.bin", DTYPE)
    assert tokens[-1] == header.end_of_text
    ends = np.flatnonzero(tokens == header.end_of_text)
    return [tokenizer.decode(piece[:-1].tolist()) for piece in np.split(tokens, ends + 1)[:-1]]


def assert_same(folder, other):
    for name in MADE:
        assert (folder / name).read_bytes() == (other / name).read_bytes()


@pytest.fixture
def source(tmp_path):
    """Return a folder with a file of each kind."""
    folder = tmp_path / "source"
    folder.mkdir()
    for i, (kind, write) in enumerate(WRITERS.items()):
        name = f"{i}{chr(0xDCE9) * (kind == 'txt')}.{kind}"  # not UTF-8
        write(folder / name, TEXTS[20 * i : 20 * i + 20])
    return folder


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text, "other": text[:9]}) + "\n" for text in TEXTS))
    return file


def test_every_document_is_in_one_split_and_ends_with_end_of_text(source, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BATCH", 100)
    output = tmp_path / "out"
    header = prepare(arguments(output, source, processes=3), quiet=True)
    chosen = validation_documents(60, 0.1, 2357)
    normal = [text.strip() for text in TEXTS]
    assert [t.strip() for t in split_documents(output, "train")] == [t for i, t in enumerate(normal) if i not in chosen]
    assert [t.strip() for t in split_documents(output, "val")] == [normal[i] for i in sorted(chosen)]
    assert header == read_header(output)
    assert header.documents == {"train": 54, "val": 6}
    assert header.tokens == {split: (output / f"{split}.bin").stat().st_size // 2 for split in ("train", "val")}
    assert {f.name for f in output.iterdir()} == MADE | {".lock"}


@pytest.mark.parametrize(("documents_", "fraction"), [(7, 0.2), (1000, 0.0005), (12345, 0.0005), (50, 0.5)])
def test_the_split_is_that_of_hugging_face_datasets(documents_, fraction):
    import datasets

    whole = datasets.Dataset.from_dict({"number": range(documents_)})
    parts = whole.train_test_split(test_size=fraction, seed=2357, shuffle=True)
    assert validation_documents(documents_, fraction, 2357) == set(parts["test"]["number"])


def test_header_says_what_is_in_the_files(source, tmp_path):
    output = tmp_path / "out"
    header = prepare(arguments(output, source, tokenizer="bpe_270"), quiet=True)
    tokens = np.concatenate([np.fromfile(output / f"{split}.bin", DTYPE) for split in ("train", "val")])
    shares = [count / len(tokens) for count in Counter(tokens.tolist()).values()]
    assert header.unigram_entropy == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert (header.encoding, header.vocabulary_size, header.end_of_text) == ("bpe_270", 270, 269)
    assert header.largest_token == tokens.max() == 269
    listed = os.fsdecode((output / "inputs.sha256").read_bytes())
    assert header.inputs["sha256"] == hashlib.sha256(os.fsencode(listed)).hexdigest()
    assert header.inputs["bytes"] == sum(file.stat().st_size for file in source.iterdir())
    for line in listed.splitlines():  # as `sha256sum --check` reads it
        digest, name = line.split("  ")
        assert hashlib.sha256((source / name).read_bytes()).hexdigest() == digest


def test_a_finished_folder_is_kept_and_another_one_refused(lines, tmp_path):
    output = tmp_path / "out"
    first = prepare(arguments(output, lines), quiet=True)
    before = (output / "train.bin").stat().st_mtime_ns
    assert prepare(arguments(output, lines), quiet=True) == first
    whole = (output / "val.bin").read_bytes()
    for damaged, message in (
        (whole[:-2], r"val\.bin is truncated.*remove the folder and prepare it again"),
        (b"\1" + whole[1:], r"val\.bin: sha256 .*, but header.json says .*; remove the folder and prepare it again"),
    ):
        (output / "val.bin").write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            prepare(arguments(output, lines), quiet=True)
    (output / "val.bin").write_bytes(whole)
    lines.write_bytes(lines.read_bytes() * 2)
    with pytest.raises(DataError, match="sha256 of the inputs"):
        prepare(arguments(output, lines), quiet=True)
    assert (output / "train.bin").stat().st_mtime_ns == before


@pytest.mark.parametrize("key", sorted(set(PrepareArguments.model_fields) - module.NOT_SHAPING))
def test_every_setting_that_shapes_the_files_is_compared(key, lines, tmp_path):
    output = tmp_path / "out"
    first = prepare(arguments(output, lines), quiet=True)
    other = {"tokenizer": "bpe_270", "validation_fraction": 0.2, "seed": 1, "text_key": "other"}[key]
    with pytest.raises(DataError, match=rf"holds other data \({key}: .* there, {other} now\).*removed, to prepare it"):
        prepare(arguments(output, lines, **{key: other}), quiet=True)
    assert prepare(arguments(output, lines), quiet=True) == first


def test_another_vocabulary_than_that_of_the_tokens_is_refused(lines, tmp_path):
    output = tmp_path / "out"
    prepare(arguments(output, lines, tokenizer="bpe_270"), quiet=True)
    train_bpe("bpe_270", [text[::-1] for text in TEXTS], output)
    with pytest.raises(DataError, match=r"vocabulary\.tiktoken: sha256"):
        prepare(arguments(output, lines, tokenizer="bpe_270"), quiet=True)


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("tokenizer", "batch"), [("bytes", 1), ("bpe_270", 4)])
def test_an_interrupted_preparation_goes_on_and_ends_with_the_same_files(
    batch, tokenizer, source, tmp_path, monkeypatch
):
    monkeypatch.setattr(encode, "BATCH", 200)
    monkeypatch.setattr(encode, "BATCHES_BETWEEN_SAVES", 1)
    whole, resumed, original, encoded = tmp_path / "whole", tmp_path / "resumed", encode.encode, []
    prepare(arguments(whole, source, tokenizer=tokenizer), quiet=True)

    def counted(pieces, tokenizer):
        encoded.append(pieces[0][0])
        return original(pieces, tokenizer)

    def saved_then_killed(*arguments_):
        save(*arguments_)
        if len(encoded) == batch:
            raise Killed

    save = encode.save
    monkeypatch.setattr(encode, "encode", counted)
    with monkeypatch.context() as patched:
        patched.setattr(encode, "save", saved_then_killed)
        with pytest.raises(Killed):
            prepare(arguments(resumed, source, tokenizer=tokenizer), quiet=True)
    with pytest.raises(DataError, match="a preparation was begun there: run the same command again"):
        read_header(resumed)
    with (resumed / "train.bin").open("ab") as file:
        file.write(b"what came after the last save")
    done = encoded[:batch]
    encoded.clear()
    prepare(arguments(resumed, source, tokenizer=tokenizer), quiet=True)
    assert not set(done) & set(encoded)
    assert_same(resumed, whole)


def test_other_settings_files_that_are_gone_and_damaged_progress_begin_anew(lines, tmp_path, monkeypatch):
    def killed(*_):
        raise Killed

    for number, change in enumerate(
        (
            lambda folder: None,
            lambda folder: (folder / "val.bin").unlink(),
            lambda folder: (folder / "progress.json").write_text("[]"),
        )
    ):
        output, settings = tmp_path / f"out{number}", {"validation_fraction": 0.1 if number else 0.5}
        with monkeypatch.context() as patched:
            patched.setattr(module, "summarise", killed)
            with pytest.raises(Killed):
                prepare(arguments(output, lines), quiet=True)
        assert (output / "progress.json").exists()
        change(output)
        prepare(arguments(output, lines, **settings), quiet=True)
        whole = tmp_path / f"whole{number}"
        prepare(arguments(whole, lines, **settings), quiet=True)
        assert_same(output, whole)


def test_a_full_disk_is_named_and_nothing_is_lost(lines, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    output = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(encode, "save", full)
        with pytest.raises(DataError, match=f"output={output}: cannot be written .*No space left.* continues"):
            prepare(arguments(output, lines), quiet=True)
    assert prepare(arguments(output, lines), quiet=True) == prepare(arguments(tmp_path / "whole", lines), quiet=True)


def test_a_document_that_cannot_be_encoded_is_named(lines, tmp_path, monkeypatch):
    def fails(self, text):
        raise ValueError("Max stack\nsize")

    monkeypatch.setattr("gpt2.tokenizer.Tokenizer.encode", fails)
    with pytest.raises(DataError, match=r"the 16 characters that begin with 'text number 0: \\n' \(Max stack size\)"):
        prepare(arguments(tmp_path / "out", lines), quiet=True)


def test_two_at_once_make_one_folder(lines, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: prepare(arguments(tmp_path / "out", lines), quiet=True), range(4)))
    assert found == [prepare(arguments(tmp_path / "whole", lines), quiet=True)] * 4
    assert_same(tmp_path / "out", tmp_path / "whole")


def many(folder):
    folder.mkdir()
    for i in range(4):
        WRITERS["jsonl"](folder / f"{i}.jsonl", [f"document {n} {'y' * 300}" for n in range(5_000)])
    return folder


def _slow_prepare(output, source):
    encode.BATCHES_BETWEEN_SAVES, encode.BATCH, original = 1, 10_000, encode.encode

    def slow(*arguments_, **more):
        time.sleep(0.01)
        return original(*arguments_, **more)

    encode.encode = slow
    sys.exit(main([f"output={output}", f"source={source}", "tokenizer=bytes", "validation_fraction=0.1"]))


def test_interrupted_in_the_middle_it_goes_on(tmp_path, monkeypatch):
    source, output, whole = many(tmp_path / "source"), tmp_path / "out", tmp_path / "whole"
    monkeypatch.setattr(encode, "BATCH", 10_000)
    prepare(arguments(whole, source), quiet=True)
    process = multiprocessing.get_context("forkserver").Process(target=_slow_prepare, args=(output, source))
    process.start()
    wait_for((output / "progress.json").exists)
    os.kill(process.pid, signal.SIGINT)
    process.join(LIMIT_S)
    assert process.exitcode == 128 + signal.SIGINT
    assert 0 < json.loads((output / "progress.json").read_text())["documents"] < 20_000
    prepare(arguments(output, source), quiet=True)
    assert_same(output, whole)


def _peak(folder, source):
    prepare(arguments(folder, source), quiet=True)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Six times the documents, all in one file and one row group."""
    random = np.random.default_rng(0)
    texts = [random.bytes(3_000).hex() for _ in range(500)]
    peaks = []
    with multiprocessing.get_context("forkserver").Pool(1, maxtasksperchild=1) as pool:
        for name, times in (("small", 2), ("large", 12)):
            file = tmp_path / f"{name}.parquet"
            write_parquet(file, [f"{i} {text}" for i in range(times) for text in texts], rows=6000)
            peaks.append(pool.apply(_peak, (tmp_path / name, file)))
    size = (tmp_path / "large" / "train.bin").stat().st_size / 1e6
    assert size > 60
    assert peaks[1] < peaks[0] + 0.5 * size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "bpe"}, "tokenizer=bpe: expected gpt2, bytes or bpe_N"),
        ({"source": "nowhere"}, "source=nowhere: no .parquet, .jsonl, .txt, .py files there"),
        ({"validation_fraction": 0.999}, "the source has 60 documents: expected at least 2"),
        ({"validation_fraction": 1.5}, "validation_fraction=1.5"),
        ({"text_key": "content"}, "a.jsonl, byte 0: content=NoneType, expected text"),
        ({"sed": 1}, "sed: unknown key; did you mean 'seed'?"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2_before_anything_is_written(settings, message, lines, tmp_path, capsys):
    values = {"output": tmp_path / "out", "source": lines, "tokenizer": "bytes"}
    assert main([f"{key}={value}" for key, value in (values | settings).items()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not list((tmp_path / "out").glob("*.bin"))


def test_openwebtexts_public_token_counts_are_compared(lines, tmp_path):
    made = prepare(arguments(tmp_path / "out", lines), quiet=True)
    header = made.model_copy(update=PUBLIC | {"tokens": dict(PUBLIC_TOKENS), "documents": {"train": 1, "val": 1}})
    said = describe(header, Path("x"))
    assert "9,035,582,198 (train) and 4,434,897 (val) tokens: the same" in said
    assert "1 document\nfew documents for validation: validation_fraction=0.0005 of 2;" in said
    assert "NOT the same" in describe(header.model_copy(update={"tokens": PUBLIC_TOKENS | {"val": 1}}), Path("x"))
    assert "public" not in describe(header.model_copy(update={"source": "mine"}), Path("x"))


# -- the same bytes as ever: (training, validation tokens, beginnings of the sha256 of train.bin and val.bin)

MIXED = {
    "bytes": (5894668, 397, "961b67fcd0eaa8eb", "7d00d67f9c9960ed"),
    "bpe_270": (10012, 293, "5aec6303c438e34e", "cc872f3be0a1e654"),
    "gpt2": (17668, 397, "f87f44acb6bc8aeb", "c762ac83842b8adb"),
}


@pytest.fixture
def small_gpt2(monkeypatch):
    """tiktoken's "gpt2", which has to be downloaded, with three merges only."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    small = tiktoken.Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 259})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "gpt2", small)


@pytest.mark.parametrize("tokenizer", MIXED)
def test_files_of_all_kinds_give_the_tokens_that_they_always_gave(tokenizer, small_gpt2, tmp_path):
    source, lines = tmp_path / "source", 400_000 if tokenizer == "bytes" else 1000
    (source / "c").mkdir(parents=True)
    texts = [f"Document {i} – ünïcode, “quotes”\n\n{'word ' * (i % 9)}{i * i}\t日本語 \0 end's {' ' * (i % 40)}x\r\n"
             for i in range(60)]  # fmt: skip
    write_parquet(source / "a.parquet", texts[:20])
    rows = [json.dumps({"text": text, "n": i}) for i, text in enumerate(texts[20:40])]
    (source / "b ü.jsonl").write_text("\n".join(rows) + "\n\n")
    (source / "c" / "d.txt").write_bytes("\n<|endoftext|>\n".join(texts[40:]).encode())
    (source / "c" / "mark.txt").write_bytes(b"\xef\xbb\xbf<|endoftext|>\none\n")
    (source / "empty.txt").write_bytes(b"")
    (source / "long.txt").write_bytes("".join(f"  line {i}\n\n" for i in range(lines)).encode())
    # The bytes of a parquet file depend on pyarrow; only its documents count here.
    output = tmp_path / "out"
    tokens = prepare(arguments(output, source, tokenizer=tokenizer, validation_fraction=0.05), quiet=True).tokens
    digests = (hashlib.sha256((output / f"{split}.bin").read_bytes()).hexdigest()[:16] for split in ("train", "val"))
    assert (tokens["train"], tokens["val"], *digests) == MIXED[tokenizer]
