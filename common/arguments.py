"""Checks of what a caller or user passes in: type and range, the word probably meant, and `~` in paths.

Arguments are checked against the annotations of the function that takes them. Numbers of any library are accepted:
numpy's integers are integers. Booleans do not count as numbers, nor do integers beyond 64 bits. Needs no torch.
"""

import difflib
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}


@dataclass(frozen=True)
class Bounds:
    """Bounds on a number, as in `Annotated[float, Bounds(0, 1)]`: low <= value <= high; messages include `note`."""

    low: float
    high: float
    note: str = ""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"[{self.low:g}, {self.high:g}]{note}"


TIMEOUT_S = Bounds(0.001, 1e9, "seconds")  # from gloo's unit to the most that its nanosecond clocks can hold
BUCKET_MB = Bounds(1e-9, 1e9, "MiB")  # up to what 64 bits can count


def check_arguments(taker: Callable[..., Any], given: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ValueError for the first argument that its annotation does not allow: name, value and what is expected.

    taker:  a function, with its `locals()` as `given`, or a dataclass, with its fields
    prefix: put before the name in the message
    """
    for name, hint in _hints(taker).items():
        if name in given and not _fits(given[name], hint):
            value = given[name]
            instead = ", not the class itself" if isinstance(value, type) else " of at most 64 bits" * _is_huge(value)
            raise ValueError(f"{prefix}{name}={value!r:.100}: expected {_describe(hint)}{instead}")


@cache
def _hints(taker: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(taker, include_extras=True)


def _fits(value: object, hint: Any) -> bool:
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind is Annotated:
        return _fits(value, parts[0]) and all(value in bounds for bounds in parts[1:])
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return any(value is part or (isinstance(value, str) and value == part) for part in parts)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    if kind is tuple:  # tuple[X, ...]
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not (isinstance(value, bool) or _is_huge(value))
    return isinstance(value, kind or hint)


def _is_huge(value: object) -> bool:
    return isinstance(value, Integral) and not -(2**63) <= value < 2**63


def _describe(hint: Any) -> str:
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return f"{_describe(parts[0])} in {' and '.join(map(str, parts[1:]))}"
    if kind in (Union, UnionType):
        return " or ".join(map(_describe, parts))
    if kind is Literal:
        return " or ".join(filter(None, [", ".join(map(repr, parts[:-1])), repr(parts[-1])]))
    if kind is dict:
        return f"a dict from {_describe(parts[0])} to {_describe(parts[1])}"
    if kind is tuple:
        return f"a tuple in which each item is {_describe(parts[0])}"
    if hint in NAMES:
        return NAMES[hint]
    name = (kind or hint).__name__
    if hint.__module__ == "torch":  # torch.dtype
        return f"a torch.{name}"
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def require(condition: bool, where: str, name: str, value: object, expected: str) -> None:
    """Raise `ValueError("where: name=value: expected ...")` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{where}: {name}={value!r}: expected {expected}")


def require_non_negative(where: str, name: str, value: object) -> None:
    """Require a finite number >= 0 (tensors are refused: reading one can wait for the device)."""
    require(is_number(value) and value >= 0, where, name, value, "a finite number >= 0")


def require_decay_rate(where: str, name: str, value: object) -> None:
    """Require the rate of an exponential average, a number in [0, 1)."""
    require(is_number(value) and 0 <= value < 1, where, name, value, "a number in [0, 1)")


def require_fraction(where: str, name: str, value: object) -> None:
    """Require a number in [0, 1]."""
    require(is_number(value) and 0 <= value <= 1, where, name, value, "a number in [0, 1]")


def require_count(where: str, name: str, value: object, at_least: int) -> None:
    """Require an integer >= `at_least` that 64 bits can hold."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    require(is_integer and value >= at_least, where, name, value, f"an integer >= {at_least}")
    require(value < 2**63, where, name, value, "an integer < 2^63")


def is_number(value: object) -> bool:
    """Return whether `value` is a finite real number (and not a bool)."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def integer(what: str, value: object, minimum: int, maximum: int = 2**63 - 1) -> int:
    """Return `value` as an int.

    Raises ValueError naming `what` if it is not an integer (a bool is not), below `minimum` or above `maximum`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{what}: expected an integer >= {minimum}, got {value!r}") from None
    if number < minimum:
        raise ValueError(f"{what}: expected an integer >= {minimum}, got {number}")
    if number > maximum:
        raise ValueError(f"{what}: expected an integer <= {maximum}, got {number}")
    return number


def flag(what: str, value: object) -> bool:
    """Return `value`; raise ValueError naming `what` if it is not a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{what}: expected true or false, got {value!r}")
    return value


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known word that is spelled most like `word`, or "" if none is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the hint for an unknown name: "did you mean 'x'? expected one of: w, x"."""
    known = sorted(known)
    return f"{did_you_mean(word, known)} expected one of: {', '.join(known)}".removeprefix(";").lstrip()


def expand_home(path: str) -> str:
    """Return the path with the home folder for a leading `~` or `~user`, which a shell leaves alone after `key=`.

    Raises ValueError if there is no such user: a folder really called `~name` is unlikely.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~") and "/" in expanded:
        raise ValueError(f"{path}: no such user; expected ~/FOLDER, or ./{path} for a file of that name")
    return expanded


def differences(a: Mapping[str, Any], b: Mapping[str, Any], keys: Iterable[str], absent: str, now: str) -> list[str]:
    """Return `key: A there, B now` for each of these keys on which a and b differ; `absent` for a missing value."""
    pairs = {key: (a.get(key, absent), b.get(key, absent)) for key in keys}
    return [f"{key}: {there} there, {here} {now}" for key, (there, here) in pairs.items() if there != here]
