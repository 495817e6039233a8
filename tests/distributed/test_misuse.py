"""What would silently corrupt a training is an error that says what to do."""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from common.optim import DmSGD, QGDmSGD
from common.parallel import AllReduceDataParallel, DecentralizedDataParallel, Outer
from common.topology import Round, Topology, build
from tests.distributed import models
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, Training, real, simulated

BASE = Scenario(topology="ring", optimizer="momentum")
TWO = replace(BASE, optimizer="momentum+adam")


def foreign_write(training: Training) -> None:
    with torch.no_grad():
        training.model.module[2].bias.add_(1)
    training.run([2])


def foreign_write_before_a_forward_only(training: Training) -> None:
    training.backward(2)
    with torch.no_grad():
        training.model.module[2].bias.add_(1)
    training.update()


def another_dtype(training: Training) -> None:
    training.model.to(torch.float64).to(torch.float32)
    training.run([2])


def another_memory_format(training: Training) -> None:
    training.model.to(memory_format=torch.contiguous_format)
    training.run([2])


def another_dtype_then_the_distance(training: Training) -> None:
    training.model.double()
    training.model.consensus_distance()


def assigned_then_the_mean(training: Training) -> None:
    state = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    training.model.load_state_dict(state, assign=True)
    with training.model.averaged():
        pass


def one_of_two_optimizers(training: Training) -> None:
    training.backward(2)
    training.optimizer.step()
    training.optimizer.step()


def forward_between_two_optimizers(training: Training) -> None:
    training.backward(2)
    training.optimizer.step()
    training.backward(3)


def steps_inside_backward(training: Training) -> None:
    for parameter, optimizer in zip(training.model.module[4].parameters(), training.optimizers[0], strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    training.backward(2)


def backward_after_the_step(training: Training) -> None:
    loss = training.scenario.loss(training.model, 0, 2)
    training.optimizer.step()  # without gradients: it only mixes
    loss.backward()


def backward_after_an_average(training: Training) -> None:
    loss = training.scenario.loss(training.model, 0, 2)
    training.model.average_()
    loss.backward()


def closure(training: Training) -> None:
    training.optimizer.step(lambda: training.backward(2))


# Merged at the beginning of a round: the anchors are what the parameters were then.
LOCAL = replace(BASE, local={"local_steps": 2, "outer": Outer(0.7, 0.9), "merge_after": 1})
CONV = replace(BASE, model=models.conv_bn, inputs=(3, 6, 6))
Mistake = tuple[Callable[[Training], None], Scenario, str]  # and the message
MISTAKES: list[Mistake] = [
    (foreign_write, BASE, r"gossip merge of step 2: parameter '2\.bias' was written while its message was in flight"),
    (foreign_write, LOCAL, r"gossip merge of round 1: parameter '2\.bias' was written while its message was in flight"),
    (foreign_write_before_a_forward_only, BASE, r"parameter '2\.bias' was written while its message was in flight"),
    (another_dtype, BASE, r"parameter '0\.weight' is no longer a view of the flat vector.*before wrapping"),
    (another_dtype, replace(BASE, order="atc"), r"parameter '0\.weight' is no longer a view of the flat vector"),
    (another_memory_format, CONV, r"parameter '0\.weight' is no longer a view of the flat vector"),
    (another_dtype_then_the_distance, BASE, r"consensus distance: parameter '0\.weight' is no longer a view"),
    (assigned_then_the_mean, BASE, r"average: parameter '0\.weight' is no longer a view"),
    (one_of_two_optimizers, TWO, "an optimizer stepped twice before all 2 attached ones stepped once"),
    (forward_between_two_optimizers, TWO, "a training forward inside an update"),
    (steps_inside_backward, TWO, "a backward after the first optimizer.step\\(\\) of an update, which mixes all param"),
    (backward_after_the_step, BASE, "modified by an inplace operation"),
    (backward_after_the_step, replace(BASE, optimizer="fused_accumadamw"), "modified by an inplace operation"),
    (backward_after_an_average, BASE, "modified by an inplace operation"),
    (closure, BASE, "a training forward inside an update.*without closures"),
]


def mistaken(rank: int, n: int, begin: Callable[..., Training], mistakes: Sequence[Mistake]) -> list[str]:
    """Return the message for each mistake, made by all ranks after two good steps."""
    messages = []
    for mistake, scenario, _ in mistakes:
        training = begin(rank, scenario=scenario).run(range(2))
        with pytest.raises(RuntimeError) as error:
            mistake(training)
        messages.append(str(error.value))
    return messages


@pytest.fixture(scope="module")
def messages() -> list[list[str]]:
    return run_processes(mistaken, 2, real, MISTAKES)


@pytest.mark.parametrize("index", range(len(MISTAKES)), ids=[mistake.__name__ for mistake, _, _ in MISTAKES])
def test_mistakes_while_training(messages: list[list[str]], index: int) -> None:
    for rank in range(2):
        assert re.search(MISTAKES[index][2], messages[rank][index])


def test_a_simulated_worker_steps_inside_backward() -> None:
    with pytest.raises(RuntimeError, match="a backward after the first optimizer"):
        steps_inside_backward(simulated(2, TWO))
    steps_inside_backward(simulated(1, TWO))  # nothing is mixed


def writing_where_it_is_allowed(rank: int, n: int) -> None:
    training = real(rank, BASE).run(range(2))
    model, x = training.model, BASE.batch(0, 0)[0]
    model.drain()
    with torch.no_grad():
        model.module[2].bias.add_(1)
    training.run([2])
    model.close()
    with torch.no_grad():
        model.module[2].bias.add_(1)
    with pytest.raises(RuntimeError, match="no optimizer is attached"):
        model(x)
    model.eval()(x)


def test_writing_after_drain_is_allowed() -> None:
    run_processes(writing_where_it_is_allowed, 2)


def constructed(rank: int, n: int) -> None:
    with pytest.raises(ValueError, match="topology ring is for 3 workers, but there are 2"):
        DecentralizedDataParallel(models.mlp(), build("ring", 3))
    with pytest.raises(ValueError, match="topology ring is for 2 workers, but there are 1"):
        DecentralizedDataParallel(models.mlp(), build("ring", 2), ranks_per_worker=2)
    with pytest.raises(ValueError, match="ranks_per_worker=3: expected a positive divisor of the number of ranks, 2"):
        DecentralizedDataParallel(models.mlp(), "ring", ranks_per_worker=3)
    with pytest.warns(UserWarning, match="it has no effect") if rank == 0 else contextlib.nullcontext():
        DecentralizedDataParallel(models.mlp(), "complete", transport="subgroup", message_dtype=torch.bfloat16)
    for wrapper in (AllReduceDataParallel, lambda module: DecentralizedDataParallel(module, "ring")):
        with pytest.raises(ValueError, match=r"submodule '0' is a DistributedDataParallel; expected the module inside"):
            wrapper(nn.Sequential(nn.parallel.DistributedDataParallel(models.mlp())))
    turned = DecentralizedDataParallel(nn.Linear(1, 1, bias=False, dtype=torch.complex64), "complete")
    with torch.no_grad():
        turned.module.weight.fill_(3j * rank)
    assert turned.consensus_distance() == pytest.approx(1.5)
    model = DecentralizedDataParallel(models.mlp(), "ring")
    with pytest.raises(ValueError, match="needs order='atc', got order='awc'"):
        model.attach(DmSGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="QGDmSGD needs order='atc', got order='awc'"):
        model.attach(QGDmSGD(model.parameters(), lr=0.1))
    model.attach(DmSGD(model.parameters(), lr=0.1, momentum_mixing=False))
    narrow = DecentralizedDataParallel(models.mlp(), "ring", "atc", message_dtype=torch.int8)
    with pytest.raises(ValueError, match="QGDmSGD: expected messages of 16 bits or more, got message_dtype=int8"):
        narrow.attach(QGDmSGD(narrow.parameters(), lr=0.1))
    directed = Topology("directed", 2, schedule=(Round(({0: 0.5, 1: 0.25}, {0: 0.5, 1: 0.75})),))
    pushing = DecentralizedDataParallel(models.mlp(), directed, "atc", push_sum=True)
    with pytest.raises(ValueError, match="QGDmSGD is defined for doubly stochastic topologies, got directed"):
        pushing.attach(QGDmSGD(pushing.parameters(), lr=0.1))


def test_construction() -> None:
    run_processes(constructed, 2)


def after_close(rank: int, n: int) -> None:
    for name, order in {"dmsgd": "atc", "qg_dmsgd": "atc", "fused_accumadamw": "awc"}.items():
        training = real(rank, replace(BASE, optimizer=name, order=order)).run(range(2))
        module, optimizer = training.model.module, training.optimizer
        training.model.close()
        before = [parameter.detach().clone() for parameter in module.parameters()]
        BASE.loss(module, 0, 2).backward()
        optimizer.step()
        assert not getattr(optimizer, "deferred", None)
        assert all(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_a_closed_wrapper_gives_the_optimizer_back() -> None:
    run_processes(after_close, 2)
