"""Preparation: boundaries, the split, resuming, what a finished folder says of itself."""

import hashlib
import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from gpt2 import documents, token_writer
from gpt2 import prepare as module
from gpt2.prepare import PUBLIC_TOKENS, PrepareArguments, describe, main, prepare, validation_documents
from gpt2.token_files import DTYPE, DataError, Header, read_header
from gpt2.tokenizer import load_tokenizer, train_bpe
from tests.gpt2.test_documents import WRITERS, write_parquet

TEXTS = [f"text number {i}: {'word ' * (i % 9)}\n" for i in range(60)]


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
    pieces = np.split(tokens, ends + 1)[:-1]
    return [tokenizer.decode(piece[:-1].tolist()) for piece in pieces]


@pytest.fixture(params=WRITERS)
def source(request, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(0, 60, 20):
        WRITERS[request.param](folder / f"{i:02}.{request.param}", TEXTS[i : i + 20])
    return folder


@pytest.mark.parametrize("processes", [1, 2])
def test_every_document_is_in_one_split_and_ends_with_end_of_text(source, processes, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", 100)  # documents that go on in the next unit
    output = tmp_path / "out"
    header = prepare(arguments(output, source, processes=processes), quiet=True)
    chosen = set(validation_documents(60, 0.1, 2357))
    normal = [text.strip() for text in TEXTS]
    assert [t.strip() for t in split_documents(output, "train")] == [t for i, t in enumerate(normal) if i not in chosen]
    assert [t.strip() for t in split_documents(output, "val")] == [normal[i] for i in sorted(chosen)]
    assert header == read_header(output)
    assert header.documents == {"train": 54, "val": 6}
    assert header.tokens == {split: (output / f"{split}.bin").stat().st_size // 2 for split in ("train", "val")}
    assert sorted(f.name for f in output.iterdir()) == [".lock", "header.json", "inputs.sha256", "train.bin", "val.bin"]


@pytest.mark.parametrize(("documents_", "fraction"), [(7, 0.2), (1000, 0.0005), (12345, 0.0005), (50, 0.5)])
def test_the_split_is_that_of_hugging_face_datasets(documents_, fraction):
    import datasets

    whole = datasets.Dataset.from_dict({"number": range(documents_)})
    parts = whole.train_test_split(test_size=fraction, seed=2357, shuffle=True)
    assert validation_documents(documents_, fraction, 2357) == sorted(parts["test"]["number"])


def test_header_says_what_is_in_the_files(source, tmp_path):
    output = tmp_path / "out"
    header = prepare(arguments(output, source, tokenizer="bpe_270"), quiet=True)
    tokens = np.concatenate([np.fromfile(output / f"{split}.bin", DTYPE) for split in ("train", "val")])
    shares = [count / len(tokens) for count in Counter(tokens.tolist()).values()]
    assert header.unigram_entropy == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert (header.encoding, header.vocabulary_size, header.end_of_text) == ("bpe_270", 270, 269)
    assert header.largest_token == tokens.max() == 269
    listed = (output / "inputs.sha256").read_text()
    assert header.inputs["sha256"] == hashlib.sha256(listed.encode()).hexdigest()
    for line in listed.splitlines():  # as `sha256sum --check` reads it
        digest, name = line.split("  ")
        assert hashlib.sha256((source / name).read_bytes()).hexdigest() == digest


def test_a_finished_folder_is_kept_and_another_one_refused(source, tmp_path):
    output = tmp_path / "out"
    first = prepare(arguments(output, source), quiet=True)
    before = (output / "train.bin").stat().st_mtime_ns
    assert prepare(arguments(output, source), quiet=True) == first
    with pytest.raises(DataError, match=r"holds other data \(seed: 2357 there, 1 now\)"):
        prepare(arguments(output, source, seed=1), quiet=True)
    whole = (output / "val.bin").read_bytes()
    (output / "val.bin").write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"val\.bin is truncated.*remove the folder and prepare it again"):
        prepare(arguments(output, source), quiet=True)
    (output / "val.bin").write_bytes(whole)
    file = next(source.iterdir())
    file.write_bytes(file.read_bytes() + file.read_bytes())
    with pytest.raises(DataError, match="sha256 of the inputs"):
        prepare(arguments(output, source), quiet=True)
    assert (output / "train.bin").stat().st_mtime_ns == before


@pytest.mark.parametrize("key", sorted(set(PrepareArguments.model_fields) - module.NOT_SHAPING))
def test_every_setting_that_shapes_the_files_is_compared(key, tmp_path):
    source, output = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"text": text, "other": text[:9]}) + "\n" for text in TEXTS))
    first = prepare(arguments(output, source), quiet=True)
    other = {"tokenizer": "bpe_270", "validation_fraction": 0.2, "seed": 1, "text_key": "other"}[key]
    with pytest.raises(DataError, match=f"holds other data .{key}: .* there, {other} now"):
        prepare(arguments(output, source, **{key: other}), quiet=True)
    assert prepare(arguments(output, source), quiet=True) == first


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe_270"])
def test_folders_that_do_not_say_how_they_were_made_are_compared_by_their_tokens(tokenizer, tmp_path):
    source, output = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"text": text, "other": text[:9]}) + "\n" for text in TEXTS))
    header = prepare(arguments(output, source, tokenizer=tokenizer), quiet=True)
    old = replace(header, settings={}, vocabulary="")
    (output / "header.json").write_text(old.to_json())
    assert prepare(arguments(output, source, tokenizer=tokenizer), quiet=True) == old
    with pytest.raises(DataError, match=r"holds other data \(its first tokens: .*removed, to prepare it anew"):
        prepare(arguments(output, source, tokenizer=tokenizer, text_key="other"), quiet=True)
    if tokenizer != "bytes":
        train_bpe(tokenizer, [text[::-1] for text in TEXTS], output)
        with pytest.raises(DataError, match="its first tokens"):
            prepare(arguments(output, source, tokenizer=tokenizer), quiet=True)


def test_another_vocabulary_than_that_of_the_tokens_is_refused(tmp_path):
    source, output = tmp_path / "a.txt", tmp_path / "out"
    WRITERS["txt"](source, TEXTS)
    prepare(arguments(output, source, tokenizer="bpe_270"), quiet=True)
    train_bpe("bpe_270", [text[::-1] for text in TEXTS], output)
    with pytest.raises(DataError, match=r"vocabulary\.tiktoken: sha256"):
        prepare(arguments(output, source, tokenizer="bpe_270"), quiet=True)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe_270"])
@pytest.mark.parametrize("unit", [1, 9, 30])
def test_an_interrupted_preparation_goes_on_and_ends_with_the_same_files(unit, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", 64)
    source = tmp_path / "source"
    source.mkdir()
    WRITERS["txt"](source / "a.txt", TEXTS)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    expected = prepare(arguments(whole, source, tokenizer=tokenizer), quiet=True)
    append, encoded = token_writer.TokenWriter.append, []

    def counted(writer, part, counts):
        encoded.append(part.name)
        if len(encoded) == unit:
            raise Killed
        append(writer, part, counts)

    monkeypatch.setattr(token_writer.TokenWriter, "append", counted)
    with pytest.raises(Killed):
        prepare(arguments(resumed, source, tokenizer=tokenizer), quiet=True)
    with pytest.raises(DataError, match="a preparation was begun there: run the same command again"):
        read_header(resumed)
    with (resumed / "train.bin.partial").open("ab") as file:
        file.write(b"what came after the last save")
    assert prepare(arguments(resumed, source, tokenizer=tokenizer), quiet=True) == expected
    for name in ("train.bin", "val.bin", "header.json", "inputs.sha256"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert encoded.count(f"{unit - 1:08d}") == 2
    assert len(encoded) == len(set(encoded)) + 1  # nothing else was done twice


def test_interrupted_between_the_splits_of_a_unit_it_loses_and_repeats_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", 300)
    source, whole, resumed = tmp_path / "a.jsonl", tmp_path / "whole", tmp_path / "resumed"
    WRITERS["jsonl"](source, TEXTS)
    expected = prepare(arguments(whole, source), quiet=True)
    count, seen = token_writer.count_tokens, []

    def counted(file):
        seen.append(file)
        if len(seen) > 8 and file.suffix == ".val":
            raise KeyboardInterrupt
        return count(file)

    with monkeypatch.context() as patched:
        patched.setattr(token_writer, "count_tokens", counted)
        with pytest.raises(KeyboardInterrupt):
            prepare(arguments(resumed, source), quiet=True)
    assert prepare(arguments(resumed, source), quiet=True) == expected
    for split in ("train", "val"):
        assert (resumed / f"{split}.bin").read_bytes() == (whole / f"{split}.bin").read_bytes()


def test_a_full_disk_is_named_and_nothing_is_lost(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    source, output = tmp_path / "a.txt", tmp_path / "out"
    WRITERS["txt"](source, TEXTS)
    with monkeypatch.context() as patched:
        patched.setattr(token_writer.shutil, "copyfileobj", full)
        patched.setattr(token_writer, "write_atomically", full)
        with pytest.raises(DataError, match=f"output={output}: cannot be written .*No space left"):
            prepare(arguments(output, source), quiet=True)
    assert prepare(arguments(output, source), quiet=True) == prepare(arguments(tmp_path / "whole", source), quiet=True)


def test_a_document_that_cannot_be_encoded_is_named(tmp_path, monkeypatch):
    def fails(self, text):
        raise ValueError("Max stack\nsize")

    source = tmp_path / "a.jsonl"
    WRITERS["jsonl"](source, TEXTS)
    monkeypatch.setattr("gpt2.tokenizer.Bytes.encode", fails)
    with pytest.raises(DataError, match=r"a\.jsonl, byte 0, document 0 of it, .* 16 characters \(Max stack size\)"):
        prepare(arguments(tmp_path / "out", source), quiet=True)


def test_other_settings_begin_anew(tmp_path, monkeypatch):
    source = tmp_path / "a.txt"
    WRITERS["txt"](source, TEXTS)
    output = tmp_path / "out"

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(token_writer.TokenWriter, "close", killed)  # finish has saved its progress
        with pytest.raises(Killed):
            prepare(arguments(output, source), quiet=True)
    assert (output / "progress.json").exists()
    assert prepare(arguments(output, source, validation_fraction=0.5), quiet=True).documents == {"train": 30, "val": 30}


def test_files_that_cannot_be_renamed_are_the_error_that_is_shown(tmp_path, monkeypatch):
    source, output = tmp_path / "a.txt", tmp_path / "out"
    WRITERS["txt"](source, TEXTS)
    with monkeypatch.context() as patched:
        patched.setattr(token_writer.TokenWriter, "_final", lambda *_: tmp_path / "none" / "train.bin")
        with pytest.raises(FileNotFoundError, match=r"none/train\.bin"):
            prepare(arguments(output, source), quiet=True)
    assert prepare(arguments(output, source), quiet=True).documents["train"]


@pytest.mark.parametrize("renamed", [["train"], ["train", "val"]])
def test_killed_between_renaming_and_the_header(renamed, tmp_path):
    source, output = tmp_path / "a.txt", tmp_path / "out"
    WRITERS["txt"](source, TEXTS)
    expected = prepare(arguments(output, source), quiet=True)
    before = (output / "train.bin").read_bytes()
    # What the folder was an instant before: the header is missing, the progress still there.
    fingerprint = token_writer.begin("").fingerprint
    settings = arguments(output, source)
    corpus = module.scan_all(module.find_inputs(str(source)), 1, quiet=True)
    fingerprint = module.fingerprint(settings, corpus, "")
    sizes = {split: (output / f"{split}.bin").stat().st_size for split in ("train", "val")}
    progress = token_writer.Progress(fingerprint, len(corpus.units), expected.documents, sizes)
    (output / "progress.json").write_text(json.dumps(vars(progress)))
    (output / "header.json").unlink()
    for split in {"train", "val"} - set(renamed):
        (output / f"{split}.bin").rename(output / f"{split}.bin.partial")
    assert prepare(settings, quiet=True) == expected
    assert (output / "train.bin").read_bytes() == before


def test_killed_for_good_it_goes_on(tmp_path, monkeypatch):
    """SIGKILL in the middle, with processes at work: what was saved counts."""
    source, whole, output = tmp_path / "source", tmp_path / "whole", tmp_path / "out"
    source.mkdir()
    for i in range(150):
        WRITERS["txt"](source / f"{i:03}.txt", TEXTS)
    expected = prepare(arguments(whole, source), quiet=True)
    process = multiprocessing.get_context("fork").Process(target=_slow_prepare, args=(output, source))
    process.start()
    end = time.monotonic() + 60
    while not (output / "progress.json").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert 0 < json.loads((output / "progress.json").read_text())["units"] < 150
    assert prepare(arguments(output, source), quiet=True) == expected
    assert (output / "train.bin").read_bytes() == (whole / "train.bin").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("times", "pause", "tmpdir"), [(1, 0.0, "t"), (3, 0.01, "t" * 90), (3, 0.3, "t")])
def test_ctrl_c_ends_it_at_once_in_one_line_and_it_goes_on(times, pause, tmpdir, tmp_path):
    source, output = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (tmp_path / tmpdir).mkdir()  # too long for the path of a socket, or short
    for i in range(4):
        WRITERS["jsonl"](source / f"{i}.jsonl", [f"document {n} {'y' * 300}" for n in range(20_000)])
    command = [sys.executable, "-m", "gpt2.prepare", f"output={output}", f"source={source}", "tokenizer=bytes"]
    command += ["validation_fraction=0.1", "processes=2"]
    log, environment = tmp_path / "log", os.environ | {"TMPDIR": str(tmp_path / tmpdir)}
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, env=environment, start_new_session=True)
    end = time.monotonic() + 60
    while not list(output.glob("parts/*")) and time.monotonic() < end:
        time.sleep(0.01)
    for _ in range(times):  # to the whole group, as a terminal does
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(pause)
    assert process.wait(10) == 130
    assert log.read_text().splitlines() == ["interrupted"]
    assert not (output / "parts").exists()
    expected = prepare(arguments(tmp_path / "whole", source), quiet=True)
    assert prepare(arguments(output, source), quiet=True) == expected
    with pytest.raises(ProcessLookupError):  # nobody is left of the group
        os.killpg(process.pid, 0)


def _slow_prepare(output, source):
    token_writer.SECONDS_BETWEEN_SAVES = 0.0
    append = token_writer.TokenWriter.append

    def slow(writer, part, counts):
        time.sleep(0.01)
        append(writer, part, counts)

    token_writer.TokenWriter.append = slow
    prepare(arguments(output, source), quiet=True)


def _peak(folder, source):
    documents.BLOCK = 1 << 18
    prepare(arguments(folder, source), quiet=True)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_memory_does_not_grow_with_the_corpus(kind, tmp_path):
    """Six times the documents, all in one file and one row group."""
    random = np.random.default_rng(0)
    texts = [random.bytes(3_000).hex() for _ in range(500)]
    peaks = []
    with multiprocessing.get_context("forkserver").Pool(1, maxtasksperchild=1) as pool:
        for name, times in (("small", 2), ("large", 12)):
            file = tmp_path / f"{name}.{kind}"
            different = [f"{i} {text}" for i in range(times) for text in texts]
            write_parquet(file, different, rows=6000) if kind == "parquet" else WRITERS[kind](file, different)
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
        ({"sed": 1}, "sed: unknown key; did you mean 'seed'?"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(settings, message, tmp_path, capsys):
    WRITERS["jsonl"](tmp_path / "a.jsonl", TEXTS)
    values = {"output": tmp_path / "out", "source": tmp_path / "a.jsonl", "tokenizer": "bytes", "processes": 1}
    assert main([f"{key}={value}" for key, value in (values | settings).items()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out" / "train.bin").exists()


def test_openwebtexts_public_token_counts_are_compared():
    header = Header(1, "gpt2", 50257, 50256, 50256, dict(PUBLIC_TOKENS), {"train": 1, "val": 1}, 7.0, "openwebtext",
                    {"fraction": 0.0005, "seed": 2357}, {})  # fmt: skip
    from pathlib import Path

    assert "9,035,582,198 (train) and 4,434,897 (val) tokens: the same" in describe(header, Path("x"))
    other = replace(header, tokens={"train": 9_035_582_198, "val": 4_434_896})
    assert "NOT the same" in describe(other, Path("x"))
    assert "public" not in describe(replace(header, source="mine"), Path("x"))
    assert "1 document\nfew documents for validation: validation_fraction=0.0005 of 2;" in describe(header, Path("x"))
    assert "few" not in describe(replace(header, documents={"train": 90, "val": 10}), Path("x"))
