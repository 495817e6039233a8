"""Arguments that are not what a signature says are refused by name, before anything starts."""

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from common.arguments import Bounds, check_arguments
from common.optim import AccumAdam
from common.optim.schedules import Constant
from common.options import GossipOptions
from common.parallel import AllReduceDataParallel, DecentralizedDataParallel, Mixing, Outer
from common.simulate import simulate
from common.topology import Round, Topology, build

HUGE = 10**30
TAKERS = (DecentralizedDataParallel, AllReduceDataParallel, simulate, GossipOptions)


@pytest.mark.parametrize(
    ("taker", "name"),
    [
        (taker, name)
        for taker in TAKERS
        for name, parameter in inspect.signature(taker).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    + [(taker, name) for taker in (DecentralizedDataParallel, simulate) for name in GossipOptions.names()],
)
def test_an_argument_of_another_type_is_named(taker: Callable[..., Any], name: str) -> None:
    good = {"module": nn.Linear(2, 2), "topology": "ring", "world_size": 1, "order": None}
    given = {key: value for key, value in good.items() if key in inspect.signature(taker).parameters}
    with pytest.raises(ValueError, match=rf"^{name}=<object object at .*>: expected "):
        taker(**given | {name: object()})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": None}, "topology=None: expected a string or a Topology"),
        ({"topology": ["ring"]}, "topology=['ring']: expected a string or a Topology"),
        ({"outer": (0.7, 0.9)}, "outer=(0.7, 0.9): expected an Outer or None"),
        ({"outer": Outer}, "expected an Outer or None, not the class itself"),
        ({"mixing": 3.0}, "mixing=3.0: expected a Mixing or None"),
        ({"local_steps": 2.5}, "local_steps=2.5: expected an integer"),
        ({"local_steps": True}, "local_steps=True: expected an integer"),
        ({"local_steps": 4, "merge_after": 2.5}, "merge_after=2.5: expected an integer or None"),
        ({"local_steps": 4, "fragments": np.float64(2)}, "fragments=np.float64(2.0): expected an integer"),
        ({"order": "wac"}, "order='wac': expected 'awc' or 'atc' or None"),
        ({"phases": "stagered"}, "phases='stagered': expected 'aligned' or 'staggered'"),
        ({"push_sum": 1}, "push_sum=1: expected True or False"),
        ({"bucket_mb": float("inf")}, "bucket_mb=inf: expected a number in [1e-09, 1e+09] (MiB) or 'auto'"),
    ],
)
def test_what_users_try(options: dict[str, Any], message: str) -> None:
    for taker in (DecentralizedDataParallel, lambda module, **others: simulate(module, 1, **others)):
        with pytest.raises(ValueError, match=re.escape(message)):
            taker(nn.Linear(2, 2), **{"topology": "ring"} | options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GossipOptions(local_steps=2.5), "local_steps=2.5: expected an integer"),
        (lambda: GossipOptions(local_steps=4, local_steps_from=1.5), "local_steps_from=1.5: expected an integer"),
        (lambda: Outer(lr="0.7"), "outer.lr='0.7': expected a number"),
        (lambda: Outer(nesterov=1), "outer.nesterov=1: expected True or False"),
        (lambda: Outer(displacement="mine"), "outer.displacement='mine': expected 'own' or 'mixed'"),
        (lambda: Mixing(power=-1), "mixing.power=-1: expected a number in [0, 100]"),
        (lambda: Mixing(start=1.5), "mixing.start=1.5: expected an integer in [0, inf]"),
        (lambda: build("file", 3, path=7), "topology 'file': path=7: expected a string or a PathLike"),
        (lambda: Topology("mine", 2, schedule=[Round.idle(2)]), "expected a tuple in which each item is a Round or"),
        (lambda: Topology("mine", 2, options=3, schedule=(Round.idle(2),)), "topology: options=3: expected a dict"),
        # Numbers that no computer counts to.
        (lambda: build("ring", 4, idle_rounds=HUGE), "topology 'ring': idle_rounds: expected an integer <= 1000000"),
        (lambda: build("random_matching", 4, seed=HUGE), "seed: expected an integer <= 9223372036854775807"),
        (lambda: build("ring", HUGE), "topology 'ring': world_size: expected an integer <= 16384"),
        (lambda: Round.idle(HUGE), "Round.idle: world_size: expected an integer <= 16384"),
        (lambda: simulate(nn.Linear(2, 2), HUGE), f"world_size={HUGE}: expected an integer of at most 64 bits"),
        (lambda: GossipOptions(local_steps=HUGE), f"local_steps={HUGE}: expected an integer of at most 64 bits"),
        (lambda: Outer(lr=10**400), "expected a number of at most 64 bits"),
        (lambda: Constant(warmup_steps=HUGE, warmup_start=0.0), f"warmup_steps={HUGE}: expected an integer < 2^63"),
        (lambda: Constant(warmup_steps=3, warmup_start=10**400), "expected a number in [0, 1]"),
        (lambda: AccumAdam([nn.Parameter(torch.ones(1))], lr=10**400), "expected a finite number >= 0"),
    ],
)
def test_records_check_their_fields(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_arguments_of_methods_are_named_too() -> None:
    (replica,) = simulate(nn.Linear(2, 2), 1)
    for model in (replica, DecentralizedDataParallel(nn.Linear(2, 2), "ring")):
        with pytest.raises(ValueError, match=r"optimizer=<class .*SGD'>: expected an Optimizer, not the class itself"):
            model.attach(torch.optim.SGD)
        with pytest.raises(ValueError, match=r"clock=2.5: expected an integer"):
            model.load_clock(2.5)


def test_hints_that_are_understood() -> None:
    def taker(
        a: Annotated[float, Bounds(0, 1, note="a share")] | None = None,
        b: dict[int, Annotated[float, Bounds(1, 9)]] | None = None,
        c: Literal["x", "y", "z"] = "x",
    ) -> None: ...

    for good in ({"a": 1}, {"a": None}, {"b": {0: 1.0}}, {"c": "z"}, {"a": np.float32(0.5), "unknown": 3}):
        check_arguments(taker, good)
    for bad, message in (
        ({"a": 1.5}, "a=1.5: expected a number in [0, 1] (a share) or None"),
        ({"a": float("nan")}, "a=nan: expected"),
        ({"b": {0: 10}}, "b={0: 10}: expected a dict from an integer to a number in [1, 9] or None"),
        ({"b": {"0": 1}}, "b={'0': 1}: expected a dict from"),
        ({"c": "w"}, "c='w': expected 'x', 'y' or 'z'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            check_arguments(taker, bad)
