"""What runs for each batch does not wait for the device: the host has to run ahead of a GPU."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cnn.cifar10 import augment
from cnn.data import InMemoryTrainData
from cnn.images.tree import normalise_tensor
from cnn.task import ImageClassification
from common.launch.compose import compose_config
from common.simulate.methods import mix_
from common.training.interruption import Interruption, Request
from common.training.recorder import Recorder
from common.training.worker import build_workers
from gpt2.task import LanguageModelling
from tests.gpt2.corpora import TINY, pattern, write_tokens
from tests.host_sync import NoHostSync
from transformer.data import ParallelText
from transformer.model import Transformer
from transformer.task import Translation

CPU = torch.device("cpu")


def train(task: Any, model: nn.Module, batches: Iterator[Any]) -> None:
    """Draw batches and compute losses, gradients and validation sums."""
    for _ in range(2):
        batch = next(batches)
        task.loss(model, batch).backward()
        task.evaluate(model, ("val", batch) if isinstance(batch, Tensor) else batch)


def test_images(tmp_path: Path) -> None:
    task = ImageClassification(compose_config("cnn", ["model.width=4"]))
    with NoHostSync():
        train(task, task.build_model(), task.train_data(0, 2, 8, CPU).epoch(0))


def test_images_as_bytes_with_shifts_and_flips() -> None:
    data = torch.zeros(20, 3, 8, 8, dtype=torch.uint8), torch.zeros(20, dtype=torch.int64)
    with NoHostSync():
        next(InMemoryTrainData(data, 0, 2, 4, 0, lambda images: augment(images, 2, True)).epoch(0))


def test_language(tmp_path: Path) -> None:
    write_tokens(tmp_path, pattern(300), pattern(90, seed=1))
    task = LanguageModelling(compose_config("gpt2", ["data=tokens", f"data.folder={tmp_path}", *TINY]))
    with NoHostSync():
        train(task, task.build_model(), task.train_data(0, 2, 4, CPU).epoch(0))


@pytest.fixture
def text() -> ParallelText:
    """Three pairs of different lengths, without files."""
    pairs = object.__new__(ParallelText)
    pairs._sides, pairs._max_length = [[torch.tensor([5] * (1 + i) + [2]) for i in range(3)]] * 2, None
    return pairs


def test_translation(text: ParallelText) -> None:
    task = object.__new__(Translation)
    task._config = compose_config("transformer", [])
    model = Transformer(16, width=8, hidden=8, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.1)
    with NoHostSync():
        train(task, model, iter([text.batch(np.arange(3), CPU, 2.0)] * 2))


def test_mixing_and_records() -> None:
    config = compose_config("cnn", ["workers=simulated", "workers.count=2", "model.width=4", "logging.every=5"])
    task = ImageClassification(config)
    recorder, workers = Recorder(config, task, None), build_workers(task, config, CPU, 0, 10, 10)
    recorder.begin(workers, 10, config)
    workers[0].model.clock = 1
    with NoHostSync():
        mix_(torch.ones(2, 3), np.full((2, 2), 0.5))
        recorder.step(True, [torch.tensor(1.0)] * 2, [torch.tensor(1.0)] * 2)


# -- what the host copies: to a device without memory, for which to wait is refused


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device to which nothing may be copied but from pinned memory, without waiting."""
    move = Tensor.to

    def to(tensor: Tensor, *target: Any, non_blocking: bool = False) -> Tensor:
        assert tensor.is_meta or (non_blocking and getattr(tensor, "pinned", False)), f"the host waits for {tensor}"
        return move(tensor, *target)

    def pin(tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        pinned.pinned = True
        return pinned

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    return torch.device("meta")


def test_batches_reach_a_device_from_pinned_memory(device: torch.device, text: ParallelText) -> None:
    images = torch.empty(20, 3, 8, 8, dtype=torch.uint8, device=device)
    labels = torch.empty(20, dtype=torch.int64, device=device)
    data = InMemoryTrainData((images, labels), 0, 2, 4, 0, lambda images: augment(images, 2, True))
    for batch, chosen in data.epoch(0):
        assert (batch.device, batch.dtype, chosen.device) == (device, torch.float32, device)
    assert normalise_tensor(images).is_meta
    batch = text.batch(np.arange(3), device, 2.0)
    assert {tensor.device for tensor in (batch.source, batch.source_mask, batch.target)} == {device}
    mix_(torch.empty(2, 3, device=device), np.full((2, 2), 0.5))


def test_whether_to_stop_is_read_beside_the_stream_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of some steps ago comes by a stream of its own; that which trains is not waited for."""
    calls: list[str] = []

    @contextlib.contextmanager
    def on(stream: object) -> Iterator[None]:
        calls.append("side stream")
        yield
        calls.append("stream that trains")

    event = SimpleNamespace(synchronize=lambda: calls.append("wait for the copy"))
    side = SimpleNamespace(record_event=lambda: calls.append("event") or event)
    work = SimpleNamespace(wait=lambda: calls.append("after the sum"))
    made = {name: getattr(torch, name) for name in ("full", "empty")}
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch, "full", lambda size, value, device: made["full"](size, value))
    monkeypatch.setattr(torch, "empty", lambda size, pin_memory: made["empty"](size))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, async_op: work)
    interruption = Interruption(torch.device("cuda"), every=2)
    assert interruption.requested(1) == Request.NOTHING
    asks = ["side stream", "after the sum", "event", "stream that trains"]
    assert calls == asks
    interruption._asked = Request.STOP
    assert [interruption.requested(step) for step in (2, 3)] == [Request.NOTHING, Request.STOP]
    assert calls[len(asks) :] == ["wait for the copy", *asks] * 2
    assert interruption.requested(4) == Request.NOTHING
    assert len(calls) == 3 * len(asks) + 2
