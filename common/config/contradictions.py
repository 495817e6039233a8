"""Choices that do not go together, as one table."""

import re
from functools import reduce
from typing import Any

from pydantic import BaseModel

GROUPS = {"workers": "workers.kind", "topology": "topology.name", "parallel": "parallel.method"}
GROUPS |= {"optimizer": "optimizer.name"}
# Rows: a choice; others that may not be made with it; what is expected instead. A key alone stands for any value except
# null, 0, false and an empty list. A choice of a key that the configuration lacks counts as not made.
TABLE = (
    ("topology!=complete", ["parallel=allreduce"], "topology=complete, or parallel=decentralized"),
    ("parallel.hook", ["workers=simulated"], "workers=processes or parallel.hook=null: hooks compress what is sent"),
    (
        "parallel.message_dtype",
        ["workers=simulated"],
        "workers=processes or parallel.message_dtype=null: simulated workers send no messages that could be rounded",
    ),
    ("parallel.order=awc", ["optimizer=qg_dmsgd", "optimizer.momentum_mixing=true"], "parallel.order=atc"),
    (
        "parallel.share_second_moment",
        ["workers=processes", "optimizer!=accumadamw", "optimizer.fused=true", "training.precision=fp16"],
        "workers=simulated and optimizer=accumadamw (AdamW with accumulation_steps=1), not fused, without fp16",
    ),
    (
        "parallel.shard=true",
        # Muon orthogonalises whole matrices.
        ["workers=simulated", "optimizer=muon", "training.compile=true", "evaluation.local_models=true"],
        "parallel.shard=false",
    ),
    (
        "workers.batched=true",
        ["workers=processes", "parallel.ranks_per_worker!=1", "training.compile=true", "training.precision=fp16"],
        "workers.batched=false",
    ),
    ("elastic.script", ["workers=processes"], "workers=simulated"),
    ("elastic.min_workers", ["workers=simulated"], "workers=processes"),
    ("elastic.min_workers", ["parallel=allreduce"], "a method that gossips"),
    (
        "elastic.min_workers",
        ["parallel.shard=true", "evaluation.keep_average=true", "training.precision=fp16"],
        "another choice: workers cannot go on without a peer then",
    ),
    ("elastic.restarts", ["elastic.min_workers=null"], "0, or a number of workers with which the others go on"),
    (
        "elastic.agent",
        ["elastic.min_workers=null"],
        "null, or a number of workers with which the others go on; without lost workers torchrun starts several hosts",
    ),
)


def check_choices(config: BaseModel) -> None:
    """Raise ValueError for the first choices of TABLE that do not go together."""
    for choice, others, expected in TABLE:
        for other in others:
            if (one := made(choice, config)) and (two := made(other, config)):
                raise ValueError(f"{one} with {two}: expected {expected}")


def made(choice: str, config: BaseModel) -> str | None:
    """Return a choice with the value that it has, as a user types it; None if it is not made."""
    key, unless, value = re.fullmatch(r"([\w.]+)(?:(!?)=(\w+))?", choice).groups()
    found: Any = reduce(lambda part, name: getattr(part, name, ...), GROUPS.get(key, key).split("."), config)
    if found is ...:
        return None
    text = "null" if found is None else str(found).lower() if isinstance(found, bool) else str(found)
    chosen = bool(found) if value is None else (text != value if unless else text == value)
    return (key if isinstance(found, list) else f"{key}={text}") if chosen else None
