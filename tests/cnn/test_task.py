"""The cnn task: model, metrics, and that evaluation shards hold every image once."""

import contextlib
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from cnn.model import SmallResNet, build_model
from cnn.task import TASK, ImageClassification
from common.config.config import ConfigError
from common.launch.compose import compose_config
from common.optim.groups import NoDecay
from common.training.optimization import build_optimizer


@pytest.fixture(scope="module")
def task() -> TASK:
    return TASK(compose_config("cnn", ["label_smoothing=0.1"]))


def test_batches_of_one_image_are_refused_where_batch_norm_cannot_train_on_them() -> None:
    task = object.__new__(ImageClassification)
    task._data = SimpleNamespace(channels=3, classes=10)
    for side in (64, 32):
        small = ["model=resnet18", "data=imagenet", f"data.train_crop={side}", "training.batch_size=2"]
        config = task._config = compose_config("cnn", [*small, "workers=simulated", "workers.count=2"])
        expected = pytest.raises(ConfigError, match=r"training\.batch_size=2: expected at least 2 images for each rank")
        with expected if side == 32 else contextlib.nullcontext():
            task._check_single_images(config)


def test_model_shape_and_size() -> None:
    model = SmallResNet(in_channels=1, classes=10, width=16)
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert sum(p.numel() for p in model.parameters()) == 77_754


def test_weights_are_scaled_by_the_outputs_of_a_convolution() -> None:
    torch.manual_seed(0)
    for module in SmallResNet(in_channels=1, classes=10, width=16).modules():
        if isinstance(module, torch.nn.Conv2d):
            deviation = (2 / module.weight[:, 0].numel()) ** 0.5
            assert module.weight.std().item() == pytest.approx(deviation, rel=4 / module.weight.numel() ** 0.5)


@pytest.mark.parametrize("optimizer", ["sgd", "accumadam"])
@pytest.mark.parametrize("no_decay", get_args(NoDecay))
def test_what_the_optimizer_decays(optimizer: str, no_decay: str) -> None:
    overrides = [f"optimizer={optimizer}", f"optimizer.no_decay={no_decay}", "parallel.order=atc"]
    config = compose_config("cnn", [*overrides, "optimizer.weight_decay=0.1"])
    model = SmallResNet(in_channels=1, classes=10, width=4)
    decay = {
        id(p): group["weight_decay"]
        for group in build_optimizer(config.optimizer, 0.1, model).param_groups
        for p in group["params"]
    }
    assert decay[id(model.fc.weight)] == 0.1
    assert decay[id(model.fc.bias)] == (0.1 if no_decay in ("norms", "nothing") else 0.0)
    assert decay[id(model.bn.weight)] == decay[id(model.bn.bias)] == (0.1 if no_decay == "nothing" else 0.0)


def test_table3_exempts_by_name_as_the_published_code_does() -> None:
    config = compose_config("cnn", ["experiment=table3/allreduce"])
    with torch.device("meta"):
        model = build_model(config.model, 3, 1000)
    groups = build_optimizer(config.optimizer, config.lr, model).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decay[id(model.layer1[0].downsample[1].weight)] == decay[id(model.fc.weight)] == 1 / 32768
    for exempt in (model.fc.bias, model.bn1.weight, model.bn1.bias, model.layer1[0].downsample[1].bias):
        assert decay[id(exempt)] == 0


@pytest.mark.parametrize("shards", [3, 400])
def test_evaluation_does_not_depend_on_the_number_of_shards(task: TASK, shards: int) -> None:
    torch.manual_seed(0)
    model = task.build_model().eval()
    sums = dict.fromkeys(task.sums, 0.0)
    with torch.no_grad():
        for shard in range(shards):
            for batch in task.evaluation_data(shard, shards, 50, torch.device("cpu")):
                for name, value in task.evaluate(model, batch).items():
                    sums[name] += value.item()
        (images, labels), *more = task.evaluation_data(0, 1, 1000, torch.device("cpu"))
        logits = model(images)
    assert not more
    metrics = task.metrics(sums)
    assert sums["count"] == len(labels) == 360
    assert metrics["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item())
    top5 = [label in row.topk(5).indices for row, label in zip(logits, labels, strict=True)]
    assert metrics["accuracy_top5"] == pytest.approx(100 * sum(top5) / 360)


def test_label_smoothing_is_for_training_only(task: TASK) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    images, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    logits = model(images)
    smooth = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert task.loss(model, (images, labels)).item() == pytest.approx(smooth.item())
    assert task.evaluate(model, (images, labels))["loss"].item() != pytest.approx(6 * smooth.item())
