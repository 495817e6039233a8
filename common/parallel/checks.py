"""Checks at the door: of arguments, which real and simulated workers share, and of what all ranks must agree about."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.spelling import did_you_mean
from common.topology import Topology, build, push_sum


def check_order(order: str | None) -> None:
    """Raise ValueError unless `order` is "awc" or "atc", or left open."""
    if order not in (None, "awc", "atc"):
        raise ValueError(f"order={order!r}: expected 'awc' (adapt while communicating) or 'atc' (adapt then combine)")


def check_transport(transport: str) -> None:
    """Raise ValueError unless `transport` is "auto", "send_recv" or "subgroup"."""
    if transport not in ("auto", "send_recv", "subgroup"):
        raise ValueError(f"transport={transport!r}: expected 'auto', 'send_recv' or 'subgroup'")


def check_sizes(bucket_mb: float | str, timeout_s: float) -> None:
    """Raise ValueError unless both are > 0; a bucket's size may be "auto"."""
    if bucket_mb != "auto" and (isinstance(bucket_mb, str) or not bucket_mb > 0):
        raise ValueError(f"bucket_mb={bucket_mb!r}: expected a size in MiB > 0, or 'auto'")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s}: expected seconds > 0")


def check_device(parameters: Iterable[Tensor]) -> torch.device:
    """Return the device of the parameters, the CPU if there are none.

    Raises ValueError unless it is one device and, if it is a GPU, the process's current one: messages and streams
    belong to that.
    """
    devices = list(dict.fromkeys(parameter.device for parameter in parameters)) or [torch.device("cpu")]
    if len(devices) > 1:
        raise ValueError(f"module on devices {[str(device) for device in devices]}: expected all parameters on one")
    (device,) = devices
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"module on {device}, but the current device of this process is cuda:{torch.cuda.current_device()}: call "
            f"torch.cuda.set_device({device.index}) before wrapping it (a rank's device is usually its LOCAL_RANK)"
        )
    return device


def refuse_unknown(where: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for keyword arguments that do not exist, with the nearest one that does."""
    for name in unknown:
        raise TypeError(f"{where}: unexpected keyword argument {name!r}{did_you_mean(name, known)}")


def resolve_topology(
    topology: str | Topology, workers: int, workers_per_host: int = 1, with_push_sum: bool = False
) -> Topology:
    """Return the topology itself, or the one of that name over `workers`; with push-sum, what that makes of it.

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


def check_equal_on_all_ranks(
    facts: dict[str, Any], group: dist.ProcessGroup | None, module: nn.Module | None = None
) -> None:
    """Raise RuntimeError on every rank if any rank's facts or module differ from rank 0's. Collective.

    facts:  small picklable values (the topology's fingerprint, options)
    group:  the ranks to compare; None: a single process, nothing to do
    module: compared by its parameters' and buffers' names, shapes, strides and dtypes
    """
    if group is None:
        return
    tensors = describe_tensors(module) if module is not None else []
    mine = facts | {"tensors": hashlib.sha256("\n".join(tensors).encode()).hexdigest()}
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    for key, expected in everyone[0].items():
        different = [rank for rank, theirs in enumerate(everyone) if theirs.get(key) != expected]
        if not different:
            continue
        if key == "tensors":
            key, expected, got = _first_difference(tensors, different[0], group)
        else:
            got = everyone[different[0]].get(key)
        raise RuntimeError(
            f"ranks {different} disagree with rank 0 about {key}: rank 0 has {expected!r}, "
            f"rank {different[0]} has {got!r}. All ranks must build the same model with the same options."
        )


def describe_tensors(module: nn.Module) -> list[str]:
    """Return one line for each parameter and buffer: name, shape, strides, dtype, and whether it is trained."""
    parameters = [(name, p, "trained" if p.requires_grad else "frozen") for name, p in module.named_parameters()]
    buffers = [(name, b, "buffer") for name, b in module.named_buffers()]
    return [
        f"{name} {tuple(tensor.shape)} strides {tensor.stride()} {tensor.dtype} {kind}"
        for name, tensor, kind in parameters + buffers
    ]


def _first_difference(mine: list[str], other: int, group: dist.ProcessGroup) -> tuple[str, str, str]:
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    first, second = everyone[0], everyone[other]
    for ours, theirs in zip(first, second, strict=False):
        if ours != theirs:
            return "a parameter or buffer", ours, theirs
    return "the number of parameters and buffers", str(len(first)), str(len(second))
