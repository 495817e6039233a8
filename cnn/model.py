"""The configured network, and a small ResNet (He et al. 2016) for small images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnn.config import ModelChoice
from common.training.config import ConfigError


def build_model(config: ModelChoice, channels: int, classes: int) -> nn.Module:
    """The network for images of so many channels; ConfigError if it does not take them.

    channels_last keeps the weights, and with them all activations, in the order that convolutions on GPUs like best.
    """
    if config.name == "resnet_digits":
        return SmallResNet(channels, classes, config.width)
    from cnn.torchvision_models import build_torchvision_model  # takes a second to import

    if channels != 3:
        raise ConfigError(
            f"model={config.name}: takes images of 3 channels, but those of the data have {channels}; "
            "expected model=resnet_digits"
        )
    model = build_torchvision_model(config.architecture, classes)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut; [B, in, H, W] -> [B, out, H/stride, W/stride]."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in, H, W]."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class SmallResNet(nn.Module):
    """One convolution, three blocks (strides 1, 2, 2), global average pooling, a linear classifier."""

    def __init__(self, in_channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            BasicBlock(width, width, 1), BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 4 * width, 2)
        )
        self.fc = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in, H, W] -> logits [B, classes]."""
        features = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.fc(features.mean((2, 3)))
