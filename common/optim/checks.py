"""Checks shared by the optimizers, schedules and groups: errors say where, what, value and expectation."""

from __future__ import annotations

import sys
from numbers import Integral, Real

import torch
from torch import Tensor


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
    """Return whether `value` is a finite real number (and no bool)."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def dense_grad(where: str, param: Tensor) -> Tensor:
    """Return `param.grad`; raise RuntimeError if it is sparse."""
    if param.grad.layout != torch.strided:
        raise RuntimeError(
            f"{where}: gradient of the parameter of shape {tuple(param.shape)} has layout "
            f"{param.grad.layout}: expected a dense gradient (for an embedding, set sparse=False)"
        )
    return param.grad
