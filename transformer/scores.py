"""Scores of translations: sacreBLEU, chrF, METEOR by nltk, and BLEU as the paper's code computes it."""

from collections.abc import Mapping, Sequence
from functools import cache

from common.config.config import ConfigError

ORDERS = 4
BLEU_SUMS = (
    *(f"bleu_counts_{n}" for n in range(1, ORDERS + 1)),
    *(f"bleu_totals_{n}" for n in range(1, ORDERS + 1)),
    "bleu_hypothesis_words",
    "bleu_reference_words",
)
WORDNET_HELP = (
    "METEOR needs WordNet: python -m nltk.downloader wordnet, or scripts/get_wordnet.sh without nltk's servers"
)


def bleu_sums(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, int]:
    """Return the counts behind corpus BLEU of detokenized lines, which can be summed over batches and ranks."""
    import sacrebleu

    score = sacrebleu.BLEU().corpus_score(hypotheses, [references])
    return dict(zip(BLEU_SUMS, (*score.counts, *score.totals, score.sys_len, score.ref_len), strict=True))


def bleu_of(sums: Mapping[str, float]) -> float:
    """Compute corpus BLEU from summed `bleu_sums` by sacrebleu's formula, as corpus_bleu would for all lines."""
    import sacrebleu

    values = [round(sums[name]) for name in BLEU_SUMS]
    counts, totals, lengths = values[:ORDERS], values[ORDERS : 2 * ORDERS], values[2 * ORDERS :]
    return sacrebleu.BLEU.compute_bleu(counts, totals, *lengths, smooth_method="exp").score


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return sacreBLEU of detokenized lines and its signature."""
    import sacrebleu

    metric = sacrebleu.BLEU()
    return metric.corpus_score(hypotheses, [references]).score, str(metric.get_signature())


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return chrF2 of detokenized lines and its signature."""
    import sacrebleu

    metric = sacrebleu.CHRF()
    return metric.corpus_score(hypotheses, [references]).score, str(metric.get_signature())


def paper_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return BLEU in percent as the authors' code computes it, by Hugging Face's `evaluate.load("bleu")`.

    Hypotheses are greedy translations. Both sides are lines as the vocabulary decodes them (Moses tokens here), with
    references cut to data.max_length. Tokenizer 13a splits them into words, and counts are not smoothed. Not comparable
    with sacreBLEU.
    """
    import sacrebleu

    metric = sacrebleu.BLEU(tokenize="13a", smooth_method="none", force=True)
    return metric.corpus_score(hypotheses, [references]).score


@cache
def wordnet_problem() -> str | None:
    """Return why METEOR cannot be computed on this machine, or None if it can."""
    try:
        from nltk.corpus import wordnet

        wordnet.ensure_loaded()
    except LookupError:
        return WORDNET_HELP
    return None


def meteor(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return the mean over lines of nltk's METEOR, from 0 to 1; unlike METEOR 1.5, with English stems and synonyms.

    It equals Hugging Face's `evaluate.load("meteor")`, except that the latter divides lines into sentences first.
    Raises ConfigError if WordNet is missing.
    """
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import single_meteor_score

    problem = wordnet_problem()
    if problem is not None:
        raise ConfigError(problem)
    words = NLTKWordTokenizer().tokenize
    pairs = zip(hypotheses, references, strict=True)
    return sum(single_meteor_score(words(r), words(h)) for h, r in pairs) / max(1, len(references))
