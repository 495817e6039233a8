"""What holds of local steps besides the rule: the plain step, DiLoCo, the mean of messages, and costs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.optim import AccumAdamW
from common.parallel import Outer
from common.simulate import simulate
from common.topology import build
from tests.distributed.comparison import assert_same
from tests.distributed.local_steps import METHODS, Case, module, train
from tests.distributed.local_steps import real as real_case
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import OPTIMIZERS, Scenario, in_process, real
from tests.distributed.test_matrix_form import LR, problem
from tests.distributed.test_mixing import histories

BASE = Scenario(topology="one_peer_exponential", optimizer="adamw", steps=12)
OUTER = Outer(lr=0.4, momentum=0.9)
RULE = {"local_steps": 4, "merge_after": 2, "outer": OUTER}

# -- the plain step, bit for bit


def idle(rounds: int, topology: str = "one_peer_exponential") -> Any:
    return build(topology, 3, idle_rounds=rounds)


SAME = [
    (BASE, replace(BASE, order=None, local={"local_steps": 1, "merge_after": 1, "outer": Outer(1.0, 0.0)})),
    (replace(BASE, order="atc"), replace(BASE, order=None, local={"merge_after": 0})),
    (replace(BASE, topology=idle(3)), replace(BASE, local={"local_steps": 4, "merge_after": 1})),
    (
        replace(BASE, topology=idle(3, "ring")),
        replace(BASE, topology="ring", local={"local_steps": 4, "merge_after": 1}),
    ),
    # Anchors are kept, and every update is a round: the first part of post-local SGD.
    (BASE, replace(BASE, local=RULE | {"local_steps_from": 100})),
    (BASE, replace(BASE, local=RULE | {"local_steps_from": 100, "fragments": 2})),
    (replace(BASE, order="atc"), replace(BASE, order="atc", local={"local_steps": 4, "local_steps_from": 100})),
]


def test_rounds_in_every_update_are_those_without_local_steps() -> None:
    for result in run_processes(in_process, 3, [scenario for pair in SAME for scenario in pair]):
        for index, (_, scenario) in enumerate(SAME):
            today, local = result[2 * index : 2 * index + 2]
            assert_same(local["state"], today["state"], str(scenario.local))
            assert local["counters"].bytes_sent == today["counters"].bytes_sent


# -- DiLoCo


def diloco(n: int, steps: int, local_steps: int, outer: Outer) -> np.ndarray:
    """Return the parameters of DiLoCo by PyTorch's own optimizers: inner SGD, outer SGD with Nesterov's momentum."""
    anchor = nn.Parameter(module().weight.detach().clone())
    outer_step = torch.optim.SGD([anchor], lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
    workers = [module() for _ in range(n)]
    inner = [torch.optim.SGD(worker.parameters(), lr=LR) for worker in workers]
    for step in range(steps):
        for rank, (worker, optimizer) in enumerate(zip(workers, inner, strict=True)):
            B, b = map(torch.from_numpy, problem(rank, step))
            optimizer.zero_grad()
            (worker(B)[:, 0] - b).square().mean().backward()
            optimizer.step()
        if (step + 1) % local_steps == 0:
            anchor.grad = torch.stack([anchor - worker.weight for worker in workers]).mean(0).detach()
            outer_step.step()
            for worker in workers:
                worker.weight.data.copy_(anchor.data)
    return np.array([worker.weight.detach()[0].numpy() for worker in workers])


@pytest.mark.parametrize(("n", "merge_after"), [(3, 0), (1, 0), (1, 2), (1, 4)])
def test_the_complete_graph_without_delay_is_diloco_and_one_worker_lookahead(n: int, merge_after: int) -> None:
    options = {"local_steps": 4, "outer": Outer(lr=0.7, momentum=0.9), "merge_after": merge_after}
    models = simulate(module(), n, topology="complete", **options)
    optimizers = [model.attach(torch.optim.SGD(model.parameters(), lr=LR)) for model in models]
    for step in range(14):
        for rank, model in enumerate(models):
            B, b = map(torch.from_numpy, problem(rank, step))
            (model(B)[:, 0] - b).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    got = np.array([model.module.weight.detach()[0].numpy() for model in models])
    np.testing.assert_allclose(got, diloco(n, 14, 4, options["outer"]), rtol=1e-12)


# -- the mean


STILL = replace(BASE, optimizer="still", steps=13)
NARROW = [
    replace(
        STILL,
        topology=topology,
        workers_per_host=hosts,
        local=RULE | {"fragments": parts},
        options={"message_dtype": dtype},
    )
    for dtype in (torch.bfloat16, torch.int8)
    for topology, hosts, parts in (("ring", 1, 1), ("aer", 2, 1), ("aer", 2, 2))
]


def test_narrow_messages_of_anchors_conserve_the_mean() -> None:
    for scenario, X in zip(NARROW, histories(4, NARROW), strict=True):
        np.testing.assert_allclose(X[-1].mean(0), X[0].mean(0), atol=2e-6, err_msg=str(scenario))
        assert X[-1].std(0).mean() < 0.7 * X[0].std(0).mean()


# -- costs


class Operations(TorchDispatchMode):
    """Lists what PyTorch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def costs(rank: int, n: int) -> None:
    """Check what every update of a round does and sends."""
    scenario = replace(BASE, optimizer="momentum", local={"local_steps": 6, "merge_after": 2, "outer": OUTER})
    bare = scenario.build()
    optimizer = OPTIMIZERS["momentum"](bare.parameters())
    training = real(rank, scenario).run(range(12))
    for step in range(2):
        scenario.loss(bare, rank, step).backward()
        with Operations() as alone:
            optimizer.step()
    counters = training.model.counters
    for step in range(12, 18):
        training.backward(step)
        before = (counters.bytes_sent, counters.messages, counters.rounds)
        with Operations() as wrapped:
            training.optimizer.step()
        sent = (counters.bytes_sent, counters.messages, counters.rounds) != before
        assert sent == (step == 13)  # merged before the second update of a round
        assert (wrapped.names == alone.names) == (step not in (13, 17))  # after the sixth comes the outer step
        training.optimizer.zero_grad()
    training.model.close()


def test_between_exchanges_an_update_is_the_bare_optimizers() -> None:
    run_processes(costs, 2)


def counted(rank: int, n: int, cases: list[Case]) -> list[tuple[float, int]]:
    """Return (bytes, vectors kept) of each case after 24 updates and the rounds of the 24."""
    results = []
    for case in cases:
        model = real_case(case)
        train([model], [rank], case, range(24))
        kept = [name for name in model.communication_state() if not name.startswith("layout")]
        results.append((model.counters.bytes_sent, len(kept)))
        model.close()
    return results


def test_bytes_are_a_share_of_the_rounds() -> None:
    size = 40 * 8
    pairs, everybody = build("one_peer_exponential", 2), build("complete", 2)
    expected = [
        (Case(pairs), 24 * size, 0),
        (Case(pairs, {"local_steps": 6, "merge_after": 1}), 24 / 6 * size, 0),
        (Case(pairs, {"local_steps": 6, "merge_after": 0}), 24 / 6 * size, 0),
        (Case(pairs, {"local_steps": 6, "merge_after": 4}), 24 / 6 * size, 1),
        (Case(pairs, {"local_steps": 6, "merge_after": 4, "outer": OUTER}), 24 / 6 * size, 2),
        (Case(pairs, {"local_steps": 6, "merge_after": 3, "outer": OUTER, "fragments": 2}), 24 / 6 * size, 2),
        (Case(everybody, METHODS["DiLoCo"]), 24 / 4 * size, 2),
        (Case(pairs, METHODS["NoLoCo"]), 24 / 4 * size, 2),
    ]
    for result in run_processes(counted, 2, [case for case, _, _ in expected]):
        assert result == [(bytes_sent, vectors) for _, bytes_sent, vectors in expected]


# -- state that does not fit


def refused(rank: int, n: int) -> None:
    scenario = replace(BASE, optimizer="momentum", local=RULE)
    training = real(rank, scenario)
    state = training.model.communication_state()
    for clock, missing in ((6, "anchors and outer momenta"), (8, "outer momenta")):  # 8: the end of a round
        training.model.load_clock(clock)
        with pytest.raises(RuntimeError, match=f"clock={clock} with local_steps=4: {missing} of the round are missing"):
            training.backward(clock)
    training.model.load_clock(6)
    training.model.load_communication_state(state)
    training.model.load_state_dict(training.model.state_dict())  # moves the anchors
    with pytest.raises(RuntimeError, match="clock=6 with local_steps=4: anchors of the round are missing"):
        training.backward(6)
    training.model.load_clock(8)
    training.model.load_communication_state(state)
    training.run(range(8, 10))
    errors = {name.replace("outer_momentum", "message_error"): tensor for name, tensor in state.items()}
    for other, got in (({}, "got nothing"), (errors, r"got {'anchor.0': \d+, 'message_error.0': \d+, .*}")):
        with pytest.raises(
            ValueError, match=rf"expected {{'anchor.0'.*{got} .*was message_dtype, local_steps or outer"
        ):
            training.model.load_communication_state(other)
    with pytest.raises(ValueError, match="a fused optimizer after 10 updates: expected before the first one"):
        training.model.attach(AccumAdamW(training.model.parameters(), lr=0.1, fused=True))
    training.model.close()


def test_state_that_is_missing_or_of_another_method_is_refused() -> None:
    run_processes(refused, 2)
