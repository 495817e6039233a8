"""How far an optimizer's moments reach back, in samples, and how much weights decay over a run.

A beta means a different memory for every batch size and method. A half-life, the number of samples after which a
gradient weighs half as much, means the same for all of them.
"""

import json
import math
from collections.abc import Callable, Sequence

from common.config.config import Config, ConfigError

# The values of momentum and betas that are null: (first moment, second moment).
ADAM = {"betas": (0.9, 0.999)}
SGD = {"momentum": (0.9,)}
DEFAULTS = {"sgd": SGD, "dmsgd": SGD, "qg_dmsgd": {}, "muon": {"momentum": (0.95,), **ADAM}}


def moment_batch(config: Config) -> float:
    """Return the samples in one update of the moments; the configured number if batches differ in size.

    Under all-reduce, which averages gradients, it is the global batch; else a worker's, over all its ranks and
    accumulated gradients, also in local steps. AccumAdam renews its moments every s updates, with their mean gradient.
    """
    optimizer, parallel = config.optimizer, config.parallel
    window = optimizer.accumulation_steps if optimizer.name in ("accumadam", "accumadamw") else 1
    workers = 1 if parallel.method == "allreduce" else config.n
    return window * config.training.batch_size * config.sample_size / workers


def with_betas(config: Config) -> Config:
    """Return the configuration with a momentum and betas in place of half-lives and nulls.

    They stay when workers leave or join. Raises ConfigError if both a beta and its half-life are given, or for a
    half-life that the optimizer does not have.
    """
    optimizer, batch = config.optimizer, moment_batch(config)
    half_lives = dict(optimizer.half_life)
    found = {"half_life": type(optimizer.half_life)()}
    for key, defaults in DEFAULTS.get(optimizer.name, ADAM).items():
        given = getattr(optimizer, key)
        betas = given if isinstance(given, tuple) else (given,) * len(defaults)
        moments = list(zip(half_lives.items(), betas, defaults, strict=False))
        for (name, half_life), beta, _ in moments:
            if half_life and beta is not None:
                left = [None if other else own for (_, other), own, _ in moments]
                raise ConfigError(
                    f"optimizer.{key}={_typed(betas)} with optimizer.half_life.{name}={half_life:g}: expected one of "
                    f"the two; optimizer.{key}={_typed(left)} leaves it to the half-life"
                )
        values = [0.5 ** (batch / h) if h else default if beta is None else beta for (_, h), beta, default in moments]
        found[key] = tuple(values) if key == "betas" else values[0]
    moments = max(map(len, DEFAULTS.get(optimizer.name, ADAM).values()), default=0)
    for name, half_life in list(half_lives.items())[moments:]:
        if half_life:
            raise ConfigError(
                f"optimizer.half_life.{name}={half_life:g} with optimizer={optimizer.name}: expected null, this "
                "optimizer has no such half-life"
            )
    return config.model_copy(update={"optimizer": optimizer.model_copy(update=found)})


def _typed(values: Sequence[float | None]) -> str:
    return json.dumps(values if len(values) > 1 else values[0], separators=(",", ":"))


def half_lives(config: Config) -> dict[str, float | None]:
    """Return the half-lives of both moments in samples; None without that moment. Muon's first is its momentum's."""
    optimizer, batch = config.optimizer, moment_batch(config)
    match optimizer.name:
        case "sgd" | "dmsgd":
            left = (optimizer.momentum, None)
        case "qg_dmsgd":  # as of quasi-hyperbolic momentum, which it is without mixing
            memory = optimizer.momentum if optimizer.tracking is None else optimizer.tracking
            left = (memory + (1 - memory) * optimizer.momentum, None)
        case "muon":
            left = (optimizer.momentum, optimizer.betas[1])
        case _:
            left = optimizer.betas
    return {f"half_life_{name}": _half_life(beta, batch) for name, beta in zip(("first", "second"), left, strict=True)}


def _half_life(beta: float | None, batch: float) -> float | None:
    if beta in (0, 1, None):
        return None if beta is None else 0.0 if beta == 0 else math.inf
    return batch * math.log(0.5) / math.log(beta)


def decay_sum(config: Config, factor: Callable[[int], float], updates: int) -> float:
    """Return the planned sum over a run's updates of learning rate x weight decay, for parameters that decay.

    factor: returns the schedule's factor of the learning rate in an update, counted from 0
    """
    rate = config.lr * config.optimizer.coupled_decay(config.lr)
    return rate * math.fsum(map(factor, range(updates)))
