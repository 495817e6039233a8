"""What a training does besides steps, with shards: evaluation at any moment, averages, resumption, mixed precision."""

import copy
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

from common.dtensors import is_dtensor
from common.parallel import GradScaler, Outer
from tests.distributed.comparison import ATOL, RTOL, assert_same
from tests.distributed.models import mlp
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, Training, real, snapshot
from tests.distributed.sharded import sharded
from tests.distributed.test_misuse import Mistake, another_dtype, assigned_then_the_mean, foreign_write, mistaken
from tests.naming import case

BASE = Scenario(topology="one_peer_exponential", optimizer="adamw", ranks_per_worker=2, steps=6)
LOCAL = {"local_steps": 3, "merge_after": 2, "outer": Outer(lr=0.4, momentum=0.9)}


class Headed(nn.Module):
    """A model whose root has parameters of its own: FSDP keeps them gathered after an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale, self.shift = mlp(), nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale + self.shift


def evaluated(module: nn.Module, scenario: Scenario) -> np.ndarray:
    """Return the outputs of an evaluation on the same batch on all ranks."""
    module.eval()
    with torch.no_grad():
        outputs = module(scenario.batch(0, 0)[0])
    module.train()
    return outputs.double().numpy()


def disturbed(training: Training) -> dict[str, Any]:
    """Train, evaluating and averaging between all parts of a step."""
    scenario, model, outputs, means = training.scenario, training.model, [], []
    for step in range(scenario.steps):
        training.backward(step)
        outputs.append(evaluated(model.module, scenario))
        before = snapshot(model)
        with model.averaged() as mean:
            means.append(evaluated(mean, scenario))
        assert_same(snapshot(model), before)
        outputs.append(evaluated(model.module, scenario))
        training.update()
        outputs.append(evaluated(model.module, scenario))
        with torch.inference_mode(), model.averaged() as mean:
            means.append(evaluated(mean, scenario))
    state = snapshot(model)
    distance = model.consensus_distance()
    evaluated(model.module, scenario)
    model.average_()
    averaged = snapshot(model)
    means.append(evaluated(model.module, scenario))
    distances = [distance, model.consensus_distance()]
    training.run(range(scenario.steps, scenario.steps + 2))
    return {
        "outputs": outputs,
        "means": means,
        "state": state,
        "averaged": averaged,
        "distances": distances,
        "continued": snapshot(model),
    }


def evaluation(rank: int, n: int) -> None:
    for scenario in (replace(BASE, model=Headed), replace(BASE, model=Headed, optimizer="accumadamw", local=LOCAL)):
        got = disturbed(sharded(rank, n, scenario))
        expected = disturbed(real(rank, scenario))
        with case(scenario):
            assert_same(got["state"], expected["state"])
            np.testing.assert_array_equal(got["outputs"], expected["outputs"])
            np.testing.assert_allclose(got["means"], expected["means"], RTOL, ATOL)
            for kind in ("averaged", "continued"):
                assert_same(got[kind], expected[kind], kind, RTOL, ATOL)
            assert got["distances"] == pytest.approx(expected["distances"], rel=1e-5, abs=1e-7)
            assert got["distances"][0] > 1e-3


def test_evaluation_and_averages_between_all_parts_of_a_step() -> None:
    run_processes(evaluation, 4)


def state_of(training: Training) -> dict[str, Any]:
    """Return copies of all that a checkpoint of this rank holds, shards as they are."""
    model, optimizer = training.model, training.optimizer
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "clock": model.clock,
            "communication": model.communication_state(),
            "optimizer": optimizer.state_dict(),
        }
    )


def resumed(rank: int, n: int) -> None:
    scenarios = [replace(BASE, optimizer=name) for name in ("adamw", "accumadamw", "fused_accumadamw")]
    scenarios += [
        replace(BASE, optimizer="accumadamw", local=LOCAL),
        replace(BASE, optimizer="adamw", options={"message_dtype": torch.int8}),
    ]
    for scenario in scenarios:
        uninterrupted = sharded(rank, n, scenario).run(range(4))
        saved = state_of(uninterrupted)
        uninterrupted.run(range(4, 9))
        training = sharded(rank, n, scenario)
        evaluated(training.model.module, scenario)  # the root stays gathered
        training.model.load_state_dict(saved["model"])
        training.model.load_clock(saved["clock"])
        training.model.load_communication_state(saved["communication"])
        training.optimizer.load_state_dict(saved["optimizer"])
        training.run(range(4, 9))
        with case(scenario):
            assert all(map(is_dtensor, saved["model"].values()))
            assert_same(snapshot(training.model), snapshot(uninterrupted.model))


@pytest.mark.slow
def test_resumption_is_exact() -> None:
    run_processes(resumed, 4)


def kept_by_torch(rank: int, n: int, folder: str) -> None:
    """Checkpoints of torch.distributed.checkpoint, worker by worker, continue exactly, and load on another mesh."""
    scenario = replace(BASE, optimizer="fused_accumadamw")

    def states(training: Training) -> dict[str, Any]:
        model = training.model
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model.module, training.optimizer)}
        return {f"worker{model.worker}": state}

    uninterrupted = sharded(rank, n, scenario).run(range(4))
    dcp.save(states(uninterrupted), checkpoint_id=folder)
    values = snapshot(uninterrupted.model)
    uninterrupted.run(range(4, 7))

    training = sharded(rank, n, scenario).run(range(1))  # so that there is state to load into
    training.model.drain()
    loaded = states(training)
    dcp.load(loaded, checkpoint_id=folder)
    (found,) = loaded.values()
    training.model.load_state_dict(found["model"])
    training.model.load_clock(4)
    set_optimizer_state_dict(training.model.module, training.optimizer, found["optimizer"])
    assert_same(snapshot(training.run(range(4, 7)).model), snapshot(uninterrupted.model))

    alone = sharded(rank, n, replace(scenario, ranks_per_worker=4))
    model = alone.model.state_dict()
    dcp.load({"worker0": {"model": model}}, checkpoint_id=folder)
    alone.model.load_state_dict(model)
    if rank < 2:  # who had worker 0's shards
        assert_same(snapshot(alone.model), values)
    else:
        snapshot(alone.model)


@pytest.mark.slow
def test_checkpoints_of_torch_hold_the_shards_of_each_worker(tmp_path: Path) -> None:
    run_processes(kept_by_torch, 4, str(tmp_path))


class InBfloat16(nn.Module):
    """An MLP that computes in bfloat16 from float32 parameters, as FSDP's mixed precision policy makes it do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        rounded = {name: parameter.bfloat16() for name, parameter in self.body.named_parameters()}
        return torch.func.functional_call(self.body, rounded, (x.bfloat16(),))


def mixed_precision(rank: int, n: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for optimizer in ("momentum", "accumadamw"):
        scenario = replace(BASE, optimizer=optimizer)
        got = snapshot(sharded(rank, n, scenario, mp_policy=policy).run(range(6)).model)
        expected = snapshot(real(rank, replace(scenario, model=InBfloat16)).run(range(6)).model)
        assert_same(got, {name.removeprefix("body."): value for name, value in expected.items()})


@pytest.mark.slow
def test_mixed_precision_equals_the_same_computation_by_hand_bit_for_bit() -> None:
    run_processes(mixed_precision, 4)


def overflowed(rank: int, n: int, method: type[torch.amp.GradScaler]) -> None:
    """An overflow in one shard is one of the whole worker: no rank of it moves, the others' scales stay."""
    training = sharded(rank, n, replace(BASE, optimizer="sgd", order="atc", topology="complete", scaler=method))
    model, scaler = training.model, training.scalers[0]
    start = snapshot(model)
    training.backward(0)
    if rank == 1:
        model.module[0].weight.grad.to_local()[0, 0] = float("inf")
    scaler.unscale_(training.optimizer)
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    assert all(g.isfinite().all() for g in gradients) is (method is GradScaler or rank // 2 == 1)
    assert any(g.any() for g in gradients) is (rank // 2 == 1 or method is not GradScaler)
    for group in training.optimizer.param_groups:
        group["weight_decay"] = 0
    training.update()
    assert scaler.get_scale() == (2.0**9 if rank // 2 == 0 else 2.0**10)
    if n == 2:
        assert_same(snapshot(model), start)


@pytest.mark.slow
def test_an_overflow_of_one_shard_is_one_of_its_worker() -> None:
    run_processes(overflowed, 4, GradScaler)
    run_processes(overflowed, 2, GradScaler)
    run_processes(overflowed, 2, torch.amp.GradScaler)


def add_to_shard(training: Training) -> None:
    with torch.no_grad():
        training.model.module[2].weight.to_local().add_(1)
    training.run([2])


IN_FLIGHT = r"gossip merge of step 2: parameter '2\.{}' was written while its message was in flight"
MOVED = r"parameter '0\.weight' is no longer a view of the flat vector.*before wrapping.*without assign=True"
MISTAKES: list[Mistake] = [
    (foreign_write, BASE, IN_FLIGHT.format("bias")),
    (add_to_shard, BASE, IN_FLIGHT.format("weight")),
    (another_dtype, BASE, MOVED),
    (assigned_then_the_mean, BASE, MOVED),
]


def test_writes_and_moves_while_messages_are_in_flight_are_noticed() -> None:
    for messages in run_processes(mistaken, 4, partial(sharded, n=4), MISTAKES):
        for (mistake, _, expected), message in zip(MISTAKES, messages, strict=True):
            assert re.search(expected, message), (mistake.__name__, message)
