"""Small models, and the quickest profile of one: every layer is run once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from placer import zoo
from placer.profiler.profile import profile
from placer.schema import Profile

TOKENS = torch.arange(32).reshape(2, 16)


def quick_profile(
    model: nn.Module, example_inputs: Any, devices: Any = ("cpu:0",), **options: Any
) -> Profile:
    return profile(model, example_inputs, devices, **{"progress": False, "repeats": 1} | options)


def small_gpt(**options: Any) -> nn.Module:
    return zoo.gpt(layers=2, width=32, heads=2, context=16, vocabulary=50, **options)


def small_cnn() -> nn.Module:
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    return nn.Sequential(convolution, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))
