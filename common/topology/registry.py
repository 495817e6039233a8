"""Topologies by name."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.arguments import did_you_mean, flag, integer
from common.topology.families import (
    aer,
    base_k,
    complete,
    edge_list,
    grid,
    hypercube,
    one_peer_exponential,
    one_peer_ring,
    random_matching,
    ring,
    star,
    static_exponential,
    torus,
)
from common.topology.round import MOST_WORKERS, Round
from common.topology.topology import RandomSchedule, Schedule, Topology

REQUIRED = inspect.Parameter.empty
MOST_IDLE = 10**6  # a period is a list of its rounds


@dataclass(frozen=True)
class _Family:
    schedule: Callable[..., Schedule]

    @cached_property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.schedule).parameters)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options and their defaults: the keyword-only arguments of `schedule`."""
        return {name: p.default for name, p in self._parameters.items() if p.kind is p.KEYWORD_ONLY}

    @property
    def uses_hosts(self) -> bool:
        return "workers_per_host" in self._parameters


_FAMILIES = {
    "complete": _Family(complete.schedule),
    "ring": _Family(ring.schedule),
    "one_peer_ring": _Family(one_peer_ring.schedule),
    "static_exponential": _Family(static_exponential.schedule),
    "one_peer_exponential": _Family(one_peer_exponential.schedule),
    "hypercube": _Family(hypercube.schedule),
    "aer": _Family(aer.schedule),
    "torus": _Family(torus.schedule),
    "grid": _Family(grid.schedule),
    "star": _Family(star.schedule),
    "random_matching": _Family(random_matching.schedule),
    "base_k": _Family(base_k.schedule),
    "file": _Family(edge_list.schedule),
}
NAMES = tuple(_FAMILIES)


def knows_hosts(name: str) -> bool:
    """Return whether the rounds of the topology `name` depend on which workers share a host; False if there is none."""
    return name in _FAMILIES and _FAMILIES[name].uses_hosts


def build(name: str, world_size: int, workers_per_host: int = 1, **options: Any) -> Topology:
    """Return the topology `name` over `world_size` workers; every name is one idle round for a world of one.

    Options, beside those of the family (see `common.topology.families`):
        idle_rounds: rounds without communication (local steps) after each round; default 0.
        between_hosts: every host averages over its workers, then hosts mix as the topology of that many workers does;
            one message leaves a host for each that one worker of it would send. Default False.

    Raises ValueError for an unknown name or option, a value out of range, or a world size that the family
    does not exist for; the message says which ones it exists for and what to use instead.
    """
    if not isinstance(name, str) or name not in _FAMILIES:
        hint = did_you_mean(name, NAMES)
        raise ValueError(f"topology: expected one of {', '.join(NAMES)}; got {name!r}{hint}")
    n = integer(f"topology {name!r}: world_size", world_size, minimum=1, maximum=MOST_WORKERS)
    workers_per_host = integer(f"topology {name!r}: workers_per_host", workers_per_host, minimum=1)
    family = _FAMILIES[name]
    idle_rounds = options.pop("idle_rounds", 0)
    idle_rounds = integer(f"topology {name!r}: idle_rounds", idle_rounds, minimum=0, maximum=MOST_IDLE)
    between_hosts = flag(f"topology {name!r}: between_hosts", options.pop("between_hosts", False))
    chosen = _chosen(name, family.options, options)
    if n == 1:
        schedule: Schedule = (Round.idle(1),)
    elif between_hosts:
        hosts = _hosts_of(name, n, workers_per_host)
        mixing = family.schedule(hosts, **chosen) if hosts > 1 else (Round.idle(1),)
        schedule = _with_idle(_between_hosts(mixing, workers_per_host), idle_rounds)
    else:
        per_host = (workers_per_host,) if family.uses_hosts else ()
        schedule = _with_idle(family.schedule(n, *per_host, **chosen), idle_rounds)
    shown = {key: value for key, value in chosen.items() if value is not None}
    if idle_rounds:
        shown["idle_rounds"] = idle_rounds
    if between_hosts:
        shown["between_hosts"] = True
    return Topology(name, n, workers_per_host, shown, schedule=schedule)


def _chosen(name: str, defaults: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with defaults filled in; raise ValueError for unknown or missing ones."""
    allowed = (*defaults, "idle_rounds", "between_hosts")
    for key in options:
        if key not in allowed:
            hint = did_you_mean(key, (*allowed, "workers_per_host"))
            raise ValueError(
                f"topology {name!r}: options: expected names among {', '.join(allowed)}; got {key!r}{hint}"
            )
    chosen = defaults | options
    for key, value in chosen.items():
        if value is REQUIRED:
            raise ValueError(f"topology {name!r}: {key}: expected a value for this option, got none")
    return chosen


def _hosts_of(name: str, n: int, workers_per_host: int) -> int:
    """Return the number of hosts. Raises ValueError where between_hosts=True makes no sense."""
    if _FAMILIES[name].uses_hosts:
        raise ValueError(f"topology {name!r}: between_hosts: expected False, this topology knows hosts by itself")
    if n % workers_per_host:
        raise ValueError(
            f"topology {name!r}: between_hosts: expected hosts of one size, got world_size={n}, "
            f"workers_per_host={workers_per_host}"
        )
    return n // workers_per_host


def _between_hosts(schedule: Schedule, workers_per_host: int) -> Schedule:
    if not isinstance(schedule, tuple):
        return _RandomBetweenHosts(schedule, workers_per_host)
    return tuple(round_.on_hosts(workers_per_host) for round_ in schedule)


@dataclass(frozen=True)
class _RandomBetweenHosts:
    """A random schedule of hosts that average inside first."""

    schedule: RandomSchedule
    workers_per_host: int

    @property
    def world_size(self) -> int:
        return self.schedule.world_size * self.workers_per_host

    def __call__(self, t: int) -> Round:
        return self.schedule(t).on_hosts(self.workers_per_host)

    def contraction(self) -> float:
        return self.schedule.contraction()  # disagreement inside a host is gone at once


@dataclass(frozen=True)
class _RandomWithIdle:
    """A random schedule with `idle_rounds` idle rounds after each round."""

    schedule: RandomSchedule
    idle_rounds: int

    @property
    def world_size(self) -> int:
        return self.schedule.world_size

    def __call__(self, t: int) -> Round:
        drawn, idle = divmod(t, 1 + self.idle_rounds)
        return Round.idle(self.world_size) if idle else self.schedule(drawn)

    def contraction(self) -> float:
        return self.schedule.contraction() ** (1 / (1 + self.idle_rounds))


def _with_idle(schedule: Schedule, idle_rounds: int) -> Schedule:
    if idle_rounds == 0:
        return schedule
    if not isinstance(schedule, tuple):
        return _RandomWithIdle(schedule, idle_rounds)
    idle = (Round.idle(schedule[0].world_size),) * idle_rounds
    return tuple(round_ for mixing in schedule for round_ in (mixing, *idle))
