"""One optimizer of two wrappers, two of one wrapper: what one plain optimizer and one wrapper give, or a refusal."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.optim import AccumAdamW, DmSGD, QGDmSGD, compiled, decay_groups
from common.parallel import DataParallel, DecentralizedDataParallel, Outer
from common.simulate import simulate
from tests.distributed.processes import run_processes
from tests.naming import case

N, STEPS = 2, 5
LAYOUTS = ("one wrapper", "two wrappers", "two optimizers")


class Net(nn.Module):
    """Two halves of different sizes, each with weights and biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 6))
        self.head = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def adam(*modules: nn.Module, fused: bool) -> AccumAdamW:
    groups = [group for module in modules for group in decay_groups(module, 0.1)]
    return AccumAdamW(groups, lr=0.02, accumulation_steps=2, fused=fused)


def optimizers(layout: str, net: Net, fused: bool) -> list[AccumAdamW]:
    if layout != "two optimizers":
        return [adam(net.body, net.head, fused=fused)]
    return [adam(net.body[0], net.head[2], fused=fused), adam(net.body[2], net.head[0], fused=fused)]


def attach(layout: str, net: Net, wrappers: list[DataParallel], fused: bool) -> list[Optimizer]:
    made = optimizers(layout, net, fused)
    for wrapper in wrappers:
        for optimizer in made:
            wrapper.attach(optimizer)
    return made


def steps(rank: int, nets: list[Net], wrappers: list[list[DataParallel]], made: list[list[Optimizer]]) -> list[Tensor]:
    for step in range(STEPS):
        for worker, net in enumerate(nets):
            for wrapper in wrappers[worker]:
                wrapper.before_forward()
            generator = torch.Generator().manual_seed(100 * step + rank + worker)
            x, y = (torch.randn(8, k, generator=generator).to(net.head[0].weight.dtype) for k in (4, 2))
            (net.head(net.body(x)) - y).square().mean().backward()
        for of_worker in made:
            for optimizer in of_worker:
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach().clone() for net in nets for parameter in net.parameters()]


def real(rank: int, n: int, options: list[dict]) -> list[list[Tensor]]:
    compiled.fused_kernel = compiled.written_kernel  # takes no time to compile
    results = []
    for option in options:
        for layout in LAYOUTS:
            net = Net()
            modules = [net.body, net.head] if layout == "two wrappers" else [net]
            wrappers = [DecentralizedDataParallel(module, "complete", **option) for module in modules]
            made = attach(layout, net, wrappers, fused=layout != "one wrapper")
            results.append(steps(rank, [net], [wrappers], [made]))
            for wrapper in wrappers:
                wrapper.close()
            assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())
            if layout != "one wrapper":  # moved after close(): still trained
                moved = steps(rank, [net.double()], [[]], [made])
                assert all((b - a).abs().max() > 1e-4 for b, a in zip(moved, results[-1], strict=True))
    return results


def simulated(options: list[dict]) -> Iterator[list[Tensor]]:
    for option in options:
        for layout in LAYOUTS:
            if layout == "two wrappers":
                halves = [simulate(part, N, topology="complete", **option) for part in (Net().body, Net().head)]
                nets = [Net() for _ in range(N)]
                for net, body, head in zip(nets, *halves, strict=True):
                    net.body, net.head = body.module, head.module
                wrappers = [list(pair) for pair in zip(*halves, strict=True)]
            else:
                replicas = simulate(Net(), N, topology="complete", **option)
                nets, wrappers = [replica.module for replica in replicas], [[replica] for replica in replicas]
            made = [attach(layout, *pair, fused=layout != "one wrapper") for pair in zip(nets, wrappers, strict=True)]
            yield steps(0, nets, wrappers, made)


@pytest.mark.usefixtures("eager_kernel")
def test_optimizers_and_wrappers_in_any_number_equal_one_of_each() -> None:
    options = [{}, {"order": "atc"}, {"local_steps": 3, "merge_after": 1}]
    processes, together = run_processes(real, N, options), list(simulated(options))
    for index in range(len(together)):
        wanted = together[index - index % len(LAYOUTS)]
        got = processes[0][index] + processes[1][index]
        for engine, values in (("processes", got), ("simulator", together[index])):
            with case(engine, options[index // len(LAYOUTS)], LAYOUTS[index % len(LAYOUTS)]):
                torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [DmSGD, QGDmSGD])
def test_a_momentum_method_is_of_one_wrapper(make: type) -> None:
    halves = [simulate(part, N, topology="complete", order="atc") for part in (Net().body, Net().head)]
    optimizer = make([p for half in halves for p in half[0].parameters()], lr=0.1)
    halves[0][0].attach(optimizer)
    with pytest.raises(ValueError, match=rf"attach: this {make.__name__}.* is attached already.*for each wrapper"):
        halves[1][0].attach(optimizer)
    halves[0][0].close()
    halves[1][0].attach(optimizer)


def fused_on_one(rank: int, n: int) -> None:
    net = Net()
    wrapper = DecentralizedDataParallel(net, "complete", timeout_s=20)
    with pytest.raises(RuntimeError, match=r"fused AccumAdam\(W\)"):
        wrapper.attach(adam(net, fused=rank == 0))
    wrapper.attach(adam(net, fused=False))  # what was refused has left nothing
    wrapper.close()


def test_ranks_must_agree_whether_an_optimizer_is_fused() -> None:
    run_processes(fused_on_one, N)


@pytest.mark.parametrize("added", [False, True], ids=["unfrozen", "added group"])
def test_a_parameter_that_is_trained_but_not_mixed_is_named_once(added: bool, recwarn: pytest.WarningsRecorder) -> None:
    net = Net()
    net.body.requires_grad_(False)
    replicas = simulate(net, N, topology="complete")
    nets = [replica.module for replica in replicas]
    made = [torch.optim.SGD((net.head if added else net).parameters(), lr=0.1) for net in nets]
    for replica, optimizer in zip(replicas, made, strict=True):
        replica.attach(optimizer)
    for thaw in (False, True):
        for net, optimizer in zip(nets, made, strict=True):
            net.body.requires_grad_(thaw)
            if thaw and added:
                optimizer.add_param_group({"params": list(net.body.parameters())})
        steps(0, nets, [[replica] for replica in replicas], [[optimizer] for optimizer in made])
        found = [str(warning.message) for warning in recwarn if "trained" in str(warning.message)]
        assert len(found) == thaw  # of all workers: a repeated warning is shown once
    assert found[0].startswith("parameter 'body.0.weight' is trained, but was frozen or missing")


@pytest.mark.usefixtures("eager_kernel")
def test_a_communication_state_is_resumed_in_another_layout_and_in_one_order() -> None:
    """Saved in the order of the module, resumed where a fused optimizer has laid out weights and biases apart."""
    options = {"topology": "complete", "local_steps": 4, "merge_after": 2, "outer": Outer(0.7, 0.9)}

    def start(fused: bool) -> tuple[list[DataParallel], list[Net], list[Optimizer]]:
        replicas = simulate(Net(), N, **options)
        nets = [replica.module for replica in replicas]
        made = [adam(net.body, net.head, fused=fused) for net in nets]
        for replica, optimizer in zip(replicas, made, strict=True):
            replica.attach(optimizer)
        return replicas, nets, made

    def further(replicas: list[DataParallel], nets: list[Net], made: list[Optimizer]) -> list[Tensor]:
        return steps(0, nets, [[replica] for replica in replicas], [[optimizer] for optimizer in made])

    first = start(fused=False)
    further(*first)  # 5 updates: inside a round
    saved = [
        ({k: v.clone() for k, v in source().items()} for source in (replica.state_dict, replica.communication_state))
        for replica in first[0]
    ]
    saved = [tuple(states) for states in saved]
    second = start(fused=True)
    for replica, optimizer, former, (model, communication) in zip(second[0], second[2], first[2], saved, strict=True):
        replica.load_state_dict(model)
        replica.load_clock(STEPS)
        replica.load_communication_state(communication)
        state = former.state_dict()
        for group in state["param_groups"]:
            group |= {"fused": True, "foreach": None}
        optimizer.load_state_dict(state)
    torch.testing.assert_close(further(*second), further(*first), rtol=1e-5, atol=1e-6)

    for replica, (model, communication) in zip(second[0], saved, strict=True):
        replica.load_clock(STEPS)
        replica.load_communication_state(communication)
        replica.load_state_dict(model)
    with pytest.raises(RuntimeError, match="anchors of the round are missing: call load_communication_state"):
        further(*second)
    other = simulate(nn.Sequential(nn.Linear(20, 4), nn.Linear(4, 20), nn.Linear(2, 6)), N, **options)[0]
    with pytest.raises(ValueError, match="communication state: "):
        other.load_communication_state(communication)
