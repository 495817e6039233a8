"""A static graph read from an edge-list file."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.arguments import check_arguments, did_you_mean, flag
from common.topology.round import TOLERANCE, Round

WEIGHTS = ("metropolis", "explicit", "push_sum")


def edge_list(n: int, *, path: str | os.PathLike, directed: bool, weights: str) -> tuple[Round, ...]:
    """Return the static graph in the text file `path`, which has one edge `i j` or `i j weight` per line.

    Workers are numbered from 0; `#` starts a comment. Undirected edges go both ways; with directed=True, `i j`
    means that i gives to j. The weight W_ji with which j takes from i depends on `weights`:

    - "metropolis": 1 / (1 + max(degree(i), degree(j))), doubly stochastic; undirected graphs only.
    - "explicit": the weight on the line. Each worker keeps the remainder up to 1, and W must be doubly stochastic.
    - "push_sum": 1 / (1 + out-degree(i)), column-stochastic; every worker gives equal shares.

    Raises ValueError, with the line number if there is one, for lines that cannot be read, workers out of range,
    self-loops, repeated edges, missing or useless weights, weights that do not sum to 1, and graphs in which some
    worker cannot reach every other.
    """
    _check_options(directed, weights)
    check_arguments(edge_list, locals(), prefix="topology 'file': ")
    where = f"topology 'file': {os.fspath(path)}"
    edges = _read(path, n, directed, explicit=weights == "explicit", where=where)
    adjacency = np.zeros((n, n), dtype=bool)  # adjacency[i, j]: j takes from i
    for edge in edges:
        adjacency[edge.source, edge.target] = True
    _check_connected(adjacency, directed, where)
    out_degree = adjacency.sum(axis=1)
    W = np.zeros((n, n))
    for edge in edges:
        i, j = edge.source, edge.target
        if weights == "explicit":
            W[j, i] = edge.weight
        elif weights == "metropolis":
            W[j, i] = 1 / (1 + max(out_degree[i], out_degree[j]))
        else:
            W[j, i] = 1 / (1 + out_degree[i])
    np.fill_diagonal(W, 1 - W.sum(axis=0 if weights == "push_sum" else 1))
    if weights == "explicit":
        _check_explicit(W, where)
    return (Round.from_matrix(W),)


@dataclass(frozen=True)
class _Edge:
    source: int
    target: int
    weight: float | None
    line: int


def _check_options(directed: bool, weights: str) -> None:
    flag("topology 'file': directed", directed)
    if weights not in WEIGHTS:
        hint = did_you_mean(weights, WEIGHTS)
        raise ValueError(f"topology 'file': weights: expected one of {', '.join(WEIGHTS)}, got {weights!r}{hint}")
    if directed and weights == "metropolis":
        raise ValueError(
            "topology 'file': weights: expected 'push_sum' or 'explicit' for a directed graph, "
            "got 'metropolis', which would not keep the mean"
        )


def _read(path: str | os.PathLike, n: int, directed: bool, explicit: bool, where: str) -> list[_Edge]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(f"{where}: expected a readable edge list, got: {reason}") from error
    edges: dict[tuple[int, int], _Edge] = {}
    for number, line in enumerate(lines, start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        edge = _parse(fields, number, n, explicit, f"{where}:{number}")
        both = [edge] if directed else [edge, _Edge(edge.target, edge.source, edge.weight, number)]
        for one in both:
            first = edges.setdefault((one.source, one.target), one)
            if first.line != number:
                raise ValueError(
                    f"{where}:{number}: edge {edge.source} {edge.target}: expected each edge once, "
                    f"got it on line {first.line} too{'' if directed else ' (edges go both ways)'}"
                )
    return list(edges.values())


def _parse(fields: list[str], number: int, n: int, explicit: bool, where: str) -> _Edge:
    line = " ".join(fields)
    try:
        source, target = int(fields[0]), int(fields[1])
        weight = float(fields[2]) if len(fields) > 2 else None
        if len(fields) > 3:
            raise ValueError
    except (ValueError, IndexError):
        raise ValueError(f"{where}: expected 'i j' or 'i j weight', got {line!r}") from None
    for worker in (source, target):
        if not 0 <= worker < n:
            raise ValueError(f"{where}: expected workers 0..{n - 1} (world_size={n}), got {worker}")
    if source == target:
        raise ValueError(f"{where}: expected two different workers, got {line!r}; own weights follow from the rest")
    if explicit and (weight is None or not 0 < weight <= 1):
        raise ValueError(f"{where}: expected 'i j weight' with 0 < weight <= 1, got {line!r}")
    if weight is not None and not explicit:
        raise ValueError(f"{where}: expected no weight unless weights='explicit', got {line!r}")
    return _Edge(source, target, weight, number)


def _check_connected(adjacency: np.ndarray, directed: bool, where: str) -> None:
    for edges, relation in ((adjacency, "reached from"), (adjacency.T, "on a path to")):
        reached = frontier = np.arange(len(edges)) == 0
        while frontier.any():
            frontier = edges[frontier].any(axis=0) & ~reached
            reached = reached | frontier
        if not reached.all():
            kind = "a strongly connected graph" if directed else "a connected graph"
            missing = ", ".join(map(str, np.flatnonzero(~reached)))
            raise ValueError(f"{where}: expected {kind}, got workers that are not {relation} worker 0: {missing}")


def _check_explicit(W: np.ndarray, where: str) -> None:
    for i in range(len(W)):
        if W[i, i] < -TOLERANCE:
            raise ValueError(f"{where}: weights that worker {i} takes: expected a sum <= 1, got {1 - W[i, i]:.12g}")
        if abs(W[i, i]) <= TOLERANCE:
            W[i, i] = 0.0
    for j, total in enumerate(W.sum(axis=0)):
        if abs(total - 1) > TOLERANCE:
            raise ValueError(
                f"{where}: weights that worker {j} gives, and keeps: expected a sum of 1 (doubly stochastic), "
                f"got {total:.12g}; or use weights='push_sum'"
            )
