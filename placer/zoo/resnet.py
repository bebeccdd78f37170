"""ResNet (He et al., 2016) with the parameter names, initial values and results of torchvision.

    images ─▶ conv1 ─▶ bn1 ─▶ relu ─▶ maxpool
           ─▶ layer1 ─▶ layer2 ─▶ layer3 ─▶ layer4 ─▶ avgpool ─▶ fc ─▶ logits
              └─ blocks, each  relu(x + f(x)) ─┘

Source: "Deep Residual Learning for Image Recognition", CVPR 2016, section 3.3 and table 1; the
bottleneck strides in its 3x3 convolution, as in torchvision and NVIDIA's "v1.5".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a residual.

    ``(N, in_channels, H, W)`` becomes ``(N, width, H / stride, W / stride)``.

    Args:
        in_channels: of the input.
        width: of both convolutions.
        stride: of the first convolution.
        downsample: projects the input to the output's shape; None if the shapes are equal.
    """

    expansion: ClassVar[int] = 1

    def __init__(
        self, in_channels: int, width: int, stride: int = 1, downsample: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, kernel=3, stride=stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, kernel=3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, with the shape in the class's docstring."""
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a residual.

    ``(N, in_channels, H, W)`` becomes ``(N, 4 * width, H / stride, W / stride)``.

    Args:
        in_channels: of the input.
        width: of the first two convolutions.
        stride: of the 3x3 convolution.
        downsample: projects the input to the output's shape; None if the shapes are equal.
    """

    expansion: ClassVar[int] = 4

    def __init__(
        self, in_channels: int, width: int, stride: int = 1, downsample: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, kernel=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, kernel=3, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, width * self.expansion, kernel=1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, with the shape in the class's docstring."""
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


class ResNet(nn.Module):
    """An image classifier: ``(N, 3, H, W)`` to logits ``(N, num_classes)``.

    H and W are at least 32.

    Args:
        block: ``BasicBlock`` or ``Bottleneck``.
        depths: number of blocks in each of the four groups.
        num_classes: logits per image.
    """

    def __init__(
        self, block: type[BasicBlock | Bottleneck], depths: Sequence[int], num_classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(3, 64, kernel=7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _group(block, 64, 64, depths[0])
        self.layer2 = _group(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = _group(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = _group(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape ``(N, num_classes)`` for images of shape ``(N, 3, H, W)``."""
        x: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet18(num_classes: int = 1000) -> ResNet:
    """Return a ResNet-18: 11.7 million parameters, basic blocks of depths 2, 2, 2, 2.

    Args:
        num_classes: logits per image.
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes)


def resnet50(num_classes: int = 1000) -> ResNet:
    """Return a ResNet-50: 25.6 million parameters, bottlenecks of depths 3, 4, 6, 3.

    Args:
        num_classes: logits per image.
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes)


def resnet101(num_classes: int = 1000) -> ResNet:
    """Return a ResNet-101: 44.5 million parameters, bottlenecks of depths 3, 4, 23, 3.

    Args:
        num_classes: logits per image.
    """
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes)


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False
    )


def _group(
    block: type[BasicBlock | Bottleneck], in_channels: int, width: int, depth: int, stride: int = 1
) -> nn.Sequential:
    """Return ``depth`` blocks; the first strides, and projects its input if the shape changes."""
    out_channels = width * block.expansion
    downsample = None
    # the residual needs the shape of the block's output
    if stride != 1 or in_channels != out_channels:
        projection = _convolution(in_channels, out_channels, kernel=1, stride=stride)
        downsample = nn.Sequential(projection, nn.BatchNorm2d(out_channels))
    blocks = [block(in_channels, width, stride, downsample)]
    blocks.extend(block(out_channels, width) for _ in range(depth - 1))
    return nn.Sequential(*blocks)
