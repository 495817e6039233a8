"""Checks of arguments that real and simulated workers share."""

from common.topology import Topology, build, push_sum


def check_order(order: str) -> None:
    """Raise ValueError unless `order` is "awc" or "atc"."""
    if order not in ("awc", "atc"):
        raise ValueError(f"order={order!r}: expected 'awc' (adapt while communicating) or 'atc' (adapt then combine)")


def check_transport(transport: str) -> None:
    """Raise ValueError unless `transport` is "auto", "send_recv" or "subgroup"."""
    if transport not in ("auto", "send_recv", "subgroup"):
        raise ValueError(f"transport={transport!r}: expected 'auto', 'send_recv' or 'subgroup'")


def check_sizes(bucket_mb: float, timeout_s: float) -> None:
    """Raise ValueError unless both are > 0."""
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb}: expected a size in MiB > 0")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s}: expected seconds > 0")


def resolve_topology(
    topology: str | Topology, workers: int, workers_per_host: int = 1, with_push_sum: bool = False
) -> Topology:
    """The topology itself, or the one of that name over `workers`; with push-sum, what it makes of it.

    Raises ValueError if it is for another number of workers, or does not keep the mean and there is no push-sum.
    """
    if isinstance(topology, str):
        topology = build(topology, workers, workers_per_host)
    if topology.world_size != workers:
        raise ValueError(f"topology {topology.name} is for {topology.world_size} workers, but there are {workers}")
    if with_push_sum:
        return push_sum(topology)
    if not topology.doubly_stochastic:
        raise ValueError(
            f"topology {topology.name}: expected doubly stochastic mixing matrices, got rows that do not sum to 1; "
            "without push_sum=True parameters would drift away"
        )
    return topology
