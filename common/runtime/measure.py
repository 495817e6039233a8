"""Measurement of the cluster that a process group runs on: links, latencies, variation of computing.

Every rank calls `measure`, which takes less than a minute. It does not measure a step of your model: give its time as
`compute_ms`, or its operations as `tflop`, which are divided by the rate of matrix products on this device (few models
reach it). The variation is that of equal matrix products on all ranks at once; it includes the noise of the machines,
but not that of batches of different length.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.launcher import from_launcher
from common.parallel.collectives import gather_objects

REPETITIONS = 8  # of a message; the median counts
SAMPLES, SAMPLE_S = 30, 0.05  # number of computations that are timed, and their approximate duration
SLOW, SLOW_LINK = 1.15, 1.25  # hosts and links slower than the median one by more than this factor are named


@dataclass(frozen=True)
class Measured:
    """The results; the same on all ranks.

    backend, device:   what sent the messages and what computed
    hosts:             names, in the order of ranks
    ranks_per_host:    rank i runs on host i // ranks_per_host
    inter_gbps:        lower bound of what each host can send and receive at the same time, [hosts]; empty for one host
    intra_gbps:        what a rank sends to the next one of its host while all do so; None for one rank per host
    latency_us:        half of a round trip between hosts; None for one host
    intra_latency_us:  half of a round trip inside a host; None for one rank per host
    tflop_per_s:       rate of fp32 matrix products on one rank while all compute
    jitter:            standard deviation of the logarithm of the time of equal computations
    slow_hosts:        {host: factor}: computes slower than the median host by this factor
    """

    backend: str
    device: str
    hosts: tuple[str, ...]
    ranks_per_host: int
    inter_gbps: tuple[float, ...]
    intra_gbps: float | None
    latency_us: float | None
    intra_latency_us: float | None
    tflop_per_s: float
    jitter: float
    slow_hosts: dict[int, float]

    @property
    def slow_links(self) -> dict[int, float]:
        """{host: factor}: its link is slower than the median one by this factor."""
        factors = np.median(self.inter_gbps) / np.array(self.inter_gbps) if self.inter_gbps else ()
        return {host: float(factor) for host, factor in enumerate(factors) if factor > SLOW_LINK}

    def numbers(self, tflop: float | None = None) -> dict[str, object]:
        """Return the results under the names of Cluster's fields; a worker is one rank.

        tflop: operations of one worker's forward and backward pass, from which compute_ms follows
        """
        found = {
            "hosts": len(self.hosts),
            "workers_per_host": self.ranks_per_host,
            "inter_gbps": float(np.median(self.inter_gbps)) if self.inter_gbps else None,
            "intra_gbps": self.intra_gbps,
            "latency_us": self.latency_us,
            "intra_latency_us": self.intra_latency_us,
            "jitter": self.jitter,
            "slow_hosts": self.slow_hosts,
            "slow_links": self.slow_links,
            "compute_ms": None if tflop is None else 1000 * tflop / self.tflop_per_s,
        }
        return {name: value for name, value in found.items() if value is not None}

    def lines(self) -> list[str]:
        """Return the results as lines of text."""

        def shown(value: float | None, unit: str) -> str:
            return "-" if value is None else f"{value:.3g} {unit}"

        links = ", ".join(f"{rate:.3g}" for rate in self.inter_gbps) or "-"

        def named(factors: dict[int, float]) -> str:
            return ", ".join(f"{self.hosts[host]} {factor:.2f} times" for host, factor in factors.items()) or "none"

        return [
            f"Measured on {len(self.hosts)} hosts of {self.ranks_per_host} ranks, {self.backend}, {self.device}:",
            f"- between hosts: {links} Gbit/s for each host, latency {shown(self.latency_us, 'us')}",
            f"- inside: {shown(self.intra_gbps, 'Gbit/s')} for each rank, latency {shown(self.intra_latency_us, 'us')}",
            f"- matrix products: {self.tflop_per_s:.3g} Tflop/s for each rank, jitter {self.jitter:.3g}",
            f"- slower hosts: {named(self.slow_hosts)}; slower links: {named(self.slow_links)}",
        ]


def measure(device: torch.device, message_mb: float = 25.0, *, sample_s: float = SAMPLE_S) -> Measured:
    """Measure the hosts of the default process group, with messages of `message_mb`; every rank calls it.

    Raises ValueError unless every host has the same number of consecutive ranks.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    names, L = layout()
    hosts = names[::L]
    H = len(hosts)
    timer = _Timer(device, message_mb)
    inside = across = inside_latency = across_latency = None
    if L > 1:
        local, first = rank % L, rank - rank % L
        inside = timer.rate(first + (local + 1) % L, first + (local - 1) % L)
        inside_latency = timer.latency(first + (local ^ 1) if local ^ 1 < L else None)
    if H > 1:
        across = timer.rate((rank + L) % n, (rank - L) % n)
        host = rank // L
        across_latency = timer.latency((host ^ 1) * L if rank % L == 0 and host ^ 1 < H else None)
    seconds, tflop = _compute(device, sample_s)
    links = gather_objects(across)
    return Measured(
        backend=dist.get_backend(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        hosts=tuple(hosts),
        ranks_per_host=L,
        inter_gbps=_links([sum(links[h * L : (h + 1) * L]) for h in range(H)]) if H > 1 else (),
        intra_gbps=_slowest(inside),
        latency_us=_median(across_latency),
        intra_latency_us=_median(inside_latency),
        tflop_per_s=float(np.median(gather_objects(tflop / np.median(seconds)))),
        **_variation(np.array(gather_objects(seconds)), L),
    )


def layout() -> tuple[list[str], int]:
    """Return (every rank's host, number of ranks on each), from the launcher's LOCAL_WORLD_SIZE or the hosts' names.

    Raises ValueError unless every host has the same number of consecutive ranks.
    """
    # Emulated hosts share their name: the launcher's group tells them apart.
    name = socket.gethostname() + (f"#{os.environ['GROUP_RANK']}" if "GROUP_RANK" in os.environ else "")
    names = gather_objects(name)
    L = from_launcher("LOCAL_WORLD_SIZE") or names.count(name)
    blocks = [names[start : start + L] for start in range(0, len(names), L)]
    if any(set(block) != {block[0]} or len(block) != L for block in blocks) or len({b[0] for b in blocks}) < len(
        blocks
    ):
        raise ValueError(f"ranks on hosts {', '.join(names)}: expected equally many on each, one host after another")
    return names, L


class _Timer:
    """A clock for messages; every rank calls the same methods."""

    def __init__(self, device: torch.device, message_mb: float) -> None:
        self._device, self._message_mb = device, message_mb
        self._sent = torch.zeros(max(1, round(message_mb * 1e6 / 4)), device=device)
        self._received = torch.empty_like(self._sent)

    def rate(self, target: int, source: int) -> float:
        """Return the Gbit/s at which this rank sends to `target` and receives from `source` while all ranks do so."""
        seconds = self._repeat(lambda: self._exchange(self._sent, target, self._received, source))
        return 8 * self._sent.nbytes / 1e9 / seconds

    def latency(self, partner: int | None) -> float | None:
        """Return half of the round trip of a tiny message in us; None for a rank without partner, which only waits."""
        tiny, back = self._sent[:1], self._received[:1]

        def round_trip() -> None:
            if partner is None:
                return
            rank = dist.get_rank()
            calls = (dist.send, dist.recv) if rank < partner else (dist.recv, dist.send)
            for call in calls:
                call(tiny if call is dist.send else back, partner)

        seconds = self._repeat(round_trip, 3 * REPETITIONS)
        return None if partner is None else 1e6 * seconds / 2

    def _exchange(self, sent: Tensor, target: int, received: Tensor, source: int) -> None:
        ops = [dist.P2POp(dist.irecv, received, source), dist.P2POp(dist.isend, sent, target)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def _repeat(self, call: Callable[[], None], repetitions: int = REPETITIONS) -> float:
        """Return the median seconds of a call, after a first one that opens connections."""
        seconds = []
        for _ in range(repetitions + 1):
            dist.barrier()
            begin = time.perf_counter()
            call()
            _finish(self._device)
            seconds.append(time.perf_counter() - begin)
        return float(np.median(seconds[1:]))


def _compute(device: torch.device, sample_s: float) -> tuple[list[float], float]:
    """Return the seconds of SAMPLES equal computations, one after another, and the Tflop of each."""
    size = 4096 if device.type == "cuda" else 256
    matrix = torch.ones(size, size, device=device)
    flop = 2 * size**3

    def run(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            torch.mm(matrix, matrix)
        _finish(device)
        return time.perf_counter() - begin

    run(3)
    count = max(gather_objects(max(1, round(sample_s / (run(10) / 10)))))  # the same on all ranks
    return [run(count) for _ in range(SAMPLES)], count * flop / 1e12


def _links(exchanged: Sequence[float]) -> tuple[float, ...]:
    """Return a lower bound of the rate of each host's link, [hosts].

    exchanged: [hosts], the rate at which each host sent to the next one while it received from the previous one

    A slow link also slows the exchanges of the hosts before and after it. But a link is at least as fast as the fastest
    exchange that used it: the host's own and those of its neighbours. With two or three hosts a slow one takes part in
    every exchange, so all of them count as slow.
    """
    H = len(exchanged)
    return tuple(max(exchanged[h - 1], exchanged[h], exchanged[(h + 1) % H]) for h in range(H))


def _variation(seconds: np.ndarray, L: int) -> dict:
    """Return jitter and slow_hosts, from seconds [ranks, samples] on hosts of L ranks."""
    of_rank = np.median(seconds, axis=1)
    of_host = of_rank.reshape(-1, L).mean(axis=1)
    factors = of_host / np.median(of_host)
    jitter = float(np.log(seconds / of_rank[:, None]).std())
    return {"jitter": jitter, "slow_hosts": {h: float(f) for h, f in enumerate(factors) if f > SLOW}}


def _slowest(value: float | None) -> float | None:
    return min((v for v in gather_objects(value) if v is not None), default=None)


def _median(value: float | None) -> float | None:
    found = [v for v in gather_objects(value) if v is not None]
    return float(np.median(found)) if found else None


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
