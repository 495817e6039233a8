"""Tokenizers: round trips, a trained BPE, and what is said when GPT-2's vocabulary cannot be had."""

import hashlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken

from gpt2.token_files import DataError
from gpt2.tokenizer import BYTE_OF, VOCABULARY, cut_at_spaces, load_tokenizer, train_bpe

TEXTS = [
    "def f(x):\n    return x + 1  # naïve\n",
    "the cat's hat, the cat's mat: 1234 5678\n\n\n  \t  end  ",
    "日本語 🎉 <|endoftext|> \x00\x7f",
    "",
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    return train_bpe("bpe_300", [*TEXTS * 20, "\ud800"], folder), folder


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_and_never_gives_end_of_text(text, bpe):
    for tokenizer in (load_tokenizer("bytes", bpe[1]), bpe[0]):
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.uint16
        assert tokenizer.decode(tokens.tolist()) == text
        assert tokenizer.end_of_text == tokenizer.vocabulary_size - 1
        assert not (tokens >= tokenizer.end_of_text).any()
        assert tokenizer.decode([*tokens.tolist(), tokenizer.end_of_text]) == text + "<|endoftext|>"


def test_lone_surrogates_are_replaced(bpe):
    for tokenizer in (load_tokenizer("bytes", bpe[1]), bpe[0]):
        assert tokenizer.decode(tokenizer.encode("a\ud800b").tolist()) == "a\ufffdb"


def test_bpe_has_the_size_asked_for_compresses_and_is_the_same_when_loaded(bpe, tmp_path):
    tokenizer, folder = bpe
    assert (tokenizer.name, tokenizer.vocabulary_size, tokenizer.end_of_text) == ("bpe_300", 300, 299)
    assert len(tokenizer.encode(TEXTS[0])) < 0.8 * len(TEXTS[0].encode())
    loaded = load_tokenizer("bpe_300", folder)
    assert all(np.array_equal(loaded.encode(text), tokenizer.encode(text)) for text in TEXTS)
    again = train_bpe("bpe_300", [*TEXTS * 20, "\ufffd"], tmp_path)
    assert (tmp_path / VOCABULARY).read_bytes() == (folder / VOCABULARY).read_bytes()
    assert np.array_equal(again.encode(TEXTS[1]), tokenizer.encode(TEXTS[1]))


def test_encoding_is_tiktokens_own(bpe):
    encoding = bpe[0]._encoding
    for text in TEXTS:
        assert bpe[0].encode(text).tolist() == encoding.encode_ordinary(text)


@pytest.mark.parametrize(
    "text", ["a  b", " \t\n " * 500 + "x", "x" + " " * 3000, "a" + "\n" * 1500 + "'s 12" + "\u3000" * 1500]
)
def test_pieces_cut_at_long_runs_of_spaces_give_the_tokens_of_the_whole(text, bpe):
    pieces = cut_at_spaces(text)
    assert "".join(pieces) == text
    assert (len(pieces) > 1) == (len(text) > 1000)
    assert np.concatenate([bpe[0].encode(piece) for piece in pieces]).tolist() == bpe[0].encode(text).tolist()


def test_more_spaces_than_tiktoken_can_match_are_encoded(bpe):
    text = "a" + " " * 1_100_000 + "b"
    with pytest.raises(ValueError, match="stack"):
        bpe[0]._encoding.encode_to_numpy(text, disallowed_special=())
    assert bpe[0].decode(bpe[0].encode(text).tolist()) == text


def test_byte_table_is_gpt2s():
    """tiktoken reads it off GPT-2's files in the same way."""
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(BYTE_OF) == set(ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert (BYTE_OF["Ġ"], BYTE_OF["Ċ"], BYTE_OF["a"]) == (ord(" "), ord("\n"), ord("a"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt3", "tokenizer=gpt3: expected gpt2, bytes or bpe_N"),
        ("bpe_257", "from 258 .* to 65536 tokens"),
        ("bpe_70000", "from 258 .* to 65536 tokens"),
        ("bpe_300", "vocabulary of tokenizer bpe_300 cannot be read"),
    ],
)
def test_wrong_names_and_missing_vocabularies(name, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load_tokenizer(name, tmp_path)


def test_a_vocabulary_of_another_size_is_refused(bpe, tmp_path):
    lines = (bpe[1] / VOCABULARY).read_bytes().splitlines(keepends=True)
    (tmp_path / VOCABULARY).write_bytes(b"".join(lines[:-1]))
    with pytest.raises(DataError, match="298 tokens, expected 299 for tokenizer bpe_300"):
        load_tokenizer("bpe_300", tmp_path)


def test_the_vocabulary_read_is_the_files_and_is_compared(bpe, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    first = train_bpe("bpe_300", TEXTS * 20, tmp_path).encode(TEXTS[0]).tolist()
    digest = hashlib.sha256((tmp_path / VOCABULARY).read_bytes()).hexdigest()
    assert load_tokenizer("bpe_300", tmp_path, digest).encode(TEXTS[0]).tolist() == first
    other = train_bpe("bpe_300", [text[::-1] for text in TEXTS] * 20, tmp_path)
    assert load_tokenizer("bpe_300", tmp_path).encode(TEXTS[0]).tolist() == other.encode(TEXTS[0]).tolist() != first
    with pytest.raises(DataError, match=f"{VOCABULARY}: sha256 .*, expected {digest}"):
        load_tokenizer("bpe_300", tmp_path, digest)


def test_a_corpus_too_small_for_the_vocabulary(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer=bpe_5000: the corpus gives only \d+ tokens"):
        train_bpe("bpe_5000", ["aaaa bbbb"] * 3, tmp_path)


@pytest.fixture
def without_gpt2(monkeypatch, tmp_path):
    """tiktoken as after its start, with an empty cache and no network."""

    def refuse(url):
        raise requests.exceptions.ConnectionError(f"no route to {url}")

    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_without_network_the_error_leads_to_the_two_files(without_gpt2):
    with pytest.raises(DataError, match=r"cannot be downloaded \(ConnectionError\); gpt2/README.md says where"):
        load_tokenizer("gpt2", without_gpt2)
    readme = (Path(__file__).parents[2] / "gpt2" / "README.md").read_text()
    (base,) = re.findall(r"from `(https://openaipublic.*/)`", readme)
    for name in ("vocab.bpe", "encoder.json"):
        assert f"| `{name}` | `$TIKTOKEN_CACHE_DIR/{hashlib.sha1(f'{base}{name}'.encode()).hexdigest()}` |" in readme
    assert [f"{base}{name}" for name in ("vocab.bpe", "encoder.json")] == asked_by_tiktoken()


def asked_by_tiktoken():
    """Return the addresses of the two files in tiktoken's own source."""
    import tiktoken_ext.openai_public as public

    return re.findall(r"https://\S*/gpt-2/\S*?(?=\")", inspect.getsource(public.gpt2))
