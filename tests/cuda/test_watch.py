"""What the host cannot see while it runs ahead: messages that do not arrive, a module on another device."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from common.parallel.checks import check_device
from common.parallel.process_groups import WATCH_FIRST, patience
from common.parallel.streams import Stalls, Watch
from tests.cuda.device import Event, Trace, Work, emulated
from tests.cuda.test_order import Training

SHORT = timedelta(seconds=0.1)


def test_messages_that_do_not_arrive_are_named_once_and_in_order() -> None:
    told: list[str] = []
    watch = Watch(SHORT, told.append)
    arrived = threading.Event()
    watch.add(lambda: True, lambda: "the first")
    watch.add(arrived.is_set, lambda: "the second")
    watch.add(lambda: False, lambda: "the third")
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert told == ["the second"]
    watch.close()


def test_messages_that_arrive_late_but_in_time_are_not_named() -> None:
    told: list[str] = []
    watch = Watch(timedelta(seconds=1), told.append)
    arrived = threading.Event()
    watch.add(arrived.is_set, lambda: "late")
    time.sleep(0.3)
    arrived.set()
    time.sleep(1.2)
    assert told == []
    watch.close()


def test_a_round_that_does_not_arrive_is_reported_with_rank_peers_bucket_and_step(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with emulated() as here, patch.object(Work, "is_completed", lambda self: False):
        training = Training("ring", workers_per_host=1, optimizer="sgd", options={"timeout_s": 0.1})
        model = training.run(here, steps=0)
        model.mixer.set_clock(3)
        model.mixer.launch()
        deadline, said = time.monotonic() + 10, ""
        while "\n" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
        model.close()
    assert "rank 1: gossip step 3 failed exchanging with rank(s) [0, 2], bucket 1 of 5" in said
    assert said.count("\n") == 1


def test_process_groups_wait_longer_than_the_watch_only_where_the_host_runs_ahead() -> None:
    assert patience(SHORT, torch.device("cpu")) == SHORT
    assert patience(SHORT, torch.device("cuda", 0)) == SHORT + WATCH_FIRST


def test_stalls_are_counted_when_the_device_has_passed_them() -> None:
    with emulated() as here:
        here.trace = Trace(0, 1)
        stalls = Stalls(torch.device("cpu"))
        with stalls.measured():
            pass
        with patch.object(Event, "query", lambda self: False):
            assert stalls.passed() == 0
        with patch.object(Event, "elapsed_time", lambda self, other: 3.0):
            assert stalls.passed() == pytest.approx(0.003)
            assert stalls.passed() == 0


def test_a_module_on_another_gpu_is_refused() -> None:
    first, second = (SimpleNamespace(device=torch.device("cuda", index)) for index in range(2))
    with patch("torch.cuda.current_device", lambda: 0):
        assert check_device([first, first]) == torch.device("cuda", 0)
        with pytest.raises(ValueError, match=r"module on cuda:1, .* is cuda:0: call torch.cuda.set_device\(1\)"):
            check_device([second])
        with pytest.raises(ValueError, match=r"module on devices \['cuda:0', 'cuda:1'\]"):
            check_device([first, second])
    assert check_device([]) == torch.device("cpu")
