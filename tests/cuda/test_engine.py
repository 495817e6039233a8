"""The branch for GPUs on an emulated device: what is queued in a step, and what the host cannot see."""

import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from common.optim import AccumAdamW, DmSGD
from common.parallel import DecentralizedDataParallel, GradScaler, Outer
from common.parallel.checks import check_device
from common.parallel.process_groups import WATCH_FIRST, group_timeout
from common.parallel.streams import Stalls, Watch
from common.topology import build
from tests.cuda.device import Event, Trace, Work, emulated
from tests.cuda.matcher import depends_on
from tests.host_sync import NoHostSync
from tests.waiting import wait_for

WORKERS, RANK = 8, 1
OPTIMIZERS = {
    "fused": lambda p: AccumAdamW(p, lr=0.1, weight_decay=0.1, accumulation_steps=2, fused=True),
    "dmsgd": lambda p: DmSGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}
BETWEEN_HOSTS = build("one_peer_exponential", WORKERS, 2, between_hosts=True)
LOCAL = {"local_steps": 3, "merge_after": 2, "outer": Outer(0.4, 0.9)}


@pytest.fixture
def here(eager_kernel: None) -> Iterator[SimpleNamespace]:
    """An emulated device; the fused kernel runs as written."""
    with emulated() as device:
        yield device


def train(
    here: SimpleNamespace, steps: int, optimizer: str = "sgd", fp16: bool = False, **options: Any
) -> DecentralizedDataParallel:
    """Run some steps of one rank of eight, in five buckets unless options say otherwise."""
    here.trace = Trace(RANK, WORKERS)
    here.trace.label = "start"
    module = nn.Sequential(nn.Linear(16, 20), nn.Linear(20, 5))
    model = DecentralizedDataParallel(module, **{"topology": "ring", "bucket_mb": 100 * 4 / 2**20} | options)
    attached = model.attach(OPTIMIZERS[optimizer](model.parameters()))
    scaler = GradScaler("cpu", enabled=fp16)
    for step in range(steps):
        here.trace.label = f"step {step}"
        scaler.scale(model(torch.zeros(2, 16)).square().sum()).backward()
        scaler.step(attached)
        scaler.update()
        attached.zero_grad()
    here.trace.label = "end"
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"topology": "aer", "workers_per_host": 2, "optimizer": "fused"},
        {"topology": "aer", "workers_per_host": 2, "message_dtype": torch.int8},
        {"topology": BETWEEN_HOSTS, "optimizer": "fused", "fp16": True},
        {"topology": "complete", "order": "atc", "optimizer": "dmsgd"},
        {"fragments": 3, **LOCAL},
    ],
    ids=str,
)
def test_no_step_syncs_with_the_host(options: dict[str, Any], here: SimpleNamespace) -> None:
    with NoHostSync():
        train(here, steps=4, **options)
    assert [entry.label for entry in here.trace.entries if entry.what == "host sync" and "step" in entry.label] == []
    assert sum(entry.group is not None and "step" in entry.label for entry in here.trace.entries) >= 2


def assert_ordered(here: SimpleNamespace, **options: Any) -> None:
    """Check that messages come after what wrote the parameters, and what comes after the merge after its messages."""
    mixer, trace = train(here, steps=0, **options).mixer, here.trace
    written = trace.queue("kernel")
    mixer.launch()
    posted = [number for number in range(written + 1, len(trace.entries)) if trace.entries[number].group is not None]
    assert posted
    assert all(depends_on(trace, number, [written]) for number in posted)
    mixer.merge()
    merged = trace.queue("kernel")
    assert depends_on(trace, merged, posted) == posted


@pytest.mark.parametrize("options", [{}, {"topology": BETWEEN_HOSTS}, {"topology": "complete"}], ids=str)
def test_streams_order_parameters_messages_and_merges(options: dict[str, Any], here: SimpleNamespace) -> None:
    assert_ordered(here, **options)


FAULTS = {
    "the side stream does not wait for the parameters": ("tests.cuda.device.Stream.wait_stream", lambda *_: None),
    "the merge does not wait for the side stream": ("tests.cuda.device.Stream.wait_event", lambda *_: None),
    "the merge does not wait for its messages": ("tests.cuda.device.Work.wait", lambda *_: True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_is_found(fault: str, here: SimpleNamespace) -> None:
    with patch(*FAULTS[fault]), pytest.raises(AssertionError):
        assert_ordered(here, topology="ring" if "its messages" in fault else BETWEEN_HOSTS)


@pytest.mark.parametrize("options", [{"topology": "aer", "workers_per_host": 2}, {}], ids=["aer", "ring"])
def test_merging_a_bucket_waits_for_no_message_of_the_next_round(options: dict, here: SimpleNamespace) -> None:
    mixer, trace = train(here, steps=0, optimizer="fused", **options).mixer, here.trace
    mixer.launch()
    posted = len(trace.entries)
    for _ in mixer.arriving():
        kernel = trace.queue("kernel")
        later = [number for number in range(posted, kernel) if trace.entries[number].group is not None]
        assert depends_on(trace, kernel, later) == []
    assert sum(entry.group is not None for entry in trace.entries[posted:]) >= len(mixer.buckets) > 2


def test_one_batch_carries_all_buckets_that_leave_together(here: SimpleNamespace) -> None:
    model = train(here, steps=2)
    batches = [entry for entry in here.trace.entries if entry.what == "batch" and entry.label == "step 1"]
    assert [len(batch.transfers) for batch in batches] == [4 * len(model.mixer.buckets)]


def test_hosts_average_inside_by_collectives(here: SimpleNamespace) -> None:
    model = train(here, steps=1, topology=BETWEEN_HOSTS)
    kinds = [entry.what for entry in here.trace.entries if entry.group is not None and entry.label == "step 0"]
    assert kinds[:3] == ["reduce_scatter", "batch", "all_gather"]
    assert kinds.count("batch") >= len(model.mixer.buckets)


def test_buckets_are_large_unless_told_otherwise(here: SimpleNamespace) -> None:
    assert len(train(here, steps=0, bucket_mb="auto").mixer.buckets) == 1


def test_exposed_time_is_that_of_the_stream(here: SimpleNamespace) -> None:
    with patch.object(Event, "elapsed_time", lambda *_: 2.0):
        model = train(here, steps=3)
    assert model.counters.exposed_s == pytest.approx(3 * len(model.mixer.buckets) * 0.002)


# -- what the host cannot see while it runs ahead

SHORT = timedelta(seconds=0.1)


def test_messages_that_do_not_arrive_are_named_once_and_in_order() -> None:
    told: list[str] = []
    watch, soon, late = Watch(SHORT), threading.Event(), threading.Event()
    with patch.object(sys.stderr, "write", told.append):
        watch.add(soon.is_set, lambda: "the first")  # in time
        soon.set()
        watch.add(late.is_set, lambda: "the second")
        watch.add(lambda: False, lambda: "the third")
        wait_for(lambda: told)
        time.sleep(0.1)
    assert told == ["the second\n"]
    watch.close()


def test_a_round_that_does_not_arrive_is_reported_with_rank_peers_bucket_and_step(
    capfd: pytest.CaptureFixture[str], here: SimpleNamespace
) -> None:
    with patch.object(Work, "is_completed", lambda self: False):
        model = train(here, steps=0, timeout_s=0.1)
        model.mixer.set_clock(3)
        model.mixer.launch()
        deadline, said = time.monotonic() + 10, ""
        while "\n" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
        model.close()
    assert "rank 1: gossip step 3 failed exchanging with rank(s) [0, 2], bucket 1 of 5" in said
    assert said.count("\n") == 1


def test_process_groups_wait_longer_than_the_watch_only_where_the_host_runs_ahead() -> None:
    assert group_timeout(SHORT, torch.device("cpu")) == SHORT
    assert group_timeout(SHORT, torch.device("cuda", 0)) == SHORT + WATCH_FIRST


def test_stalls_are_counted_when_the_device_has_passed_them(here: SimpleNamespace) -> None:
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
