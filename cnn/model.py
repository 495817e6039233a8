"""Building the configured network, and the ResNets (He et al. 2016) for small images."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnn.config import ModelChoice
from common.config.config import ConfigError

CIFAR_WIDTH = 16  # of the first stage, He et al. 2016, section 4.2
NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 2)}


def build_model(config: ModelChoice, channels: int, classes: int) -> nn.Module:
    """Build the network for images with this number of channels.

    channels_last stores the weights, and therefore all activations, in the layout that is fastest for convolutions on
    GPUs. Raises ConfigError if the network does not take this number of channels.
    """
    if config.name == "resnet_digits":
        return SmallResNet(channels, classes, config.width, norm=config.norm)
    if config.name == "resnet_cifar":
        resnet = SmallResNet(channels, classes, CIFAR_WIDTH, blocks=(config.depth - 2) // 6, projection=False)
        return resnet.apply(_initialise_over_inputs)
    from cnn.torchvision_shim import build_torchvision_model  # takes a second to import

    if channels != 3:
        raise ConfigError(
            f"model={config.name}: takes images of 3 channels, but those of the data have {channels}; "
            "expected model=resnet_digits"
        )
    model = build_torchvision_model(config.architecture, classes)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def _initialise_over_inputs(module: nn.Module) -> None:
    """Draw weights with variance 2 / inputs, the classifier's too: the CIFAR-10 script of arXiv 2110.13363."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")


class PaddedShortcut(nn.Module):
    """He et al.'s option A, a shortcut without parameters: every `stride`-th pixel, padded with channels of zeros.

    Half of the zeros come before the image's channels and half after them, as in the CIFAR-10 script of arXiv
    2110.13363.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        more, self.stride = out_channels - in_channels, stride
        self.before, self.after = more // 2, more - more // 2

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, in, H, W] to [B, out, H/stride, W/stride]."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with norms and a shortcut; [B, in, H, W] -> [B, out, H/stride, W/stride].

    projection: whether the shortcut, where sizes change, is a 1x1 convolution with a norm or a `PaddedShortcut`
    norm:       a key of NORMS
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, projection: bool = True, norm: str = "batch"
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = NORMS[norm](out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = NORMS[norm](out_channels)
        if stride == 1 and in_channels == out_channels:
            self.downsample = nn.Identity()
        elif projection:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), NORMS[norm](out_channels)
            )
        else:
            self.downsample = PaddedShortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, in, H, W] to [B, out, H/stride, W/stride]."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class SmallResNet(nn.Module):
    """One convolution, three stages of `blocks` blocks (strides 1, 2, 2), global average pooling, a linear classifier.

    width:      channels of the first stage; the second and third have 2 and 4 times as many
    projection, norm: see `BasicBlock`
    """

    def __init__(
        self, in_channels: int, classes: int, width: int, blocks: int = 1, projection: bool = True, norm: str = "batch"
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn = NORMS[norm](width)
        stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.blocks = nn.Sequential(
            *(
                BasicBlock(inputs if first else outputs, outputs, stride if first else 1, projection, norm)
                for inputs, outputs, stride in stages
                for first in [True] + [False] * (blocks - 1)
            )
        )
        self.fc = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, in, H, W] to logits [B, classes]."""
        features = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.fc(features.mean((2, 3)))
