"""The options of gossip, declared and checked once, and the rule for local steps that they select.

The rule says which updates begin, merge and end a round, and what an outer optimizer does at the end of it. A
round of H local steps on worker i, with inner parameters x, anchor a (the outer parameters) and outer momentum v:

    begin           a <- x; the anchors are launched with W(r)
    after tau - 1   a' = sum_j W_ij(r) a_j;  x <- x + (a' - a);  a <- a'        (merged before update number tau)
    end             d = x - a;  v <- mu v + d;  a <- a + eta (d + mu v);  x <- a

With tau = 0 nothing travels during the round: its end is followed by x <- sum_j W_ij(r) x_j. With eta = 1, mu = 0 this
is local SGD (arXiv 1805.09767), and tau = 1 does what H - 1 idle rounds of the topology do. With a complete graph and
tau = 0 it is DiLoCo (arXiv 2311.08105): Nesterov's step is linear in d, so the mean of the steps is the step of the
mean. With one worker it is Lookahead (arXiv 1907.08610) with momentum.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from common.arguments import BUCKET_MB, Bounds, check_arguments
from common.topology import Topology, in_phases

if TYPE_CHECKING:  # the planner and the configuration need no torch
    from torch.optim import Optimizer

HIGH_MOMENTUM = 0.9  # heavy ball on the mixed displacement diverged from here on


@dataclass(frozen=True)
class Outer:
    """The outer optimizer: what a worker does with its displacement at the end of a round of local steps.

    lr:           eta, in (0, 2): the share of the displacement that is kept. 1 without momentum changes nothing
    momentum:     mu, in [0, 1); costs one more vector of the parameters' size
    nesterov:     whether the step is lr (d + mu v), as in torch.optim.SGD(nesterov=True), or heavy ball's lr v
    displacement: "own": from the worker's anchor to its parameters, before mixing; the step is local. "mixed": to the
                  mixed parameters. With random pairs and without Nesterov this is NoLoCo (arXiv 2506.10911, as
                  released: with equal weights for its two terms)

    Raises ValueError for a value of another type or out of range.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    displacement: Literal["own", "mixed"] = "own"

    def __post_init__(self) -> None:
        check_arguments(Outer, vars(self), prefix="outer.")
        if not 0 < self.lr < 2:
            raise ValueError(f"outer.lr={self.lr}: expected a number in (0, 2): from 2 on the outer step diverges")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer.momentum={self.momentum}: expected a number in [0, 1)")

    @property
    def is_identity(self) -> bool:
        """Whether the outer step leaves the parameters unchanged."""
        return self.lr == 1 and self.momentum == 0


@dataclass(frozen=True)
class Mixing:
    """How strongly a round mixes: x_i <- (1 - g) x_i + g sum_j W_ij x_j with g = (lr / lr_max)^power (DSGD-AC,
    arXiv 2602.02899, power 3).

    power: 0 mixes fully at all times
    start: g = 1 in updates before this one; choose the end of a warm-up, during which lr is small too, or later

    lr is the learning rate of the attached optimizer's first parameter group. lr_max is what schedules record there:
    `max_lr` (OneCycleLR), else `initial_lr`, which a schedule started from. With neither, or if lr is higher
    (CyclicLR), g = 1, and a warning says so. Schedules must be the same on all workers, or the mean is not conserved.
    Raises ValueError for a value of another type or out of range.
    """

    power: Annotated[float, Bounds(0, 100)] = 0.0
    start: Annotated[int, Bounds(0, math.inf)] = 0

    def __post_init__(self) -> None:
        check_arguments(Mixing, vars(self), prefix="mixing.")

    def strength(self, optimizer: Optimizer, clock: int) -> float:
        """Return g of update `clock`, in [0, 1]."""
        if self.power == 0 or clock < self.start:
            return 1.0
        group: Mapping[str, Any] = optimizer.param_groups[0]
        lr, highest = float(group["lr"]), float(group.get("max_lr", group.get("initial_lr", 0.0)))
        if lr > highest * (1 + 1e-6):  # beyond rounding; a text that does not depend on lr is shown once
            known = f"above the {highest:g} that its schedule started from" if highest else "not that of a schedule"
            warnings.warn(
                f"mixing.power={self.power:g}: the optimizer's learning rate is {known}, so rounds mix fully; set the "
                "highest one as optimizer.param_groups[0]['max_lr'], or take a schedule that starts from it",
                stacklevel=2,
            )
            return 1.0
        return min(1.0, lr / highest) ** self.power if highest else 1.0


def order_of(merge_after: int | None) -> Literal["awc", "atc"]:
    """Return the order that `merge_after` implies: "atc" with 0, where nothing travels during a round, else "awc"."""
    return "atc" if merge_after == 0 else "awc"


@dataclass(frozen=True)
class LocalSteps:
    """Which updates begin, merge and end the rounds. A fragment is a run of buckets with its own rounds.

    steps:       H, updates in a round
    merge_after: tau in 0..H: a round is merged before its tau-th update; 0: at its end, after the outer step, or
                 before it if the displacement is "mixed"
    outer:       the outer optimizer
    start:       each update before this one is a round, without an outer step (post-local SGD, arXiv 1808.07217)
    fragments:   number of parts of the parameters; part f runs f H / fragments updates ahead of part 0, which spreads
                 the messages of a round over its updates (Streaming DiLoCo, arXiv 2501.18512)

    Raises ValueError for a value out of range; GossipOptions checks the types.
    """

    steps: int = 1
    merge_after: int = 1
    outer: Outer = Outer()
    start: int = 0
    fragments: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"local_steps={self.steps}: expected a number of updates >= 1")
        if not 0 <= self.merge_after <= self.steps:
            raise ValueError(
                f"merge_after={self.merge_after}: expected 0 to local_steps={self.steps}: a round has to be merged "
                "before the next one begins"
            )
        if self.outer.displacement == "mixed" and self.merge_after != 0:
            raise ValueError(
                f"merge_after={self.merge_after} with outer.displacement=mixed: expected order=atc (merge_after=0): "
                "displacements that are mixed a round late diverge"
            )
        if self.start < 0:
            raise ValueError(f"local_steps_from={self.start}: expected a number of updates >= 0")
        if not 1 <= self.fragments <= self.steps:
            raise ValueError(
                f"fragments={self.fragments}: expected 1 to local_steps={self.steps}: fragments take turns within a "
                "round"
            )

    @property
    def order(self) -> str:
        """The order of rounds: "awc" if they travel while workers compute, else "atc"."""
        return order_of(self.merge_after)

    @property
    def every_update(self) -> bool:
        """Whether every update is a round without an outer step, as without local steps."""
        return self.steps == 1 and self.outer.is_identity

    @property
    def keeps_anchors(self) -> bool:
        """Whether anchors differ from the parameters, and so take one more vector."""
        return not self.outer.is_identity or self.merge_after > 1

    @property
    def sends_anchors(self) -> bool:
        """Whether anchors travel instead of the parameters."""
        return self.keeps_anchors and self.outer.displacement == "own"

    def launched(self, clock: int) -> list[int]:
        """Return the fragments whose messages are in flight after `clock` updates, in the order of their launches.

        Relaunched in another order, messages between hosts would wait for earlier rounds queued behind them.
        """
        under_way = [f for f in range(self.fragments) if self._position(clock, f) < self._merge_after(clock)]
        return sorted(under_way, key=lambda f: -self._position(clock, f))

    def merging(self, clock: int) -> list[int]:
        """Return the fragments to merge before update number `clock`, counted from 0."""
        return [f for f in range(self.fragments) if self._position(clock, f) == self._merge_after(clock) - 1]

    def merges_at_beginning(self, clock: int) -> bool:
        """Return whether rounds that are merged before update number `clock` were launched just before that update."""
        return self._merge_after(clock) == 1

    def ending(self, clock: int) -> list[int]:
        """Return the fragments whose round ends with update number `clock`."""
        last = 0 if clock < self.start else self.steps - 1
        return [f for f in range(self.fragments) if self._position(clock, f) == last]

    def beginning(self, clock: int) -> list[int]:
        """Return the fragments whose anchors are their parameters after `clock` updates."""
        return [f for f in range(self.fragments) if clock <= self.start or self._position(clock, f) == 0]

    def merged(self, clock: int, fragment: int = 0) -> int:
        """Return how many rounds are merged after `clock` updates: the index of the next one in the schedule."""
        if clock < self.start:
            return clock
        return self.start + self._merged_since_start(clock, fragment) - self._merged_since_start(self.start, fragment)

    def outer_of(self, clock: int) -> Outer:
        """Return the outer optimizer that ends a round with update number `clock`."""
        return self.outer if clock >= self.start else Outer()

    def _merged_since_start(self, clock: int, fragment: int) -> int:
        """Return how many rounds are merged, counted as if the fragment's lead had been trained as well."""
        merged = 0 < self.merge_after <= self._position(clock, fragment)
        return (clock - self.start + self._lead(fragment)) // self.steps + merged

    def _lead(self, fragment: int) -> int:
        return fragment * self.steps // self.fragments

    def _position(self, clock: int, fragment: int) -> int:
        return 0 if clock < self.start else (clock - self.start + self._lead(fragment)) % self.steps

    def _merge_after(self, clock: int) -> int:
        return min(self.merge_after, 1) if clock < self.start else self.merge_after


@dataclass(frozen=True)
class GossipOptions:
    """What gossip computes. `DecentralizedDataParallel` and `common.simulate.simulate` take these as keyword arguments.

    order:            "awc" or "atc", see `common.parallel.decentralized`; None: "atc" if merge_after is 0, else "awc"
    local_steps:      H, updates in a round: a step sends 1/H of the bytes on average, and between exchanges it runs
                      only the operations of the bare optimizer
    outer:            the outer optimizer; None: none (local SGD). It keeps one vector of the parameters' size, the
                      anchors (outer parameters), and with momentum one more
    merge_after:      tau: merge a round before its tau-th update; its messages travel until then. Above 1 anchors are
                      always kept. 0: exchange at its end, as order "atc" does. None: 0 with "atc", else ceil(H/3)
    local_steps_from: each update before this one is a round (post-local SGD)
    fragments:        number of runs of buckets, whatever layers these belong to, that take turns within H updates
    mixing:           how strongly rounds mix as the learning rate falls (DSGD-AC); None: fully
    bucket_mb:        MiB per message; 1-2 suit slow links; "auto": 2 on the CPU, 64 on a GPU. An all-reduce cuts a
                      bucket into one message per member, so its buckets are that many times larger (up to 25)
    phases:           "aligned", or "staggered": half of the buckets run the rounds in another order, so that with AER
                      every host sends half of its bytes in each step instead of all in every second one
    push_sum:         stochastic gradient push (SGP), which also works on topologies that do not keep the mean (directed
                      graphs whose ranks take more or less than they give); on all others it changes nothing

    After construction `outer` and `mixing` are set, and `plan` says which updates are rounds. Raises ValueError naming
    the option if one is of another type or out of range, or if two contradict each other.
    """

    order: Literal["awc", "atc"] | None = None
    local_steps: int = 1
    outer: Outer | None = None
    merge_after: int | None = None
    local_steps_from: int = 0
    fragments: int = 1
    mixing: Mixing | None = None
    bucket_mb: Annotated[float, BUCKET_MB] | Literal["auto"] = "auto"
    phases: Literal["aligned", "staggered"] = "aligned"
    push_sum: bool = False
    plan: LocalSteps = field(init=False)

    def __post_init__(self) -> None:
        check_arguments(GossipOptions, vars(self))
        merge_after = self.merge_after
        if self.order == "atc" and merge_after:
            raise ValueError(
                f"merge_after={merge_after} with order=atc: adapt then combine is merge_after=0; expected order=awc"
            )
        if self.order == "awc" and merge_after == 0:
            raise ValueError("merge_after=0 with order=awc: nothing travels while workers compute; expected order=atc")
        if merge_after is None:
            merge_after = 0 if self.order == "atc" else math.ceil(max(1, self.local_steps) / 3)
        outer = self.outer or Outer()
        plan = LocalSteps(self.local_steps, merge_after, outer, self.local_steps_from, self.fragments)
        resolved = {"outer": outer, "mixing": self.mixing or Mixing(), "plan": plan}
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the options."""
        return [option.name for option in fields(cls) if option.init]

    def keywords(self) -> dict[str, Any]:
        """Return the options by name."""
        return {name: getattr(self, name) for name in self.names()}

    def check_topology(self, topology: Topology) -> None:
        """Raise ValueError where phases, local steps or weaker mixing make no sense with this topology."""
        in_phases(topology, self.phases)
        plan, power = self.plan, self.mixing.power
        chosen = f"mixing.power={power:g}"
        if not plan.every_update:
            chosen = f"local_steps={plan.steps} (outer.lr={plan.outer.lr:g}, outer.momentum={plan.outer.momentum:g})"
        elif not power:
            return
        if self.push_sum:
            raise ValueError(
                f"{chosen} with push_sum=true: expected push_sum=false: anchors and displacements would need weights "
                "of their own"
            )
        if not topology.doubly_stochastic:
            raise ValueError(
                f"{chosen} with topology {topology.name}: expected doubly stochastic matrices, or the mean drifts"
            )
        idle = topology.options.get("idle_rounds", 0)
        if idle and plan.steps > 1:
            raise ValueError(
                f"{chosen} with topology {topology.name} and idle_rounds={idle}: expected idle_rounds=0: rounds are "
                "local_steps updates apart already"
            )


def warnings_of(plan: LocalSteps, topology: Topology) -> list[str]:
    """Return warnings about outer options that diverge or nearly do, by a linear model with a static symmetric W.

    In this model inner steps reach the minimum x = 0 in every round; what is merged before the last of them remains.
    """
    outer, n = plan.outer, topology.world_size
    eta, mu = outer.lr, outer.momentum
    bound = 2 * (1 + mu) / (1 + 2 * mu) if outer.nesterov else math.inf
    if eta >= bound:
        return [f"outer.lr={eta:g} with outer.momentum={mu:g}: from {bound:.3g} on the mean of all workers diverges"]
    if n == 1 or plan.every_update:
        return []
    if outer.displacement == "mixed":
        if mu >= HIGH_MOMENTUM and topology.name != "complete":
            return [
                f"outer.momentum={mu:g} with outer.displacement=mixed diverged from {HIGH_MOMENTUM:g} on: take less "
                "(NoLoCo: 0.5)"
            ]
        return []
    if topology.period != 1 or not topology.symmetric:
        return []
    lowest = round(float(np.linalg.eigvalsh(topology.matrix(0)).min()), 12)  # -1e-17 is 0
    where = f"outer.lr={eta:g} with outer.momentum={mu:g} on topology {topology.name} (least eigenvalue {lowest:.2g})"
    if plan.merge_after == plan.steps > 1:
        bound = (1 + lowest) * (1 + mu) / (1 + 2 * mu * outer.nesterov)
        if eta > bound:
            return [f"{where} and merge_after=local_steps: above {bound:.2g} workers drift apart"]
    elif lowest < 0:
        bound = (1 - lowest) * (1 - mu) / -lowest
        if eta >= bound:
            return [f"{where}: from {bound:.2g} on workers drift apart"]
    return []
