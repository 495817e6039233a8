"""Words, subwords and scores, against definitions written out here."""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import nltk
import pytest
from nltk.translate.bleu_score import corpus_bleu

from common.config.config import ConfigError
from transformer import scores
from transformer.preparation.pipeline import learn_codes
from transformer.text import MosesText, Subwords, join_subwords

HYPOTHESES = ["The cat sat on the mat.", "There is a dog in the house, too!", "two", "What is this?"]
REFERENCES = ["The cat sat on a mat.", "There is a dog inside the house, too!", "two; three", "What was this?"]


@pytest.mark.parametrize(
    ("language", "line", "words"),
    [
        ("en", "It's well-known.", "It &apos;s well @-@ known ."),
        ("de", "\u201eJa\u201c: z.B. 3,5 km", "&quot; Ja &quot; : z.B. 3,5 km"),
        ("fr", "L'été\u00a0: vingt-deux", "L&apos; été : vingt @-@ deux"),
        ("en", "a\tb\u200b c\ufeff", "a b c"),
    ],
)
def test_raw_lines_to_words(language: str, line: str, words: str) -> None:
    assert MosesText(language).tokenize(line) == words


def test_subwords_join_to_the_words_they_came_from(tmp_path: Path) -> None:
    words = Counter({"lower": 9, "lowest": 7, "newer": 5, "wide": 3})
    learn_codes(words, 6, tmp_path / "codes")
    subwords = Subwords(tmp_path / "codes")
    split = subwords.split("lowest wider unseen")
    assert split != "lowest wider unseen"
    assert join_subwords(split) == "lowest wider unseen"
    again = tmp_path / "again"
    learn_codes(Counter(dict(reversed(words.items()))), 6, again)  # whatever the order in which words were counted
    assert again.read_bytes() == (tmp_path / "codes").read_bytes()
    with pytest.raises(ConfigError, match=r"split train: expected words of at least two characters .* got none"):
        learn_codes(Counter({"a": 3}), 6, again)
    with pytest.raises(ConfigError, match=r"missing: cannot be read"):
        Subwords(tmp_path / "missing")


def test_the_papers_bleu_is_that_of_nltk_without_smoothing() -> None:
    def words(lines: list[str]) -> list[list[str]]:
        return [re.findall(r"\w+|[,.!?;]", line) for line in lines]

    hypotheses, references = HYPOTHESES[:2], REFERENCES[:2]  # nltk counts otherwise where a line has less than 4 words
    expected = corpus_bleu([[line] for line in words(references)], words(hypotheses))
    assert 0.2 < expected < 0.8
    assert scores.paper_bleu(hypotheses, references) == pytest.approx(100 * expected)
    assert scores.paper_bleu(["a b c d e"], ["a b c x e"]) == 0
    assert scores.bleu(["a b c d e"], ["a b c x e"])[0] > 0
    assert all(name in scores.bleu(HYPOTHESES, REFERENCES)[1] for name in ("tok:13a", "smooth:exp"))


def test_sums_of_parts_give_the_bleu_of_the_whole() -> None:
    parts = [scores.bleu_sums(HYPOTHESES[i : i + 1], REFERENCES[i : i + 1]) for i in range(4)]
    total = {name: float(sum(part[name] for part in parts)) for name in scores.BLEU_SUMS}
    assert scores.bleu_of(total) == pytest.approx(scores.bleu(HYPOTHESES, REFERENCES)[0])


@pytest.fixture
def wordnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """WordNet, or where it is not installed a stand-in that knows one pair of synonyms."""
    if scores.wordnet_problem() is None:
        return
    synset = SimpleNamespace(lemmas=lambda: [SimpleNamespace(name=lambda word=word: word) for word in ("car", "auto")])
    known = {"car": [synset], "auto": [synset]}
    monkeypatch.setitem(vars(nltk.corpus.wordnet), "synsets", lambda word: known.get(word, []))
    monkeypatch.setattr(scores, "wordnet_problem", lambda: None)


@pytest.mark.usefixtures("wordnet")
def test_meteor() -> None:
    # All n words match in one chunk: 1 - 0.5 (1/n)^3 by Banerjee and Lavie (2005).
    assert scores.meteor(["one two three four"], ["one two three four"]) == pytest.approx(1 - 0.5 / 4**3)
    assert scores.meteor(["one", "x"], ["one", "y"]) == pytest.approx(0.25)
    assert scores.meteor(["the car stopped"], ["the auto stopped"]) > 0.9  # by WordNet's synonyms


def test_meteor_without_wordnet_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    unread = nltk.corpus.util.LazyCorpusLoader("wordnet", nltk.corpus.WordNetCorpusReader, None)
    monkeypatch.setattr(nltk.corpus, "wordnet", unread)
    problem = scores.wordnet_problem.__wrapped__()
    assert problem is not None
    assert "scripts/get_wordnet.sh" in problem
    monkeypatch.setattr(scores, "wordnet_problem", lambda: problem)
    with pytest.raises(ConfigError, match="METEOR needs WordNet"):
        scores.meteor(["a"], ["a"])


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb")
def test_wordnet_out_of_debian_packages(tmp_path: Path) -> None:
    for name in ("wordnet-base", "wordnet-sense-index"):
        root = tmp_path / name
        (root / "DEBIAN").mkdir(parents=True)
        (root / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: a\n"
        )
        (root / "usr/share/wordnet").mkdir(parents=True)
        (root / f"usr/share/wordnet/{name}.txt").write_text("content")
        subprocess.run(["dpkg-deb", "--build", root, tmp_path / f"{name}_1_all.deb"], check=True, capture_output=True)
    command = ["scripts/get_wordnet.sh", tmp_path / "nltk", tmp_path]
    (tmp_path / "nltk/corpora/wordnet").mkdir(parents=True)  # of an interrupted call
    assert "ready" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    target = tmp_path / "nltk/corpora/wordnet"
    assert {file.name for file in target.iterdir()} == {"wordnet-base.txt", "wordnet-sense-index.txt", "lexnames"}
    names = [line.split("\t") for line in (target / "lexnames").read_text().splitlines()]
    assert [int(number) for number, *_ in names] == list(range(45))
    parts = {"noun": "1", "verb": "2", "adj": "3", "adv": "4"}
    assert all(parts[name.split(".")[0]] == number for _, name, number in names)
    assert "there already" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
