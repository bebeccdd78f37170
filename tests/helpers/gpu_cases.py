"""What tests on GPUs run: training in double precision, and models whose passes can be compared
between devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from small_models import tokens_loss
from torch import Tensor, nn
from torch.nn import functional

from placer.zoo import gpt, resnet18, unet


def without_dropout(model: nn.Module) -> nn.Module:
    """Every device has a random number generator of its own, so random draws cannot be compared."""
    for module in model.modules():
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    return model


def training_case(
    name: str, samples: int
) -> tuple[nn.Module, Tensor, Tensor, Callable[[Any, Any], Tensor]]:
    """A model in double precision, a batch, its target and the loss.

    Args:
        name: ``resnet18``, ``unet`` or ``tied gpt``.
        samples: of the batch.
    """
    torch.manual_seed(0)
    if name == "resnet18":
        images, classes = torch.randn(samples, 3, 64, 64).double(), torch.randint(1000, (samples,))
        return resnet18().double(), images, classes, functional.cross_entropy
    if name == "unet":
        images, classes = (
            torch.randn(samples, 3, 64, 64).double(),
            torch.randint(2, (samples, 64, 64)),
        )
        return unet(width=8).double(), images, classes, functional.cross_entropy
    model = gpt(layers=4, width=32, heads=4, context=16, vocabulary=64, tied=True).double()
    return model, torch.randint(64, (samples, 16)), torch.randint(64, (samples, 16)), tokens_loss
