"""A convolutional network for images of digits, as one ``nn.Sequential``."""

from __future__ import annotations

from torch import nn


class SeqNet(nn.Sequential):
    """A classifier of small images: ``(N, 1, size, size)`` to logits ``(N, num_classes)``.

    Args:
        size: pixels along an image's edge, even (default 8, as in scikit-learn's digits).
        num_classes: logits per image.
        width: channels of the first convolution; the second has twice as many.
    """

    def __init__(self, size: int = 8, num_classes: int = 10, width: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * (size // 2) ** 2, 64),
            nn.ReLU(),
            nn.Linear(64, num_classes),
        )
