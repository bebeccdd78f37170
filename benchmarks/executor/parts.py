"""The zoo's models as chains written by hand, as other pipelines require, in equal parts.

The U-Net's skip tensors travel in tuples through every device between producer and consumer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.zoo import GPT, ResNet, UNet

Value = Any  # a tensor, or a tuple of tensors


class Embedding(nn.Module):
    """The part of a GPT before its blocks: ``(N, T)`` tokens to ``(N, T, width)``."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position, self.drop = (
            model.token_embedding,
            model.position_embedding,
            model.drop,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        embedded: Tensor = self.drop(self.token(tokens) + self.position(positions))
        return embedded


class Encode(nn.Module):
    """A level of a U-Net on its way down, which appends its output to the earlier levels."""

    def __init__(self, level: nn.Module) -> None:
        super().__init__()
        self.level = level

    def forward(self, levels: Value) -> tuple[Tensor, ...]:
        above = levels if isinstance(levels, tuple) else (levels,)
        return (*above, self.level(above[-1]))


class Decode(nn.Module):
    """A level of a U-Net on its way up, which joins the last two tensors."""

    def __init__(self, level: nn.Module) -> None:
        super().__init__()
        self.level = level

    def forward(self, levels: tuple[Tensor, ...]) -> Value:
        *above, skipped, below = levels
        joined = self.level(below, skipped)
        return (*above, joined) if above else joined


def units(model: nn.Module) -> list[nn.Module]:
    """Return a model as a chain of modules; each takes the previous module's result."""
    if isinstance(model, ResNet):
        groups = (model.layer1, model.layer2, model.layer3, model.layer4)
        stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
        return [stem, *(block for group in groups for block in group), head(model)]
    if isinstance(model, GPT):
        return [Embedding(model), *model.blocks, nn.Sequential(model.norm, model.head)]
    if isinstance(model, UNet):
        down, up = (
            (model.down1, model.down2, model.down3, model.down4),
            (model.up1, model.up2, model.up3, model.up4),
        )
        return [model.inc, *map(Encode, down), *map(Decode, up), model.outc]
    raise TypeError(f"{type(model).__name__} was not split by hand")


def head(model: ResNet) -> nn.Module:
    """Return the part of a ResNet behind its blocks."""
    return nn.Sequential(model.avgpool, nn.Flatten(1), model.fc)


def equal_parts(chain: Sequence[nn.Module], inputs: Tensor, count: int) -> list[nn.Sequential]:
    """Return the chain in ``count`` parts whose slowest part is as fast as possible.

    Args:
        chain: modules on one device.
        inputs: the first module's inputs, on the same device; large enough that the device's work
            and not the kernel launches is timed.
        count: the number of parts.
    """
    return cut(chain, cuts(unit_ms(chain, inputs), count))


def cut(chain: Sequence[nn.Module], ends: Sequence[int]) -> list[nn.Sequential]:
    """Return the chain cut at ``ends``, which begin with 0 and end with its length."""
    return [nn.Sequential(*chain[first:end]) for first, end in pairwise(ends)]


def unit_ms(chain: Sequence[nn.Module], inputs: Tensor, training: bool = True) -> list[float]:
    """Return the time of each module's forward pass, in training with its backward pass."""
    times, value = [], inputs
    for unit in chain:
        value = moved(value, inputs.device, leaf=training)
        with torch.set_grad_enabled(training):
            runs = [_pass_ms(unit, value, inputs.device) for _ in range(3)]
        times.append(min(runs))
        with torch.no_grad():
            value = unit(value)
        unit.zero_grad(set_to_none=True)
    return times


def _pass_ms(unit: nn.Module, value: Value, place: torch.device) -> float:
    devices.synchronise(place)
    began = perf_counter()
    made = [tensor for tensor in tensors(unit(value)) if tensor.requires_grad]
    if made:
        torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])
    devices.synchronise(place)
    return 1e3 * (perf_counter() - began)


def cuts(times: Sequence[float], count: int) -> list[int]:
    """Return where to cut a chain so that the largest part's sum is as small as possible.

    The result begins with 0 and ends with the chain's length.

    Raises:
        ValueError: there are fewer modules than parts.
    """
    if len(times) < count:
        raise ValueError(f"{len(times)} modules are too few for {count} parts")
    best: list[tuple[float, list[int]] | None] = [(0.0, [0])] + [None] * len(times)
    for _ in range(count):
        after: list[tuple[float, list[int]] | None] = [None] * (len(times) + 1)
        for end in range(1, len(times) + 1):
            options = [
                (max(known[0], sum(times[first:end])), [*known[1], end])
                for first in range(end)
                if (known := best[first]) is not None
            ]
            after[end] = min(options, default=None)
        best = after
    found = best[len(times)]
    assert found is not None
    return found[1]


def tensors(value: Value) -> tuple[Tensor, ...]:
    """Return the tensors of a value."""
    return value if isinstance(value, tuple) else (value,)


def moved(value: Value, place: torch.device, leaf: bool = False) -> Value:
    """Return a value on a device; ``leaf`` detaches it from its producer."""
    if isinstance(value, tuple):
        return tuple(moved(tensor, place, leaf) for tensor in value)
    if leaf:
        value = value.detach().requires_grad_(value.is_floating_point())
    return value.to(place)
