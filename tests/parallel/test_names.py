"""A wrapper looks like the bare module: in state dicts, also of modules that hold it, in names, and to the compiler."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from common.optim import AccumAdamW, DmSGD
from common.parallel import AllReduceDataParallel, DataParallel, DecentralizedDataParallel, Outer
from common.simulate import simulate


def bare() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


class Pair(nn.Module):
    """Two models that are trained together."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.generator = wrap(bare())
        self.module = wrap(nn.ModuleDict({"0": nn.Linear(1, 1), "module": nn.Sequential(nn.Linear(1, 1))}))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "gossip": lambda module: DecentralizedDataParallel(module, "ring"),
    "gossip of a compiled module": lambda module: DecentralizedDataParallel(
        torch.compile(module, backend="eager"), "ring"
    ),
    "all-reduce": AllReduceDataParallel,
    "simulated": lambda module: simulate(module, 2)[0],
}


@pytest.mark.parametrize("outer", ["container", "compiled"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_module_that_holds_a_wrapper_saves_and_loads_bare_names(wrapper: str, outer: str) -> None:
    def build(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        return Pair(wrap) if outer == "container" else torch.compile(wrap(bare()), backend="eager")

    plain, wrapped = build(lambda module: module), build(WRAPPERS[wrapper])
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for strict in (True, False):
        state = {name: torch.full_like(tensor, 1 + strict) for name, tensor in plain.state_dict().items()}
        assert str(wrapped.load_state_dict(state, strict=strict)) == "<All keys matched successfully>"
        assert all((tensor == 1 + strict).all() for tensor in wrapped.state_dict().values())
        plain.load_state_dict(wrapped.state_dict())
    state.pop(missing := next(iter(state)))
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict(state)
    assert missing not in state


def test_a_load_that_fails_sets_anchors_too() -> None:
    model = DecentralizedDataParallel(nn.Linear(1, 1), "ring", local_steps=2, merge_after=1, outer=Outer(0.5))
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"weight": torch.full((1, 1), 7.0)})
    assert 7 in model.communication_state()["anchor.0"]


def test_names_of_modules_are_bare() -> None:
    model, module = DecentralizedDataParallel(bare(), "ring"), bare()
    assert [name for name, _ in model.named_modules()] == ["", *(name for name, _ in module.named_modules())]
    assert model.get_submodule("2") is model.module[2]
    assert model.get_parameter("2.weight") is model.module[2].weight
    assert len(list(model.modules())) == 1 + len(list(module.modules()))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel, lambda m: torch.save(m, io.BytesIO())]
)
def test_a_wrapper_is_not_copied_but_its_module_is(wrapper: str, copied: Callable[[Any], object]) -> None:
    model = WRAPPERS[wrapper](bare())
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: .* expected model.module"):
        copied(model)
    copied(model.bare_module)


def test_a_start_from_loaded_parameters_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    model = DecentralizedDataParallel(bare(), "ring", "atc")
    optimizer = model.attach(DmSGD(model.parameters(), lr=0.1))
    optimizer.init_state()
    model.load_state_dict(bare().state_dict())
    optimizer.step()
    assert not [warning for warning in recwarn if "load_clock" in str(warning.message)]


@pytest.mark.parametrize("clock", [None, 3])
def test_a_resume_without_its_clock_is_warned_of(clock: int | None) -> None:
    def build() -> tuple[DataParallel, torch.optim.Optimizer]:
        model = DecentralizedDataParallel(bare(), "ring")
        return model, model.attach(torch.optim.Adam(model.parameters()))

    def step(model: DataParallel, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 2)).square().mean().backward()
        optimizer.step()

    former, resumed = build(), build()
    for _ in range(3):
        step(*former)
    for new, old in zip(resumed, former, strict=True):
        new.load_state_dict(old.state_dict())
    if clock is not None:
        resumed[0].load_clock(clock)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*resumed)
    said = [str(warning.message) for warning in caught if "load_clock(updates)" in str(warning.message)]
    assert len(said) == (clock is None)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, lambda p, lr: AccumAdamW(p, lr, fused=False)])
def test_a_compiled_wrapper_is_compiled_once(optimizer: Callable) -> None:
    torch._dynamo.reset()
    model = DecentralizedDataParallel(bare(), "ring")
    compiled, optimizer = torch.compile(model, backend="eager"), model.attach(optimizer(model.parameters(), lr=0.1))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            compiled(torch.ones(2, 2)).square().mean().backward()
            optimizer.step()
    assert model.clock == 4
