"""A topology as a value: a schedule of rounds that can be printed, compared and tested without processes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from common.arguments import check_arguments, integer
from common.topology import analysis
from common.topology.round import MOST_WORKERS, Round

RANDOM_SAMPLE = 64  # rounds of a random schedule that stand for all of them where one period would be used


@runtime_checkable
class RandomSchedule(Protocol):
    """A schedule without a period; round t depends on a seed and t only, so that all workers draw the same."""

    world_size: int

    def __call__(self, t: int) -> Round:
        """Return round t."""
        ...

    def contraction(self) -> float:
        """Return sqrt(lambda_2(E[W^T W])), the root mean square contraction of one round."""
        ...


Schedule = tuple[Round, ...] | RandomSchedule


@dataclass(frozen=True)
class Topology:
    """A schedule of rounds over `world_size` workers; worker i lives on host i // workers_per_host.

    `schedule` is either one period of rounds or a RandomSchedule. `build` makes the named ones; for your own:

        Topology("mine", world_size=4, schedule=(Round.from_groups([(0, 3), (1, 2)], 4), ...))

    Raises ValueError when the schedule is empty or of another world size, and for a field of another type.
    """

    name: str
    world_size: int
    workers_per_host: int = 1
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    schedule: Schedule = field(kw_only=True, repr=False)

    def __post_init__(self) -> None:
        integer("world_size", self.world_size, minimum=1, maximum=MOST_WORKERS)
        integer("workers_per_host", self.workers_per_host, minimum=1)
        check_arguments(Topology, vars(self), prefix="topology: ")
        object.__setattr__(self, "options", dict(self.options))
        members = self.schedule if isinstance(self.schedule, tuple) else (self.schedule,)
        if not members:
            raise ValueError(f"topology {self.name!r}: schedule: expected at least one round, got none")
        for t, member in enumerate(members):
            if member.world_size != self.world_size:
                raise ValueError(
                    f"topology {self.name!r}: schedule, round {t}: expected {self.world_size} workers, "
                    f"got {member.world_size}"
                )

    def __str__(self) -> str:
        """Return the name and the options, without the path of a file, as in the fingerprint, and the hosts."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items() if key != "path")
        hosts = f" on hosts of {self.workers_per_host}" if self.workers_per_host > 1 else ""
        return f"{self.name}{f'({options})' if options else ''}{hosts}"

    @property
    def period(self) -> int | None:
        """Rounds until the schedule repeats; None for random schedules."""
        return len(self.schedule) if isinstance(self.schedule, tuple) else None

    def round(self, t: int) -> Round:
        """Return the round of step t >= 0."""
        t = integer("t (the round's number)", t, minimum=0)
        if isinstance(self.schedule, tuple):
            return self.schedule[t % len(self.schedule)]
        return self.schedule(t)

    def matrix(self, t: int) -> np.ndarray:
        """Return the mixing matrix of step t, float64 [n, n]; row i: the weights with which i mixes."""
        return self.round(t).matrix()

    @cached_property
    def sample(self) -> tuple[Round, ...]:
        """One period of rounds, or the first 64 of a random schedule."""
        if isinstance(self.schedule, tuple):
            return self.schedule
        return tuple(self.schedule(t) for t in range(RANDOM_SAMPLE))

    @cached_property
    def doubly_stochastic(self) -> bool:
        """Whether every round keeps the mean (rows and columns sum to 1); if not, it needs push-sum."""
        return all(round_.doubly_stochastic for round_ in self.sample)

    @cached_property
    def symmetric(self) -> bool:
        """Whether in every round each worker gives to those it takes from, with the same weight."""
        return all(round_.symmetric for round_ in self.sample)

    def spectral_gap(self) -> float:
        """Return the spectral gap per round; see `analysis.spectral_gap`."""
        return analysis.spectral_gap(self)

    def fingerprint(self) -> str:
        """Return the SHA-256 hex digest of name, sizes, options and rounds (one period, or the first 64).

        Equal on all workers, processes and platforms for equal schedules: weights are rounded to 12 digits, and
        of an edge-list file the contents count, not the path, which may differ between hosts.
        """
        options = {key: value for key, value in self.options.items() if key != "path"}
        head = [self.name, self.world_size, self.workers_per_host, self.period, options]
        digest = hashlib.sha256(json.dumps(head, sort_keys=True, default=str).encode())
        for round_ in self.sample:
            digest.update(_text(round_.weights).encode())
        return digest.hexdigest()


def _text(weights: tuple[Mapping[int, float], ...]) -> str:
    rows = (" ".join(f"{j}:{weight:.12g}" for j, weight in row.items()) for row in weights)
    return "\n" + ";".join(rows)
