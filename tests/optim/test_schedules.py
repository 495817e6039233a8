"""Schedules: the learning rate that update number t uses, against values worked out by hand."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR

from common.optim import Constant, Cosine, InverseSquareRoot, MultiStep


def make_optimizer(*lrs):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs or (1.0,)])


def lrs_used(optimizer, scheduler, n_updates):
    """Return the lr of every group in each of the next updates."""
    used = []
    for _ in range(n_updates):
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


def first_group(used):
    return [lrs[0] for lrs in used]


SCHEDULES = {
    "constant": Constant(warmup_steps=4, warmup_start=0.2),
    "cosine": Cosine(total_steps=12, warmup_steps=4, warmup_start=0.2, final_fraction=0.01),
    "inverse_square_root": InverseSquareRoot(warmup_steps=4, warmup_start=0.2),
    "multistep": MultiStep(milestones=(6, 8), warmup_steps=4, warmup_start=0.2),
}
CASES = pytest.mark.parametrize("factor", SCHEDULES.values(), ids=SCHEDULES.keys())


@CASES
def test_warmup_is_linear_and_reaches_the_base_lr_exactly(factor):
    optimizer = make_optimizer(0.3, 0.7)
    used = lrs_used(optimizer, LambdaLR(optimizer, factor), 5)
    for t, share in enumerate([0.2, 0.4, 0.6, 0.8]):
        assert used[t] == pytest.approx([0.3 * share, 0.7 * share], rel=1e-14)
    assert used[4] == [0.3, 0.7]


def test_cosine_values():
    optimizer = make_optimizer(2.0)
    factor = Cosine(total_steps=10, warmup_steps=2, final_fraction=0.1)
    used = lrs_used(optimizer, LambdaLR(optimizer, factor), 13)
    cos45 = math.sqrt(0.5)
    expected = {2: 1, 4: 0.1 + 0.45 * (1 + cos45), 6: 0.55, 8: 0.1 + 0.45 * (1 - cos45), 10: 0.1, 12: 0.1}
    for t, share in expected.items():
        assert used[t][0] == pytest.approx(2 * share, rel=1e-14)
    assert used[10][0] == 2 * 0.1  # exactly, and for good
    assert used[9][0] > used[10][0]


def test_cosine_without_warmup_is_that_of_torch():
    ours, theirs = make_optimizer(0.5), make_optimizer(0.5)
    schedule = LambdaLR(ours, Cosine(total_steps=9, final_fraction=0.04))
    torch_schedule = CosineAnnealingLR(theirs, T_max=9, eta_min=0.02)
    assert first_group(lrs_used(ours, schedule, 10)) == pytest.approx(
        first_group(lrs_used(theirs, torch_schedule, 10)), rel=1e-13
    )


def test_cosine_once_an_epoch_is_that_of_torch_stepped_by_epochs():
    updates, epochs = 3, 5
    ours, theirs = make_optimizer(0.4), make_optimizer(0.4)
    schedule = LambdaLR(ours, Cosine(total_steps=updates * epochs, hold=updates))
    used = first_group(lrs_used(ours, schedule, updates * epochs))
    expected = first_group(lrs_used(theirs, CosineAnnealingLR(theirs, epochs), epochs))
    assert used == pytest.approx([lr for lr in expected for _ in range(updates)])


def test_inverse_square_root_values():
    """The warm-up begins at zero by default."""
    optimizer = make_optimizer(0.5)
    used = first_group(lrs_used(optimizer, LambdaLR(optimizer, InverseSquareRoot(warmup_steps=4)), 65))
    assert [used[t] for t in (0, 2, 4, 16, 64)] == [0.0, 0.25, 0.5, 0.25, 0.125]
    assert used[5] == pytest.approx(0.5 * math.sqrt(4 / 5), rel=1e-15)


def test_inverse_square_root_counted_from_one_is_that_of_the_papers_code():
    """transformer/src/utils.py there: the warm-up reaches lr one update earlier, and starts above warmup_start."""
    warmup, start = 4, 0.01

    def theirs(step):
        if step < warmup:
            return (1 - start) * (step + 1) / warmup + start
        return warmup**0.5 * (step + 1) ** -0.5

    optimizer = make_optimizer()
    factor = InverseSquareRoot(warmup_steps=warmup, warmup_start=start, first=1)
    used = first_group(lrs_used(optimizer, LambdaLR(optimizer, factor), 12))
    assert used == pytest.approx([theirs(step) for step in range(12)], rel=1e-14)
    assert used[warmup - 1] == 1.0


def test_multistep_values_and_torch_without_warmup():
    optimizer = make_optimizer()
    schedule = LambdaLR(optimizer, MultiStep(milestones=(3, 5), gamma=0.5))
    used = first_group(lrs_used(optimizer, schedule, 7))
    assert used == [1, 1, 1, 0.5, 0.5, 0.25, 0.25]
    other = make_optimizer()
    torch_schedule = MultiStepLR(other, [3, 5], gamma=0.5)
    assert used == first_group(lrs_used(other, torch_schedule, 7))


@CASES
def test_state_dict_and_pickle_round_trip(factor):
    optimizer = make_optimizer(0.3, 0.7)
    scheduler = LambdaLR(optimizer, factor)
    lrs_used(optimizer, scheduler, 5)
    file = io.BytesIO()
    torch.save({"scheduler": scheduler.state_dict(), "optimizer": optimizer.state_dict()}, file)
    pickled = pickle.dumps(scheduler.lr_lambdas)
    expected = lrs_used(optimizer, scheduler, 6)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make_optimizer(0.3, 0.7)
    resumed_scheduler = LambdaLR(resumed, factor)
    resumed_scheduler.load_state_dict(saved["scheduler"])
    resumed.load_state_dict(saved["optimizer"])
    assert lrs_used(resumed, resumed_scheduler, 6) == expected
    assert pickle.loads(pickled) == scheduler.lr_lambdas
    assert copy.deepcopy(scheduler.lr_lambdas) == scheduler.lr_lambdas


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (Cosine, {"total_steps": 0}, "total_steps=0: expected an integer >= 1"),
        (Cosine, {"total_steps": 5, "warmup_steps": 5}, "warmup_steps=5: expected fewer than total_steps=5"),
        (Cosine, {"total_steps": 5, "warmup_start": 1.5}, r"warmup_start=1.5: expected a number in \[0, 1\]"),
        (Cosine, {"total_steps": 5, "final_fraction": 2}, r"final_fraction=2: expected a number in"),
        (Cosine, {"total_steps": 5, "hold": 0}, "hold=0: expected an integer >= 1"),
        (InverseSquareRoot, {}, "warmup_steps=0: expected an integer >= 1"),
        (InverseSquareRoot, {"warmup_steps": 1, "first": -1}, "first=-1: expected an integer >= 0"),
        (MultiStep, {"milestones": (5, 5)}, r"milestones=\(5, 5\): expected strictly increasing"),
        (MultiStep, {"milestones": (2, 5), "warmup_steps": 3}, r"milestones\[0\]=2: expected an integer >= 3"),
        (MultiStep, {"milestones": (2.5,)}, r"milestones\[0\]=2.5: expected an integer"),
        (MultiStep, {"milestones": (2,), "gamma": -1}, r"gamma=-1: expected a number in \[0, 1\]"),
        (Constant, {"warmup_steps": True}, "warmup_steps=True: expected an integer >= 0"),
    ],
)
def test_bad_arguments(schedule, options, message):
    with pytest.raises(ValueError, match=message):
        schedule(**options)
