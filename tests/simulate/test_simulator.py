"""The simulator against numpy and against one big batch, and its rule of use."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.optim import DmSGD, QGDmSGD
from common.simulate import simulate
from common.topology import build
from tests.distributed import models
from tests.distributed.comparison import assert_same
from tests.distributed.scenarios import OPTIMIZERS, Scenario, simulated, snapshot

BASE = Scenario(topology="ring", optimizer="momentum")


def stacked(replicas: list[nn.Module]) -> np.ndarray:
    """Parameters of all workers, [worker, parameter]."""
    return np.array([np.concatenate([v.ravel() for v in snapshot(replica).values()]) for replica in replicas])


def test_64_workers_of_a_convolutional_net() -> None:
    scenario = Scenario(model=models.conv_bn, inputs=(3, 6, 6), topology="one_peer_exponential", optimizer="accumadamw")
    training = simulated(64, scenario).run(range(2))
    distance = training.model.consensus_distance()
    X = stacked(training.models)
    names = {name for name, _ in training.model.named_parameters()}
    parameters = np.array(
        [np.concatenate([v.ravel() for k, v in snapshot(m).items() if k in names]) for m in training.models]
    )
    assert distance == pytest.approx(np.sqrt(((parameters - parameters.mean(0)) ** 2).sum(1).mean()), rel=1e-6)
    with training.models[17].averaged() as mean:
        np.testing.assert_allclose(stacked([mean])[0], X.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stacked(training.models), X)
    training.model.average_()
    np.testing.assert_allclose(stacked(training.models), np.tile(X.mean(0), (64, 1)), rtol=1e-5, atol=1e-6)
    assert all(replica.clock == 2 for replica in training.models)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_allreduce_is_one_big_batch(optimizer: str) -> None:
    n, scenario = 4, replace(BASE, method="allreduce", optimizer=optimizer, clip=0.1)
    training = simulated(n, scenario).run(range(10))
    model = scenario.build()
    one = OPTIMIZERS[optimizer](model.parameters())
    for step in range(10):
        x, y = (torch.cat(parts) for parts in zip(*(scenario.batch(rank, step) for rank in range(n)), strict=True))
        (model(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        one.step()
        one.zero_grad()
    for replica in training.models:
        assert_same(snapshot(replica), snapshot(model), rtol=1e-5, atol=1e-6)
    assert training.model.consensus_distance() == 0


@pytest.mark.parametrize("method", ["decentralized", "allreduce"])
def test_the_original_module_is_left_alone(method: str) -> None:
    module = BASE.build()
    before = snapshot(module)
    replicas = simulate(module, 3, method, "ring")
    for replica in replicas:
        replica.attach(torch.optim.SGD(replica.parameters(), lr=0.1))
    for replica in replicas:
        BASE.loss(replica, 0, 0).backward()
    for replica in replicas:
        replica._optimizers[0].step()
    assert_same(snapshot(module), before)
    assert all(parameter.grad is None for parameter in module.parameters())
    storages = [{p.untyped_storage().data_ptr() for p in m.parameters()} for m in (module, replicas[0].module)]
    assert storages[0].isdisjoint(storages[1])


def test_a_backward_after_an_average_is_refused() -> None:
    training = simulated(3, BASE).run(range(2))
    loss = BASE.loss(training.models[1], 1, 2)
    training.models[0].average_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_forward_after_others_have_stepped_is_refused() -> None:
    training = simulated(3, BASE).run(range(2))
    loss = BASE.loss(training.models[1], 1, 2)
    training.backward(2)
    training.optimizers[0][0].step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="simulated worker 1 ran a training forward while others had stepped"):
        BASE.loss(training.models[1], 1, 3)
    with torch.no_grad():
        BASE.loss(training.models[1], 1, 3)


def test_a_worker_that_steps_twice_is_refused() -> None:
    training = simulated(3, BASE).run(range(2))
    training.backward(2)
    training.optimizers[1][0].step()
    with pytest.raises(RuntimeError, match=r"simulated worker 1 stepped again before workers \[0, 2\] stepped"):
        training.optimizers[1][0].step()


def test_averages_inside_averaged_of_another_worker_are_refused() -> None:
    training = simulated(3, BASE).run(range(2))
    first, second, _ = training.models
    with first.averaged() as mean, first.averaged() as same:
        assert same is mean
        for average in (lambda: second.averaged().__enter__(), second.consensus_distance, second.average_):
            with pytest.raises(RuntimeError, match=r"inside `with replica.averaged\(\)` of simulated worker 0: leave"):
                average()
    assert second.consensus_distance() > 0


def test_after_an_interrupted_update_training_goes_on() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    training, expected = simulated(3, BASE).run(range(2)), stacked(simulated(3, BASE).run(range(3)).models)
    states = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in training.models]
    training.backward(2)
    with pytest.raises(KeyboardInterrupt):
        training.optimizer.step(fail)
    with pytest.raises(RuntimeError, match=r"a training forward inside an update, number 2, .*call drain\(\)"):
        training.backward(2)
    for model, state in zip(training.models, states, strict=True):
        model.load_state_dict(state)
        for parameter in model.parameters():
            parameter.grad = None
    training.run([2])
    np.testing.assert_array_equal(stacked(training.models), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size=0: expected at least 1"),
        ({"method": "gossip"}, "method='gossip': expected 'decentralized' or 'allreduce'"),
        ({"topology": build("ring", 5)}, "topology ring is for 5 workers, but there are 3"),
        ({"topology": "hypercube"}, "hypercube"),
        ({"ranks_per_worker": 0}, r"ranks_per_worker=0: expected an integer in \[1, inf\]"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(models.mlp(), **{"world_size": 3} | arguments)


@pytest.mark.parametrize("make", [DmSGD, QGDmSGD])
def test_methods_that_finish_after_mixing_need_atc(make: type) -> None:
    def attached(**options: Any) -> bool:
        replica = simulate(models.mlp(), **options)[0]
        optimizer = replica.attach(make(replica.parameters(), lr=0.1))
        deferred = optimizer.deferred
        replica.close()
        assert not optimizer.deferred
        return deferred

    with pytest.raises(ValueError, match="needs order='atc', got order='awc'"):
        attached(world_size=2)
    assert attached(world_size=2, order="atc")
    assert not attached(world_size=1)
    assert not attached(world_size=2, method="allreduce")


def test_push_sum_matrices_are_refused(tmp_path: Any) -> None:
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 0\n0 2\n")
    topology = build("file", 3, path=edges, directed=True, weights="push_sum")
    with pytest.raises(ValueError, match="topology file: expected doubly stochastic mixing matrices"):
        simulate(models.mlp(), 3, topology=topology)


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "dtype": lambda replica: replica.double(),
    "there and back": lambda replica: replica.double().float(),
    "data": lambda replica: [setattr(p, "data", p.data.clone()) for p in replica.parameters()],
    "assigned": lambda replica: replica.load_state_dict(snapshot_tensors(replica), assign=True),
    "module assigned": lambda replica: replica.module.load_state_dict(snapshot_tensors(replica), assign=True),
}
ACTIONS: dict[str, Callable[[Any], object]] = {
    "forward": lambda training: training.backward(2),
    "update": lambda training: training.update(),
    "averaged": lambda training: training.models[0].averaged().__enter__(),
    "average_": lambda training: training.models[0].average_(),
    "distance": lambda training: training.models[0].consensus_distance(),
}


def snapshot_tensors(replica: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in replica.state_dict().items()}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("move", MOVES)
def test_a_replica_whose_parameters_left_the_matrices_is_noticed(move: str, action: str) -> None:
    training = simulated(3, BASE).run(range(2))
    if action == "update":
        training.backward(2)
    MOVES[move](training.models[1])
    with pytest.raises(RuntimeError, match=r"simulated .*, worker 1: parameter '0.weight' is no longer a view"):
        ACTIONS[action](training)


def test_buffers_that_were_replaced_are_averaged() -> None:
    replicas = simulate(nn.BatchNorm1d(1), 2)
    for worker, replica in enumerate(replicas):
        replica.module.running_mean = torch.tensor([float(worker)])
        replica.module.running_var.fill_(torch.finfo(torch.float32).max)
    with replicas[0].averaged() as mean:
        assert mean.running_mean.item() == 0.5
        assert mean.running_var.item() == torch.finfo(torch.float32).max
    assert [replica.module.running_mean.item() for replica in replicas] == [0, 1]


def test_complex_parameters() -> None:
    """Mixed, averaged and measured with their imaginary parts."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
            self.register_buffer("seen", torch.zeros(1, dtype=torch.complex64))

    n = 4
    replicas = simulate(Net(), n, topology="ring")
    X = np.random.default_rng(0).normal(size=(n, 6)).astype(np.float32).view(np.complex64)
    with torch.no_grad():
        for replica, x in zip(replicas, X, strict=True):
            replica.module.c.copy_(torch.from_numpy(x))
            replica.module.seen.fill_(complex(x[0]))
    assert replicas[0].consensus_distance() == pytest.approx(
        np.sqrt((np.abs(X - X.mean(0)) ** 2).sum(1).mean()), rel=1e-6
    )
    with replicas[2].averaged() as mean:
        np.testing.assert_allclose(mean.c.detach().numpy(), X.mean(0), atol=1e-6)
        np.testing.assert_allclose(mean.seen.numpy(), X.mean(0)[:1], atol=1e-6)
    optimizers = [replica.attach(torch.optim.SGD(replica.parameters(), lr=0.1)) for replica in replicas]
    for optimizer in optimizers:
        optimizer.step()
    mixed = np.stack([replica.module.c.detach().numpy() for replica in replicas])
    np.testing.assert_allclose(mixed, build("ring", n).matrix(0) @ X, atol=1e-6)


def test_tensors_that_hooks_compute_are_no_obstacle() -> None:
    """As of the old weight_norm, which leaves a weight with a graph on the module."""
    with warnings.catch_warnings(action="ignore"):
        layers = [nn.utils.weight_norm(nn.Linear(5, 4)), nn.utils.spectral_norm(nn.Linear(4, 3))]
    module = nn.Sequential(*layers)
    module(torch.ones(2, 5))
    replicas = simulate(module, 2, order="atc")
    assert replicas[0].module[0].weight is not module[0].weight
    optimizers = [replica.attach(torch.optim.SGD(replica.parameters(), lr=0.1)) for replica in replicas]
    for step in range(2):
        for worker, replica in enumerate(replicas):
            BASE.loss(replica, worker, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    weights = [replica.module[0].weight_v.detach() for replica in replicas]
    assert not torch.equal(weights[0], module[0].weight_v)
    assert replicas[0].consensus_distance() < 1e-6  # all agree: what hooks compute is computed anew
