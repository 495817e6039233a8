"""Checks arguments against the annotations of the function that takes them: the one place that compares types.

Numbers of any library will do: numpy's integers are integers. Booleans are no numbers, nor is what 64 bits cannot hold.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}


@dataclass(frozen=True)
class Bounds:
    """Of numbers, in `Annotated[float, Bounds(0, 1)]`: low <= value <= high. The message also says `note`."""

    low: float
    high: float
    note: str = ""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"[{self.low:g}, {self.high:g}]{note}"


TIMEOUT_S = Bounds(0.001, 1e9, "seconds")  # from gloo's unit up to what its clocks, which count nanoseconds, can hold
BUCKET_MB = Bounds(1e-9, 1e9, "MiB")  # up to what 64 bits can count


def check_arguments(
    taker: Callable[..., Any], given: Mapping[str, Any], prefix: str = "", names: Mapping[str, str] | None = None
) -> None:
    """Raise ValueError for the first argument that its annotation does not allow: name, value and what is expected.

    taker:  a function, with its `locals()` as `given`, or a dataclass, with its fields
    prefix: of the name in the message
    names:  what arguments are called in the message, where that is not their own name
    """
    for name, hint in _hints(taker).items():
        if name in given and not _fits(given[name], hint):
            value, shown = given[name], (names or {}).get(name, name)
            instead = ", not the class itself" if isinstance(value, type) else " of at most 64 bits" * _is_huge(value)
            raise ValueError(f"{prefix}{shown}={value!r:.100}: expected {_describe(hint)}{instead}")


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
