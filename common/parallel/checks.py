"""Checks of arguments, shared by real and simulated workers, and of what all ranks must agree on."""

import gc
import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from common.arguments import did_you_mean
from common.dtensors import is_dtensor
from common.options import GossipOptions, warnings_of
from common.parallel.data_parallel import OPEN, DataParallel
from common.rank_environment import from_launcher
from common.topology import Topology, build, knows_hosts, push_sum


def check_message_dtype(dtype: torch.dtype | None, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError unless trained parameters survive a message of that dtype: floating point, or int8."""
    if dtype is None:
        return
    if not (dtype.is_floating_point or dtype == torch.int8):
        raise ValueError(
            f"message_dtype={dtype}: expected a floating point dtype such as torch.bfloat16, torch.int8 or None: "
            "others would truncate the values"
        )
    refuse_complex(f"message_dtype={dtype}", parameters)


def refuse_complex(rounding: str, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if trained parameters are complex; rounding: the argument that would round what is sent."""
    if any(parameter.is_complex() and parameter.requires_grad for parameter in parameters):
        raise ValueError(f"{rounding} with complex parameters: expected None: it would drop imaginary parts")


def check_module(module: nn.Module) -> None:
    """Raise ValueError naming a part that is another wrapper or has no values yet (lazy, or on the meta device)."""
    for name, part in module.named_modules():
        if isinstance(part, DataParallel | DistributedDataParallel | nn.DataParallel):
            where = f"submodule '{name}'" if name else "the module itself"
            raise ValueError(
                f"module: {where} is a {type(part).__name__}; expected the module inside it (.module): two wrappers "
                "would both average, and change the names of its parameters"
            )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"module: '{name}' has no shape yet; expected a forward of the lazy module before wrapping it"
            )
        if tensor.is_meta and not is_dtensor(tensor):
            raise ValueError(
                f"module: '{name}' is on the meta device; expected values in memory: call .to_empty(device=...) and "
                "initialise them before wrapping it"
            )


def check_unwrapped(module: nn.Module) -> torch.device:
    """Return the device of the trained parameters of a module that is about to be wrapped.

    Raises ValueError as `check_module`, `check_ownership` and `check_device` do.
    """
    check_module(module)
    check_ownership(module)
    return check_device(p for p in module.parameters() if p.requires_grad)


def check_ownership(module: nn.Module) -> None:
    """Raise ValueError naming a trained parameter that another wrapper holds: it would leave its flat vector."""
    trained = {p: name for name, p in module.named_parameters() if p.requires_grad}
    if any(wrapper.holds_any(trained) for wrapper in OPEN):
        gc.collect()  # a wrapper no longer in use may never have been closed
    for wrapper in OPEN:
        for parameter, name in trained.items():
            if wrapper.holds_any([parameter]):
                raise ValueError(
                    f"module: another {type(wrapper).__name__} holds parameter '{name}'; expected each parameter in "
                    "one wrapper: wrap one module that holds all parts, or call close() on the other wrapper first"
                )


def check_device(parameters: Iterable[Tensor]) -> torch.device:
    """Return the device of the parameters, the CPU if there are none.

    Raises ValueError for several devices, and for a GPU that is not the process's current device, to which messages
    and streams belong.
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


def refuse_unknown(taker: Callable[..., Any], options: Iterable[str]) -> None:
    """Raise TypeError for the first option that GossipOptions does not know; taker: the class or function called.

    The message suggests the most similar of all its keyword arguments.
    """
    names = GossipOptions.names()
    for name in options:
        if name not in names:
            hint = "; workers are all ranks of the default group, never a part of them" * (name == "process_group")
            near = did_you_mean(name, [*inspect.signature(taker).parameters, *names])
            raise TypeError(f"{taker.__name__}: unexpected keyword argument {name!r}{hint or near}")


def workers_of_host(given: int | None, topology: str | Topology, ranks_per_worker: int, rank: int) -> int:
    """Return how many workers share a host: 1 unless given.

    Warns on rank 0 if that differs from what the launcher announces and the named topology knows hosts.
    """
    if given is not None:
        return given
    announced = (from_launcher("LOCAL_WORLD_SIZE") or 1) // ranks_per_worker
    if rank == 0 and announced > 1 and isinstance(topology, str) and knows_hosts(topology):
        warnings.warn(
            f"workers_per_host is not given: topology {topology} takes every worker for a host, but the launcher "
            f"started {announced} workers on this one; pass workers_per_host={announced}, or 1 if it is meant",
            stacklevel=3,
        )
    return 1


def resolve_topology(
    topology: str | Topology, options: GossipOptions, workers: int, workers_per_host: int = 1, warns: bool = False
) -> Topology:
    """Return the topology, built over `workers` if it is a name; with push-sum, the push-sum version of it.

    warns: whether to warn about options that diverge on it, or nearly do

    Raises ValueError if it is for another number of workers, does not fit the options, or does not keep the
    mean without push-sum, which is off.
    """
    if isinstance(topology, str):
        topology = build(topology, workers, workers_per_host)
    if topology.world_size != workers:
        raise ValueError(f"topology {topology.name} is for {topology.world_size} workers, but there are {workers}")
    options.check_topology(topology)
    if options.push_sum:
        topology = push_sum(topology)
    elif not topology.doubly_stochastic:
        raise ValueError(
            f"topology {topology.name}: expected doubly stochastic mixing matrices, got rows that do not sum to 1; "
            "without push_sum=True parameters would drift away"
        )
    for sentence in warnings_of(options.plan, topology) if warns else ():
        warnings.warn(sentence, stacklevel=3)
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
