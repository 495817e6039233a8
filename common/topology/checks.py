"""Checks of what a caller hands in; every message says what was expected and what was got."""

import operator

WORKERS = 1 << 14  # at most: rounds list all of them, some all pairs


def integer(what: str, value: object, minimum: int, maximum: int = 2**63 - 1) -> int:
    """Return `value` as an int.

    Raises ValueError naming `what` when it is no integer (booleans are none), less than `minimum` or above `maximum`.
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
    """Return `value`; raises ValueError naming `what` when it is no bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{what}: expected true or false, got {value!r}")
    return value
