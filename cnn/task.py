"""Image classification: model, data, loss and metrics for the training loop."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cnn.cifar10 import BATCHES, Cifar10Data, missing_cifar10
from cnn.config import Cifar10, CnnConfig, ImageFolder, Packaged
from cnn.data import ImageData, Images
from cnn.digits import DigitsData
from cnn.images.beton import check_present
from cnn.model import build_model
from cnn.packaged import IMAGES, SIDE, PackagedData, missing_packaged
from common.config.config import ConfigError
from common.training.task import Task, TrainData

SIDES = {"digits": 8, "cifar10": 32, "mnist_5k": 28, "openclipart": SIDE}  # pixels


def open_data(config: CnnConfig) -> ImageData:
    """Open the configured data set."""
    match config.data.name:
        case "digits":
            return DigitsData(config.data, config.seed)
        case "cifar10":
            return Cifar10Data(config.data, config.seed)
        case "mnist_5k" | "openclipart":
            return PackagedData(config.data, config.seed)
        case _:  # image_folder, imagenet, digits_images
            from cnn.images.data import ImageFolderData  # imports numba where FFCV is installed: half a second

            return ImageFolderData(config.data, config.seed)


class ImageClassification(Task):
    """Classify images; evaluated by top-1 and top-5 accuracy in percent.

    If the data has class weights, balanced accuracy (the mean of the classes' accuracies) is also recorded, and decides
    which model is best.
    """

    config_class = CnnConfig
    sums = ("loss", "correct", "correct_top5", "count")
    primary_metric = "accuracy"
    higher_is_better = True
    fixed_shapes = True
    late_imports = ("sklearn.datasets", "sklearn.model_selection")

    def __init__(self, config: CnnConfig) -> None:
        self._config = config
        self._data = open_data(config)
        if self._data.class_weights is not None:
            self.sums, self.primary_metric = (*self.sums, "weighted_correct", "weight"), "balanced_accuracy"
        if config.training.batch_size > self._data.train_size:
            raise ConfigError(
                f"training.batch_size={config.training.batch_size}: expected at most the {self._data.train_size} "
                "training images"
            )
        if config.training.batch_size == config.ranks * config.training.gradient_accumulation:
            self._check_single_images(config)

    @classmethod
    def check_files(cls, config: CnnConfig) -> None:
        """Raise ConfigError if image files are missing."""
        data = config.data
        if isinstance(data, ImageFolder):
            for name in (data.train, data.validation):
                if data.loader == "ffcv":
                    check_present(Path(data.folder) / f"{name}.beton")
                elif not (Path(data.folder) / name).is_dir():
                    raise ConfigError(f"data.folder={data.folder}: {data.folder}/{name}: no such folder of images")
        elif isinstance(data, Packaged) and not (Path(data.folder) / IMAGES).is_file():
            raise missing_packaged(data)
        elif isinstance(data, Cifar10) and not (Path(data.folder) / BATCHES).is_dir():
            raise missing_cifar10(data.folder)

    def _check_single_images(self, config: CnnConfig) -> None:
        """Raise ConfigError if the network cannot be trained on batches of one image."""
        side = config.data.train_crop if isinstance(config.data, ImageFolder) else SIDES[config.data.name]
        try:
            with torch.device("meta"):
                self.build_model()(torch.empty(1, self._data.channels, side, side))
        except ValueError as error:  # from BatchNorm, if a channel has one pixel left
            raise ConfigError(
                f"training.batch_size={config.training.batch_size}: expected at least 2 images for each rank with "
                f"model={config.model.name} and images of {side} x {side} pixels: {error}"
            ) from error

    def build_model(self) -> nn.Module:
        """Build the configured network, with one output for each class of the data."""
        return build_model(self._config.model, self._data.channels, self._data.classes)

    def train_data(self, worker: int, workers: int, batch_size: int, device: torch.device) -> TrainData:
        """Return this rank's augmented training images."""
        return self._data.train(worker, workers, batch_size, device)

    def evaluation_data(self, shard: int, shards: int, batch_size: int, device: torch.device) -> Iterator[Images]:
        """Yield the batches of this shard of the validation images."""
        return self._data.evaluation(shard, shards, batch_size, device)

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        """Return the cross-entropy with label smoothing."""
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=self._config.label_smoothing)

    def evaluate(self, model: nn.Module, batch: Images) -> dict[str, Tensor]:
        """Return the sums of the plain cross-entropy and of correct answers."""
        images, labels = batch
        logits = model(images)
        ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        sums = {
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "correct": ranked[:, 0].sum(),
            "correct_top5": ranked.sum(),
            "count": torch.full((), len(labels), device=labels.device),
        }
        if self._data.class_weights is not None:
            weights = self._data.class_weights.to(labels.device)[labels]
            sums |= {"weighted_correct": (weights * ranked[:, 0]).sum(), "weight": weights.sum()}
        return sums

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss and the accuracies in percent."""
        count = sums["count"]
        balanced = {"balanced_accuracy": 100 * sums["weighted_correct"] / sums["weight"]} if "weight" in sums else {}
        return balanced | {
            "loss": sums["loss"] / count,
            "accuracy": 100 * sums["correct"] / count,
            "accuracy_top5": 100 * sums["correct_top5"] / count,
        }


TASK = ImageClassification
