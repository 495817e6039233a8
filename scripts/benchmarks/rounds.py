"""Contenders in turn, round by round, so that what slows the machine down slows all of them alike."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Result = TypeVar("Result")


def rounds_in_turn(contenders: Mapping[str, Callable[[int], Result]], rounds: int) -> dict[str, list[Result]]:
    """Call every contender with the number of each round, in an order that rotates; return their results by name."""
    names = list(contenders)
    results: dict[str, list[Result]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(contenders[name](number))
    return results


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the interquartile range."""
    low, median, high = statistics.quantiles(values, n=4)
    return median, high - low
