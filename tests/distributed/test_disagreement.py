"""Ranks that do not mean the same thing are told so at the start: all of them, with what differs."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from common.parallel import AllReduceDataParallel, DecentralizedDataParallel
from common.topology import Round, Topology, build
from tests.distributed import models
from tests.distributed.processes import run_processes


def shallow() -> nn.Module:
    return models.mlp()[:3]


def other_shape() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 17), nn.Tanh(), nn.Linear(17, 3))


def with_buffer() -> nn.Module:
    model = models.mlp()
    model.register_buffer("seen", torch.zeros(1))
    return model


# What rank 1 does differently -> the fact that all ranks are told
DIFFERENCES: dict[str, tuple[dict[str, Any], Callable[[], nn.Module], str]] = {
    "topology": ({"topology": "complete"}, models.mlp, "topology: rank 0 has 'ring', rank 1 has 'complete'"),
    "options": (
        {"topology": build("torus", 4, rows=1)},
        models.mlp,
        r"rank 0 has 'ring', rank 1 has 'torus\(rows=1\)'",
    ),
    "rounds": ({"topology": Topology("ring", 4, schedule=(Round.idle(4),))}, models.mlp, "about the topology's rounds"),
    "order": ({"order": "atc"}, models.mlp, "order: rank 0 has 'awc', rank 1 has 'atc'"),
    "local steps": ({"local_steps": 3}, models.mlp, "local_steps: rank 0 has 1, rank 1 has 3"),
    "bucket": ({"bucket_mb": 1.0}, models.mlp, r"bucket_mb: rank 0 has 'auto', rank 1 has 1.0"),
    "transport": ({"transport": "send_recv"}, models.mlp, "transport"),
    "message dtype": ({"message_dtype": torch.bfloat16}, models.mlp, "message_dtype.*None.*bfloat16"),
    "ranks per worker": ({"ranks_per_worker": 2, "topology": "ring"}, models.mlp, "ranks_per_worker"),
    "unused parameters": ({"find_unused_parameters": True}, models.mlp, "find_unused_parameters"),
    "shape": ({}, other_shape, r"rank 0 has '2.weight \(16, 16\).*rank 1 has '2.weight \(17, 16\)"),
    "count": ({}, shallow, r"number of parameters and buffers: rank 0 has '6', rank 1 has '4'"),
    "frozen": ({}, models.frozen, "2.weight.*trained.*2.weight.*frozen"),
    "tied": ({}, models.Tied, "parameter"),
    "dtype": ({}, lambda: models.mlp().double(), "float32.*float64"),
    "buffer": ({}, with_buffer, "number of parameters and buffers: rank 0 has '6', rank 1 has '7'"),
}


def disagreeing(rank: int, n: int) -> dict[str, str]:
    messages = {}
    for name, (options, model, _) in DIFFERENCES.items():
        mine = {"topology": "ring", "timeout_s": 5.0} | (options if rank == 1 else {})
        with pytest.raises(RuntimeError) as error:
            DecentralizedDataParallel(model() if rank == 1 else models.mlp(), **mine)
        messages[name] = str(error.value)
    with pytest.raises(RuntimeError) as error:
        AllReduceDataParallel(models.mlp(), find_unused_parameters=rank == 1)
    messages["allreduce"] = str(error.value)
    return messages


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    return run_processes(disagreeing, 4)


@pytest.mark.parametrize("name", [*DIFFERENCES, "allreduce"])
def test_every_rank_learns_who_differs_in_what(messages: list[dict[str, str]], name: str) -> None:
    texts = {texts[name] for texts in messages}
    assert len(texts) == 1
    (text,) = texts
    assert "ranks [1] disagree with rank 0 about " in text
    expected = (
        DIFFERENCES[name][2] if name in DIFFERENCES else "find_unused_parameters: rank 0 has False, rank 1 has True"
    )
    assert re.search(expected, text), text
