"""One engine on emulated hosts: the program that scripts.benchmarks.parallel runs there.

torchrun ... -m scripts.benchmarks.parallel_engines engine=... result=FILE ...

It times steps of a model on every rank; rank 0 writes what all of them measured.
"""

# ruff: noqa: E402
import time

BEGAN = time.time()  # before the other imports: they are nearly all of a start

import contextlib
import json
import os
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from common.cli import Arguments, Text, main_function, parse
from common.runtime.conditions import CONDITIONS, Condition
from scripts.benchmarks.host_interface import bytes_sent_by_host
from scripts.emulate.compute import EmulatedCompute

MODULE = "scripts.benchmarks.parallel_engines"
LR = 1e-4
TIMEOUT_S = 120.0
WARM_UP = 6  # steps before the timed ones
SEED = 0  # of uneven compute times
ONCE = ("peak_mb", "startup_s", "first_step_s", "ready_s")  # of each process


class EngineArguments(Arguments):
    """Command line of scripts.benchmarks.parallel_engines."""

    engine: Text = Field(description="alone, ddp, decent_dp, ours or ours_torch")
    topology: Text = Field("complete", description="as the engine names it")
    model: Text = Field("gpt_5m", description="gpt_5m, gpt_30m or digits_resnet")
    compute_ms: Text = Field("400", pattern=r"^[\d.]+(,[\d.]+)*$", description="of a step, emulated; 0: real ones")
    condition: Literal[tuple(CONDITIONS)] = Field("even", description="how unevenly ranks compute, if that is emulated")
    bucket_mb: PositiveFloat = Field(2, description="of messages, in MiB")
    steps: PositiveInt = Field(12, description="of a round")
    rounds: PositiveInt = Field(2, description="that are timed, after one that is not")
    result: Text = Field(description="JSON file that rank 0 writes")


class Workload(NamedTuple):
    """A model to train: loss(model) runs the forward pass, whatever engine wraps it."""

    module: nn.Module
    loss: Callable[[nn.Module], Tensor]


class Engine(NamedTuple):
    """An engine around a model.

    model:    what the loss is taken of
    update:   what follows backward
    close:    what ends it
    waited_s: seconds that this rank waited for messages so far, where the engine counts them
    """

    model: nn.Module
    update: Callable[[], None]
    close: Callable[[], None] = lambda: None
    waited_s: Callable[[], float | None] = lambda: None


# -- models


def gpt(layers: int, heads: int, width: int, vocabulary: int) -> Workload:
    """Return a GPT that sees 2 windows of 128 tokens."""
    from gpt2.model import GPT2, Shape

    module = GPT2(Shape(layers, heads, width, vocabulary, context=128, bias=False, dropout=0.0))
    tokens = torch.randint(vocabulary, (2, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    return Workload(module, lambda model: model(tokens[:, :-1], tokens[:, 1:]))


def digits_resnet() -> Workload:
    """Return the small ResNet of the digits recipes, with 32 images."""
    from cnn.model import SmallResNet

    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(32, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (32,), generator=generator)
    return Workload(SmallResNet(1, 10, 32), lambda model: nn.functional.cross_entropy(model(images), labels))


MODELS: dict[str, Callable[[], Workload]] = {
    "gpt_5m": lambda: gpt(layers=4, heads=4, width=256, vocabulary=12_288),
    "gpt_30m": lambda: gpt(layers=8, heads=8, width=512, vocabulary=8_192),
    "digits_resnet": digits_resnet,
}

# -- engines


def adamw(module: nn.Module) -> Callable[[], None]:
    """Return the step of torch.optim.AdamW; it clears the gradients."""
    return stepping(torch.optim.AdamW(module.parameters(), lr=LR))


def stepping(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the optimizer's step; it clears the gradients."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def fused_adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return this project's AdamW: accumulated AdamW with windows of one step."""
    from common.optim import AccumAdamW

    return AccumAdamW(module.parameters(), lr=LR, accumulation_steps=1, fused=True)


def alone(module: nn.Module, arguments: EngineArguments) -> Engine:
    """Return an engine without communication. topology: which AdamW, "torch" or "fused"."""
    optimizer = {"torch": adamw, "fused": lambda m: stepping(fused_adamw(m))}[arguments.topology]
    return Engine(module, optimizer(module))


def ddp(module: nn.Module, arguments: EngineArguments) -> Engine:
    """Return PyTorch's all-reduce of gradients."""
    model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=arguments.bucket_mb)
    return Engine(model, adamw(module))


def decent_dp(module: nn.Module, arguments: EngineArguments) -> Engine:
    """Return decent-dp, which steps its optimizers in the hooks of backward."""
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    model = DecentralizedDataParallel(
        module,
        optim_fn=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=LR),
        topology=arguments.topology,
        bucket_size_in_mb=arguments.bucket_mb,
    )
    return Engine(model, lambda: None)


def ours(
    module: nn.Module,
    arguments: EngineArguments,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = fused_adamw,
) -> Engine:
    """Return this project's gossip. topology: a name with /between_hosts, /staggered, or /H/TAU for local steps."""
    from common.parallel import DecentralizedDataParallel, Outer
    from common.topology import build

    name, *options = arguments.topology.split("/")
    topology = build(
        name, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]), between_hosts="between_hosts" in options
    )
    numbers = [int(option) for option in options if option.isdecimal()]
    local = dict(zip(("local_steps", "merge_after"), numbers, strict=False))
    if local:
        local["outer"] = Outer(lr=0.4, momentum=0.9)
    model = DecentralizedDataParallel(
        module,
        topology,
        bucket_mb=arguments.bucket_mb,
        phases="staggered" if "staggered" in options else "aligned",
        timeout_s=TIMEOUT_S,
        **local,
    )
    update = stepping(model.attach(optimizer_of(module)))
    return Engine(model, update, model.close, lambda: model.counters.exposed_s)


ENGINES: dict[str, Callable[[nn.Module, EngineArguments], Engine]] = {
    "alone": alone,
    "ddp": ddp,
    "decent_dp": decent_dp,
    "ours": ours,
    "ours_local": ours,
    "ours_torch": partial(ours, optimizer_of=lambda module: torch.optim.AdamW(module.parameters(), lr=LR)),
}

# -- measuring


@main_function
def main(argv: Sequence[str]) -> int:
    """Measure one engine."""
    arguments = parse(EngineArguments, argv, MODULE, "Time one engine.")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    results = []
    for index, compute_ms in enumerate(map(float, arguments.compute_ms.split(","))):
        measured = measure(arguments, compute_ms)
        measured["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        if index > 0:  # a process starts once, and its peak never falls
            measured |= dict.fromkeys(ONCE)
        everywhere: list[dict] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, measured)
        results.append(summary(everywhere) | {"compute_ms": compute_ms})
    if dist.get_rank() == 0:
        Path(arguments.result).write_text(json.dumps(results, indent=1))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(arguments: EngineArguments, compute_ms: float) -> dict[str, object]:
    """Return what this rank measures: seconds of a step in each round and of the start, bytes of its host in a step."""
    torch.manual_seed(0)
    module, loss = MODELS[arguments.model]()
    payload = sum(p.numel() * p.element_size() for p in module.parameters())
    if compute_ms:
        # The engine sees the module's parameters under the emulation, as it would see them in the module.
        module, loss = emulated(module, compute_ms, CONDITIONS[arguments.condition]), lambda model: model()
    engine = ENGINES[arguments.engine](module, arguments)

    def steps(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            loss(engine.model).backward()
            engine.update()
        return (time.perf_counter() - begin) / count

    started = time.time() - BEGAN
    dist.barrier()
    first = steps(1)
    dist.barrier()
    steps(WARM_UP - 1)
    dist.barrier()
    warm = time.time() - BEGAN
    before, waited = bytes_sent_by_host() or 0, engine.waited_s()
    rounds = [steps(arguments.steps) for _ in range(arguments.rounds)]
    if waited is not None:
        waited = (engine.waited_s() - waited) / (arguments.steps * arguments.rounds)
    dist.barrier()  # only now has everybody sent all that it had to send
    sent = ((bytes_sent_by_host() or 0) - before) / (arguments.steps * arguments.rounds)
    with contextlib.suppress(RuntimeError):
        engine.close()
    once = {"startup_s": started, "first_step_s": first, "ready_s": warm - WARM_UP * statistics.median(rounds)}
    return {"rounds": rounds, "sent": sent, "waited": waited, "payload_mb": payload / 1e6} | once


def emulated(module: nn.Module, compute_ms: float, condition: Condition) -> EmulatedCompute:
    """Return the module with this rank's waits in place of its computing; the first host is the slow one."""
    return EmulatedCompute(
        module,
        compute_ms,
        condition=condition,
        factor=condition.slow_host if int(os.environ["GROUP_RANK"]) == 0 else 1.0,
        seed=(SEED, dist.get_rank()),
    )


def summary(everywhere: Sequence[dict]) -> dict[str, object]:
    """Return one row from what all ranks measured."""
    steps = [
        statistics.mean(rank["rounds"][index] for rank in everywhere) for index in range(len(everywhere[0]["rounds"]))
    ]
    waited = [rank["waited"] for rank in everywhere]
    return {
        "step_ms": 1000 * statistics.median(steps),
        "step_ms_spread": 1000 * (max(steps) - min(steps)),
        "waited_ms": None if None in waited else 1000 * statistics.mean(waited),
        "bytes_per_host": max(rank["sent"] for rank in everywhere),
        **{name: max((r[name] for r in everywhere if r[name] is not None), default=None) for name in ONCE},
        "payload_mb": everywhere[0]["payload_mb"],
    }


if __name__ == "__main__":
    sys.exit(main())
