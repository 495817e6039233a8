"""A topology as a readable table."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from tabulate import tabulate

from common.topology import cost
from common.topology.round import Round
from common.topology.topology import Topology, contraction

RANDOM_ROWS = 8  # rounds shown of a schedule that has no period


def shown_rounds(topology: Topology, rounds: int | None = None) -> int:
    """Return how many rounds to show: `rounds`, or else one period, or else 8."""
    return rounds or topology.period or RANDOM_ROWS


def table(topology: Topology, rounds: int | None = None) -> str:
    """Return the summary and one row per round (see `shown_rounds`); bytes in units of the message size S."""
    return f"{title(topology)}\n\n{_summary(topology)}\n\n{_rounds(topology, shown_rounds(topology, rounds))}"


def title(topology: Topology) -> str:
    """Return name, options and sizes in one line."""
    options = ", ".join(f"{key}={value}" for key, value in topology.options.items())
    name = f"{topology.name} ({options})" if options else topology.name
    hosts = -(-topology.world_size // topology.workers_per_host)
    return f"{name}: {_count(topology.world_size, 'worker')} on {_count(hosts, 'host')}"


def structure(round_: Round) -> str:
    """Return in a few words who mixes with whom."""
    if round_.is_idle:
        return "idle"
    if round_.groups is not None:
        return _groups(round_.groups)
    offsets = {tuple((j - i) % round_.world_size for j in round_.in_peers(i)) for i in range(round_.world_size)}
    if len(offsets) == 1 and not round_.symmetric and len(only := offsets.pop()) == 1:
        return f"i <- i+{only[0]}"
    degrees = [len(round_.in_peers(i)) for i in range(round_.world_size)]
    if round_.symmetric and max(degrees) == 1:
        return _and_idle([_count(sum(degrees) // 2, "weighted pair")], degrees.count(0))
    kind, low, high = "graph" if round_.symmetric else "directed", min(degrees), max(degrees)
    return f"{kind}, {low if low == high else f'{low}-{high}'} peers"


def peers(round_: Round, worker: int) -> str:
    """Return whom `worker` exchanges with ("<-> 1 3-5"), or takes from and gives to ("<- 1  -> 15")."""
    taken, given = tuple(round_.in_peers(worker)), round_.out_peers(worker)
    if not taken and not given:
        return "-"
    if taken == given:
        return f"<-> {_ranges(taken)}"
    return f"<- {_ranges(taken) or '-'}  -> {_ranges(given) or '-'}"


def _summary(topology: Topology) -> str:
    gap = topology.spectral_gap()
    consensus = topology.rounds_to_consensus()
    exactly = "exact average" if gap == 1 else "to 1e-10"
    lines = [
        ("period", _count(topology.period, "round") if topology.period else "none (random)"),
        ("spectral gap", f"{gap:.6g}"),
        ("rounds to consensus", "more than 10000" if consensus is None else f"{consensus} ({exactly})"),
        ("symmetric", "yes" if topology.symmetric else "no"),
        ("doubly stochastic", "yes" if topology.doubly_stochastic else "no (needs push-sum)"),
        ("fingerprint", topology.fingerprint()[:16]),
    ]
    return tabulate(lines, tablefmt="plain", disable_numparse=True)


def _rounds(topology: Topology, count: int) -> str:
    workers = range(topology.world_size)
    size = topology.workers_per_host
    rows = []
    P = np.eye(topology.world_size)
    for t in range(count):
        round_ = topology.round(t)
        P = round_.matrix() @ P
        rows.append(
            (
                t,
                structure(round_),
                cost.transport_of(round_, size).value,
                peers(round_, 0),
                f"{max(cost.bytes_sent(round_, i, 1.0, workers_per_host=size) for i in workers):.2f}",
                f"{max(cost.bytes_leaving_hosts(round_, size, 1.0).values(), default=0.0):.2f}",
                _factor(contraction(round_.matrix())),
                _factor(contraction(P)),
            )
        )
    header = ("round", "structure", "transport", "worker 0", "S/worker", "S/host", "contraction", "so far")
    right = ("right", "left", "left", "left", "right", "right", "right", "right")
    note = (
        "S/worker, S/host: the most that any worker sends, and that leaves any host, in units of the message\n"
        "size S. contraction: ||W - J/n||, the worst factor on the consensus distance, of the round alone\n"
        "and of all rounds so far."
    )
    return f"{tabulate(rows, header, colalign=right, disable_numparse=True)}\n\n{note}"


def _factor(value: float) -> str:
    if value < 1e-12:
        return "0"  # rounding error of an exact average
    return f"{value:.4f}" if value >= 1e-4 else f"{value:.1e}"


def _groups(groups: Sequence[Sequence[int]]) -> str:
    sizes = Counter(map(len, groups))
    idle = sizes.pop(1, 0)
    if len(groups) == 1:
        return f"all {len(groups[0])}"
    parts = [
        _count(number, "pair") if size == 2 else f"{_count(number, 'group')} of {size}"
        for size, number in sorted(sizes.items(), reverse=True)
    ]
    return _and_idle(parts, idle)


def _and_idle(parts: list[str], idle: int) -> str:
    return ", ".join(parts + ([f"{idle} idle"] if idle else []))


def _ranges(workers: Sequence[int]) -> str:
    """Return sorted workers with runs of three or more shortened: "1 3-5"."""
    runs: list[list[int]] = []
    for worker in workers:
        if runs and worker == runs[-1][-1] + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
