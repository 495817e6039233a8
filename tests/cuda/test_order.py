"""Events order what a training reads and writes on a GPU; nothing waits for more than it must; no step syncs."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from common.optim import AccumAdamW, DmSGD
from common.parallel import DecentralizedDataParallel, GradScaler, Mixing, Outer
from common.parallel.anchors import Anchors
from common.parallel.gossip.exchange import Exchange, ReceiveBuffers
from common.parallel.gossip.network import Network
from common.topology import Topology, build
from tests.cuda.device import Event, Stream, Trace, emulated
from tests.cuda.recorder import Recorder, depends_on, races

STEPS = 4
WORKERS = 8
BUCKET_MB = 100 * 4 / 2**20  # five buckets


@dataclass(frozen=True)
class Training:
    """A few steps of one rank of eight."""

    topology: str | Topology = "aer"
    workers_per_host: int = 2
    optimizer: str = "fused"
    order: str = "awc"
    precision: torch.dtype = torch.float32
    clip: bool = False
    fp16: bool = False
    averaged: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, here: SimpleNamespace, rank: int = 1, steps: int = STEPS) -> DecentralizedDataParallel:
        here.trace = Trace(rank, WORKERS)
        here.trace.label = "start"
        module = nn.Sequential(nn.Linear(16, 20), nn.Linear(20, 5)).to(self.precision)
        model = DecentralizedDataParallel(
            module,
            self.topology,
            self.order,
            workers_per_host=self.workers_per_host,
            **{"bucket_mb": BUCKET_MB} | self.options,
        )
        optimizer = model.attach(self.build(model))
        scaler = GradScaler("cpu", enabled=self.fp16)
        for step in range(steps):
            here.trace.label = f"step {step}"
            loss = model(torch.zeros(2, 16, dtype=self.precision)).square().sum()
            scaler.scale(loss).backward()
            if self.clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if self.averaged:
                here.trace.label = "average"
                with model.averaged():
                    pass
        here.trace.label = "end"
        return model

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        match self.optimizer:
            case "fused" | "foreach":
                fused = self.optimizer == "fused"
                return AccumAdamW(model.parameters(), lr=0.1, weight_decay=0.1, accumulation_steps=2, fused=fused)
            case "dmsgd":
                return DmSGD(model.parameters(), lr=0.1, momentum=0.9)
            case _:
                return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)


TRAININGS = {
    "hierarchical": Training(),
    "hierarchical, staggered": Training(options={"phases": "staggered"}),
    "hierarchical, not fused": Training(optimizer="foreach", clip=True),
    "hierarchical, messages of 16 bits": Training(options={"message_dtype": torch.bfloat16}),
    "hierarchical, messages of 8 bits": Training(options={"message_dtype": torch.int8}),
    "between hosts": Training(build("one_peer_exponential", WORKERS, 2, between_hosts=True)),
    "between hosts, 8 bits": Training(
        build("ring", WORKERS, 2, between_hosts=True), options={"message_dtype": torch.int8}, optimizer="sgd"
    ),
    "ring": Training("ring", workers_per_host=1),
    "ring, 8 bits": Training("ring", workers_per_host=1, options={"message_dtype": torch.int8}, optimizer="sgd"),
    "one peer": Training("one_peer_exponential", workers_per_host=1),
    "one peer, send_recv": Training("aer", options={"transport": "send_recv"}),
    "all-reduce": Training("complete", workers_per_host=1),
    "all-reduce, 16 bits": Training("complete", workers_per_host=1, precision=torch.bfloat16),
    "16 bits": Training(precision=torch.bfloat16),
    "adapt then combine": Training(optimizer="dmsgd", order="atc"),
    "adapt then combine, pairs": Training("one_peer_ring", workers_per_host=1, optimizer="dmsgd", order="atc"),
    "scaled": Training(fp16=True),
    "scaled, not fused, clipped": Training(fp16=True, clip=True, optimizer="sgd"),
    "local steps": Training(options={"local_steps": 2, "merge_after": 2, "outer": Outer(0.4, 0.9)}),
    "local steps, sgd, pairs": Training(
        "one_peer_exponential",
        workers_per_host=1,
        optimizer="sgd",
        averaged=True,
        options={"local_steps": 2, "merge_after": 1, "outer": Outer(0.4, 0.9)},
    ),
    "local steps, ring, 8 bits": Training(
        "ring",
        workers_per_host=1,
        optimizer="sgd",
        options={"local_steps": 2, "merge_after": 2, "outer": Outer(0.4, 0.9), "message_dtype": torch.int8},
    ),
    "DiLoCo": Training(
        "complete", workers_per_host=1, order="atc", options={"local_steps": 2, "outer": Outer(0.7, 0.9)}
    ),
    "streaming": Training(
        optimizer="sgd", options={"local_steps": 3, "merge_after": 2, "outer": Outer(0.4, 0.9), "fragments": 3}
    ),
    "weaker mixing": Training(options={"mixing": Mixing(power=3)}),
    "averaged": Training(averaged=True),
    "averaged, pairs, not fused": Training("one_peer_ring", workers_per_host=1, optimizer="sgd", averaged=True),
}


@pytest.fixture
def here(eager_kernel: None) -> Iterator[SimpleNamespace]:
    """An emulated device; the fused kernel runs as written."""
    with emulated() as device:
        yield device


def traced(training: Training, here: SimpleNamespace) -> Trace:
    """Return what a training queues, every kernel included."""
    with Recorder(here):
        training.run(here)
    return here.trace


@pytest.mark.parametrize("name", TRAININGS)
def test_events_order_all_reads_and_writes_and_no_step_syncs(name: str, here: SimpleNamespace) -> None:
    recorder = Recorder(here)
    with recorder:
        model = TRAININGS[name].run(here)
        model.drain()
    trace, mixer = here.trace, model.mixer
    assert races(trace) == []
    assert [entry.label for entry in trace.entries if entry.what == "host sync" and "step" in entry.label] == []
    lasting = [vector.data for vector in mixer.vectors] + mixer.errors
    lasting += [buffer for buffers in mixer._buffers._free.values() for buffer in buffers]
    lasting += model._anchors.state.values()
    lasting += [flat for momentum in model._momentum for flat in momentum.flat()]
    assert recorder.forgotten(lasting) == set()
    assert sum(entry.group is not None and "step" in entry.label for entry in trace.entries) >= STEPS // 2


FAULTS = {
    "the side stream does not wait for the parameters": ("tests.cuda.device.Stream.wait_stream", lambda *_: None),
    "the merge does not wait for the side stream": ("tests.cuda.device.Stream.wait_event", lambda *_: None),
    "the merge does not wait for its messages": ("tests.cuda.device.Work.wait", lambda *_: True),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", [{"phases": "staggered"}, TRAININGS["local steps"].options], ids=str)
def test_a_missing_wait_is_found(fault: str, options: dict[str, Any], here: SimpleNamespace) -> None:
    with patch(*FAULTS[fault]):
        trace = traced(Training(options=options), here)
    assert races(trace) != []


def test_anchors_that_change_while_they_travel_are_found(here: SimpleNamespace) -> None:
    def written(self: Anchors, clock: int) -> None:
        for anchors in self.anchors:
            anchors.add_(1)

    training = TRAININGS["local steps"]
    with patch.object(Anchors, "prepare", written):
        trace = traced(training, here)
    assert races(trace) != []


def test_the_stream_of_another_device_is_found(here: SimpleNamespace) -> None:
    """A current stream that is asked for without its device is that of the first GPU."""
    original = Network._put_on_side_stream

    def without_device(self: Network, exchange: Exchange) -> None:
        with patch("torch.cuda.current_stream", lambda device: here.trace.stream()):
            original(self, exchange)

    with patch.object(Network, "_put_on_side_stream", without_device):
        trace = traced(Training(), here)
    assert races(trace) != []


def test_a_buffer_that_is_given_back_too_early_is_found(here: SimpleNamespace) -> None:
    take = Exchange.take

    def shared(self: Exchange, numel: int, dtype: torch.dtype) -> torch.Tensor:
        vector = take(self, numel, dtype)
        self.release()
        return vector

    with patch.object(Exchange, "take", shared):
        trace = traced(Training(optimizer="sgd"), here)
    assert races(trace) != []


def test_a_value_that_the_host_reads_in_a_step_is_found(here: SimpleNamespace) -> None:
    recorder = Recorder(here)
    with recorder:
        Training(topology="ring", workers_per_host=1).run(here, steps=1)
        here.trace.label = "step 1"
        float(torch.ones(1).sum())
    syncs = [entry.label for entry in here.trace.entries if entry.what == "host sync" and "step" in entry.label]
    assert syncs == ["_local_scalar_dense step 1"]


def waited_for_too_early(topology: str | Topology, here: SimpleNamespace) -> list[int]:
    """Return the messages of the next round for which the merging of some bucket waits."""
    model = Training(topology).run(here, steps=0)
    mixer, trace = model.mixer, here.trace
    mixer.launch()
    posted = len(trace.entries)
    late = []
    for _ in mixer.arriving():
        kernel = trace.queue("kernel")
        late += depends_on(trace, kernel, [n for n in range(posted, kernel) if trace.entries[n].group is not None])
    assert sum(entry.group is not None for entry in trace.entries[posted:]) >= len(mixer.buckets) > 2
    return late


@pytest.mark.parametrize("topology", ["aer", "ring"])
def test_merging_a_bucket_waits_for_no_message_of_the_next_round(topology: str, here: SimpleNamespace) -> None:
    assert waited_for_too_early(topology, here) == []


def test_a_wait_for_the_whole_side_stream_is_found(here: SimpleNamespace) -> None:
    original = Network._put_on_side_stream

    def whole_stream(self: Network, exchange: Exchange) -> None:
        original(self, exchange)
        exchange.done = SimpleNamespace(query=lambda: True)

    def wait_event(self: Stream, event: object) -> None:
        self.wait_stream(mixer_stream[0])

    mixer_stream: list[Stream] = []
    stream = Trace.stream

    def remembered(self: Trace, device: object = None) -> Stream:
        mixer_stream.append(stream(self, device))
        return mixer_stream[-1]

    with (
        patch.object(Network, "_put_on_side_stream", whole_stream),
        patch.object(Trace, "stream", remembered),
        patch.object(Stream, "wait_event", wait_event),
    ):
        assert waited_for_too_early(TRAININGS["between hosts"].topology, here) != []


def test_one_batch_carries_all_buckets_that_leave_together(here: SimpleNamespace) -> None:
    model = Training("ring", workers_per_host=1, optimizer="sgd").run(here, steps=2)
    batches = [entry for entry in here.trace.entries if entry.what == "batch" and entry.label == "step 1"]
    assert [len(batch.transfers) for batch in batches] == [4 * len(model.mixer.buckets)]


def test_hosts_average_inside_by_collectives(here: SimpleNamespace) -> None:
    model = Training(TRAININGS["between hosts"].topology, optimizer="sgd").run(here, steps=1)
    kinds = [entry.what for entry in here.trace.entries if entry.group is not None and entry.label == "step 0"]
    assert kinds[:3] == ["reduce_scatter", "batch", "all_gather"]
    assert kinds.count("batch") >= len(model.mixer.buckets)


def test_buckets_are_large_unless_told_otherwise(here: SimpleNamespace) -> None:
    model = Training(options={"bucket_mb": "auto"}).run(here, steps=0)
    assert len(model.mixer.buckets) == 1


def memory_of_steps(training: Training, here: SimpleNamespace) -> tuple[float, float]:
    """Return the exchanges alive after six steps for each bucket, and the receive buffers made for each of them."""
    kept: list[torch.Tensor] = []
    take = ReceiveBuffers.take

    def counted(self: ReceiveBuffers, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kept.append(take(self, numel, dtype, device))
        return kept[-1]

    gc.collect()
    with without_collector(), patch.object(ReceiveBuffers, "take", counted):
        mixer = training.run(here, steps=6).mixer
        exchanges = [thing for thing in gc.get_objects() if issubclass(type(thing), Exchange)]
        memory = mixer.vectors[0].data.data_ptr()
        alive = sum(exchange.chunk.untyped_storage().data_ptr() == memory for exchange in exchanges)
    return alive / len(mixer.buckets), len({buffer.data_ptr() for buffer in kept}) / len(kept)


@pytest.mark.parametrize("optimizer", ["fused", "sgd"])
@pytest.mark.parametrize("topology", ["aer", "ring"])
def test_the_memory_of_a_step_does_not_grow(topology: str, optimizer: str, here: SimpleNamespace) -> None:
    alive, buffers = memory_of_steps(Training(topology, optimizer=optimizer), here)
    assert alive <= 2
    assert buffers < 1 / 2


def test_an_exchange_that_holds_itself_is_found(here: SimpleNamespace) -> None:
    init = Exchange.__init__

    def circle(self: Exchange, *arguments: Any) -> None:
        init(self, *arguments)
        self.stage = self.merge

    with patch.object(Exchange, "__init__", circle):
        alive, _ = memory_of_steps(Training(), here)
    assert alive > 2


def test_buffers_that_are_never_used_again_are_found(here: SimpleNamespace) -> None:
    with patch.object(ReceiveBuffers, "give_back", lambda *_: None):
        _, buffers = memory_of_steps(Training(), here)
    assert buffers == 1


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Switch Python's search for circles of references off."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_exposed_time_is_that_of_the_stream(here: SimpleNamespace) -> None:
    with patch.object(Event, "elapsed_time", lambda *_: 2.0):
        model = Training("ring", workers_per_host=1, optimizer="sgd").run(here, steps=3)
    assert model.counters.exposed_s == pytest.approx(3 * len(model.mixer.buckets) * 0.002)
