"""The wrappers in one process without a process group: arguments, `attach`, names, and no-op collectives."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.parallel import AllReduceDataParallel, DecentralizedDataParallel, collectives
from common.simulate import simulate
from common.topology import build


def wrap(**options: Any) -> DecentralizedDataParallel:
    return DecentralizedDataParallel(**{"module": nn.Linear(2, 2), "topology": "ring"} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "cta"}, "order='cta': expected 'awc'"),
        ({"transport": "pigeon"}, "transport='pigeon': expected 'auto', 'send_recv' or 'subgroup'"),
        ({"bucket_mb": 0}, r"bucket_mb=0: expected a number in \[1e-09, 1e\+09\] \(MiB\)"),
        ({"bucket_mb": float("nan")}, "bucket_mb=nan"),
        ({"timeout_s": 0}, r"timeout_s=0: expected a number in \[0.001, 1e\+09\] \(seconds\)"),
        ({"timeout_s": -1.0}, "timeout_s=-1.0"),
        ({"timeout_s": float("inf")}, "timeout_s=inf: expected a number in"),
        ({"timeout_s": 1e300}, r"timeout_s=1e\+300: expected a number in"),
        ({"message_dtype": torch.int16}, "message_dtype=torch.int16: expected a floating point dtype"),
        ({"message_dtype": torch.complex64}, "message_dtype=torch.complex64: expected a floating point dtype"),
        ({"message_dtype": "bfloat16"}, "message_dtype='bfloat16': expected a torch.dtype or None"),
        ({"ranks_per_worker": 0}, "ranks_per_worker=0: expected a positive divisor of the number of ranks, 1"),
        ({"ranks_per_worker": 2}, "ranks_per_worker=2"),
        ({"topology": "rink"}, "topology: expected one of .*did you mean 'ring'"),
        ({"topology": build("ring", 4)}, "topology ring is for 4 workers, but there are 1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(**options)


@pytest.mark.parametrize("options", [{"bucket_mb": 0}, {"timeout_s": 0}, {"timeout_s": 1e300}, {"bucket_mb": 1e300}])
def test_bad_arguments_of_allreduce(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value}: expected")):
        AllReduceDataParallel(nn.Linear(2, 2), **options)


def test_a_part_of_the_ranks_is_no_option() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'process_group'; workers are all ranks of the"):
        wrap(process_group=None)


WRAPPERS = (wrap, lambda module: AllReduceDataParallel(module), lambda module: simulate(module, 1))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2, device="meta")),
            r"module: '0.weight' is on the meta device; expected val",
        ),
        (lambda: nn.BatchNorm1d(2, affine=False, device="meta"), r"module: 'running_mean' is on the meta device"),
        (lambda: nn.LazyLinear(2), "module: 'weight' has no shape yet; expected a forward of the lazy module"),
        (
            lambda: wrap(),
            r"the module itself is a DecentralizedDataParallel; expected the module inside it \(.module\)",
        ),
        (lambda: nn.Sequential(wrap()), "submodule '0' is a DecentralizedDataParallel"),
        (lambda: nn.Sequential(AllReduceDataParallel(nn.Linear(2, 2))), "submodule '0' is a AllReduceDataParallel"),
        (lambda: simulate(nn.Linear(2, 2), 1)[0], "the module itself is a SimulatedReplica"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "the module itself is a DataParallel"),
        (lambda: torch.compile(wrap()), "submodule '_orig_mod' is a DecentralizedDataParallel"),
    ],
)
def test_modules_without_values_and_wrapped_ones_are_refused(module: Callable[[], nn.Module], message: str) -> None:
    for wrapper in WRAPPERS:
        with pytest.raises(ValueError, match=message):
            wrapper(module=module())


def test_a_parameter_is_in_one_open_wrapper() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    replica = simulate(net, 2)[1]
    for make, module in ((lambda: wrap(module=net[0]), net), (lambda: replica, replica.module)):
        former = make()
        for wrapper in WRAPPERS[:2]:
            with pytest.raises(ValueError, match=r"another \w+ holds parameter '.*weight'; expected each parameter in"):
                wrapper(module=module)
        former.close()
        wrap(module=module)
    wrap(module=net)  # nobody uses the other one any more, so it need not have been closed


def test_rounded_messages_of_complex_parameters_are_refused() -> None:
    module = nn.Linear(2, 2, dtype=torch.complex64)
    for dtype in (torch.bfloat16, torch.int8):
        with pytest.raises(ValueError, match="with complex parameters: expected None"):
            wrap(module=module, message_dtype=dtype)
    with pytest.raises(ValueError, match="hook=fp16 with complex parameters: expected None"):
        AllReduceDataParallel(module, hook="fp16")
    assert wrap(module=module).consensus_distance() == 0


def test_a_topology_that_knows_hosts_warns_where_the_launcher_says_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.warns(UserWarning, match="topology aer takes every worker for a host, .* workers_per_host=8, or 1"):
        assert wrap(topology="aer").topology.workers_per_host == 1
    with warnings.catch_warnings(action="error"):
        for options in (
            {"topology": "ring"},
            {"topology": "aer", "workers_per_host": 1},
            {"topology": build("aer", 1)},
        ):
            wrap(**options)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        wrap(topology="aer")


@pytest.mark.parametrize("wrapper", [DecentralizedDataParallel, AllReduceDataParallel])
def test_announced_processes_without_a_process_group(wrapper: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = ("ring",) if wrapper is DecentralizedDataParallel else ()
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2 but torch.distributed is not initialised"):
        wrapper(nn.Linear(2, 2), *arguments)
    monkeypatch.setenv("WORLD_SIZE", "1")
    wrapper(nn.Linear(2, 2), *arguments)


def test_attach_refuses_foreign_and_attached_optimizers() -> None:
    model = wrap()
    with pytest.raises(ValueError, match="the optimizer holds none of this module's parameters"):
        model.attach(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert model.attach(optimizer) is optimizer
    with pytest.raises(ValueError, match="attached already"):
        model.attach(optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.averaged(), pytest.raises(RuntimeError, match=r"attach\(\) inside `with model.averaged\(\)`"):
        model.attach(other)
    model.close()
    with pytest.raises(RuntimeError, match=r"attach\(\) after close\(\): wrap model.module anew"):
        model.attach(other)


def test_training_without_an_attached_optimizer_is_refused() -> None:
    model, x = wrap(), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match=r"no optimizer is attached: call model.attach\(optimizer\)"):
        model(x)
    with torch.no_grad():
        model(x)
    model.eval()(x)


def test_a_clock_is_a_number_of_updates() -> None:
    model = wrap(timeout_s=np.int64(5))
    with pytest.raises(ValueError, match="clock=-1: expected the number of committed updates, >= 0"):
        model.load_clock(-1)
    model.load_clock(np.int64(3))
    assert type(model.clock) is int


def test_module_without_trainable_parameters() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    model = DecentralizedDataParallel(module, "complete")
    assert model.consensus_distance() == 0
    with model.averaged() as mean:
        assert mean is module


def test_collectives_are_no_ops() -> None:
    values = torch.tensor([1.0, 2.0])
    assert collectives.sum_over_ranks(values) is values
    collectives.broadcast_from_first([values])
    collectives.mean_over_ranks_([values], 1)
    assert values.tolist() == [1, 2]
    assert (collectives.world_size(), collectives.rank()) == (1, 0)
