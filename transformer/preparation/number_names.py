"""The embedded corpus: names of numbers in two languages, by num2words.

A line holds a few numbers ("twelve; three hundred and five"). This is real language in any amount, with known
translations. Word order differs ("vierundzwanzig" is "four and twenty"), so attention is needed, and a model that has
learned the task scores close to 100 BLEU.
"""

from collections.abc import Iterator

import numpy as np

from common.config.config import ConfigError
from transformer.config import NumberNames

SEPARATORS = {"fr": " ; "}  # French has a space before a semicolon
Pair = tuple[str, str]


def number_name_pairs(data: NumberNames) -> dict[str, Iterator[Pair]]:
    """Return the raw line pairs of each split; every number below data.numbers belongs to only one split."""
    numbers = np.random.default_rng(data.seed).permutation(data.numbers)
    held_out = data.held_out
    shares = {"valid": numbers[:held_out], "test": numbers[held_out : 2 * held_out], "train": numbers[2 * held_out :]}
    lines = {"train": data.train_lines, "valid": data.held_out_lines, "test": data.held_out_lines}
    return {split: _pairs(data, shares[split], lines[split], seed) for seed, split in enumerate(lines)}


def name_line(numbers: list[int], language: str) -> str:
    """Write numbers as a line of names. Raises ConfigError if num2words does not know the language."""
    from num2words import num2words

    try:
        return SEPARATORS.get(language, "; ").join(num2words(number, lang=language) for number in numbers)
    except NotImplementedError as error:
        raise ConfigError(f"data: num2words does not know the language {language!r}") from error


def _pairs(data: NumberNames, numbers: np.ndarray, lines: int, split: int) -> Iterator[Pair]:
    generator = np.random.default_rng((data.seed, split))
    for count in generator.integers(1, data.longest, size=lines, endpoint=True):
        chosen = generator.choice(numbers, count).tolist()
        yield name_line(chosen, data.source), name_line(chosen, data.target)
