"""U-Net for segmentation, with skip connections as plain module calls.

    images ─▶ inc ───────────────────────────────── skip ─────▶ up4 ─▶ outc ─▶ logits
               └─▶ down1 ────────────────────────── skip ─▶ up3 ─┘
                     └─▶ down2 ──────────────────── skip ─▶ up2 ─┘
                           └─▶ down3 ────────────── skip ─▶ up1 ─┘
                                 └─▶ down4 ───────────────┘

Source: Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image
Segmentation", MICCAI 2015, figure 1; with padded convolutions and batch normalisation, so that the
logits have the size of the image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions, each with batch normalisation and ReLU.

    ``(N, in_channels, H, W)`` becomes ``(N, out_channels, H, W)``.

    Args:
        in_channels: of the input.
        out_channels: of the output.
        mid_channels: between the two convolutions; ``out_channels`` by default.
    """

    def __init__(
        self, in_channels: int, out_channels: int, mid_channels: int | None = None
    ) -> None:
        mid_channels = mid_channels or out_channels
        super().__init__(
            nn.Conv2d(in_channels, mid_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(mid_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(mid_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )


class Down(nn.Sequential):
    """2x2 max-pooling and two convolutions.

    ``(N, in_channels, H, W)`` becomes ``(N, out_channels, H // 2, W // 2)``.

    Args:
        in_channels: of the input.
        out_channels: of the output.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(nn.MaxPool2d(2), DoubleConv(in_channels, out_channels))


class Up(nn.Module):
    """Upsampling by 2, concatenation with the skip connection, and two convolutions.

    Args:
        in_channels: of the two inputs together.
        out_channels: of the output.
        bilinear: whether to interpolate instead of a transposed convolution.
    """

    def __init__(self, in_channels: int, out_channels: int, bilinear: bool = False) -> None:
        super().__init__()
        self.up: nn.Module
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(in_channels, out_channels, in_channels // 2)
        else:
            self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
            self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, below: Tensor, skipped: Tensor) -> Tensor:
        """Return the upsampled features, merged with the skip connection.

        Args:
            below: shape ``(N, C, H, W)``: C is ``in_channels``, or half of it if bilinear.
            skipped: shape ``(N, in_channels // 2, 2 * H or 2 * H + 1, 2 * W or 2 * W + 1)``.

        Returns:
            Shape ``(N, out_channels, height of skipped, width of skipped)``.
        """
        doubled: Tensor = self.up(below)
        # odd sizes lose a row or column in pooling: pad to the size of the skip connection
        rows = skipped.size(2) - doubled.size(2)
        columns = skipped.size(3) - doubled.size(3)
        doubled = functional.pad(
            doubled, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2]
        )
        joined: Tensor = self.conv(torch.cat([skipped, doubled], dim=1))
        return joined


class UNet(nn.Module):
    """A pixel classifier: ``(N, in_channels, H, W)`` to logits ``(N, num_classes, H, W)``.

    H and W are at least 16. At the defaults, it has 31.0 million parameters.

    Args:
        in_channels: of the images.
        num_classes: logits per pixel.
        width: channels of the first level; each level below has twice as many.
        bilinear: whether to interpolate upwards instead of a transposed convolution.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 2, width: int = 64, bilinear: bool = False
    ) -> None:
        super().__init__()
        # Interpolation keeps the number of channels, which a transposed convolution halves. So the
        # level below provides half as many.
        halve = 2 if bilinear else 1
        self.inc = DoubleConv(in_channels, width)
        self.down1 = Down(width, 2 * width)
        self.down2 = Down(2 * width, 4 * width)
        self.down3 = Down(4 * width, 8 * width)
        self.down4 = Down(8 * width, 16 * width // halve)
        self.up1 = Up(16 * width, 8 * width // halve, bilinear)
        self.up2 = Up(8 * width, 4 * width // halve, bilinear)
        self.up3 = Up(4 * width, 2 * width // halve, bilinear)
        self.up4 = Up(2 * width, width, bilinear)
        self.outc = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape ``(N, num_classes, H, W)``."""
        level1 = self.inc(images)
        level2 = self.down1(level1)
        level3 = self.down2(level2)
        level4 = self.down3(level3)
        x = self.down4(level4)
        x = self.up1(x, level4)
        x = self.up2(x, level3)
        x = self.up3(x, level2)
        x = self.up4(x, level1)
        logits: Tensor = self.outc(x)
        return logits


unet = UNet
"""The callable that makes a U-Net, in lower case like ``resnet50``."""
