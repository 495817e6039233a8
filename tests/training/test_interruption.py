"""When ranks agree on whether to stop: by steps while these are short, after every step where it is long."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from common.training import interruption
from common.training.interruption import EVERY, Interruption, Request


class Peer:
    """A second rank, whose step takes `step_s`, and the clock of this one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float = 0.0) -> None:
        self.now, self.step_s, self.agreements = 0.0, step_s, 0
        monkeypatch.setattr(interruption, "is_distributed", lambda: True)
        monkeypatch.setattr(interruption.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)

    def all_reduce(self, asked: Tensor, *_: object, async_op: bool) -> SimpleNamespace:
        self.agreements += 1
        if self.agreements > 1:  # nobody knows a time before
            asked[1] = max(float(asked[1]), self.step_s)
        return SimpleNamespace(wait=lambda: None)

    def steps(self, asking: Interruption, step_s: float, first: int, last: int) -> list[int]:
        """Take steps of this length; return those after which the ranks agree."""
        agreed = []
        for step in range(first, last + 1):
            self.now += step_s
            before = self.agreements
            assert asking.requested(step) is Request.NOTHING
            agreed += [step] * (self.agreements - before)
        return agreed


def test_short_steps_are_followed_by_an_agreement_once_in_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(monkeypatch)
    assert peer.steps(Interruption(torch.device("cpu")), 0.01, 1, 35) == [1, 2, 3, 13, 23, 33]
    assert peer.steps(Interruption(torch.device("cpu"), every=4), 0.01, 101, 112) == [101, 102, 103, 107, 111]


@pytest.mark.parametrize(("own", "others"), [(3.0, 0.01), (0.01, 3.0)])
def test_long_steps_of_any_rank_are_each_followed_by_an_agreement(
    own: float, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer(monkeypatch, others)
    assert peer.steps(Interruption(torch.device("cpu")), own, 1, 9) == [*range(1, 10)]


def test_steps_that_become_long_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, asking = Peer(monkeypatch), Interruption(torch.device("cpu"))
    assert peer.steps(asking, 0.01, 1, 13)[-1] == 13
    assert peer.steps(asking, 3.0, 14, 40) == [23, *range(33, 41)]


def test_a_long_step_is_followed_by_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, asking = Peer(monkeypatch), Interruption(torch.device("cpu"))
    peer.steps(asking, 40.0, 1, 20)
    asking._ask(15, None)
    assert asking.requested(21) is Request.NOTHING
    assert asking.requested(22) is Request.STOP


def test_a_membership_begins_with_an_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members have counted different steps since their last one."""
    peer, asking = Peer(monkeypatch), Interruption(torch.device("cpu"))
    peer.steps(asking, 0.01, 1, EVERY)
    asking.reset()
    assert peer.steps(asking, 0.01, EVERY + 1, EVERY + 3) == [EVERY + 1, EVERY + 2, EVERY + 3]
