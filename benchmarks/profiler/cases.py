"""The 24 cases: six models in four ways each.

The ways differ in precision, mode, devices and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import zoo

from ..executor import cases as executor_cases
from . import models

places = executor_cases.places
home = executor_cases.home
is_small = executor_cases.is_small
prepare = executor_cases.prepare
CHUNKS = 4
"""Micro-batches for each device."""


@dataclass(frozen=True)
class Model:
    """A model with its data.

    Attributes:
        name: the name that selects it.
        label: the name in tables.
        make: makes the model.
        inputs: makes the inputs of a number of samples.
        target: makes the target of a number of samples.
        loss: a function of output and target, a mean over samples.
        micro_batches: a small and a large one.
    """

    name: str
    label: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    target: Callable[[int], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    micro_batches: tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A model in one of its four ways."""

    model: Model
    half: bool
    training: bool
    wanted: int
    micro_batch: int

    @property
    def devices(self) -> int:
        """Return the wanted number of devices, or all if there are fewer."""
        return min(self.wanted, len(places()))

    @property
    def chunks(self) -> int:
        return CHUNKS * self.devices

    @property
    def label(self) -> str:
        precision = "bf16" if self.half else "fp32" if is_small() else "TF32"
        mode = "training" if self.training else "inference"
        fewer = "" if self.devices == self.wanted else f" for want of {self.wanted}"
        return (
            f"{self.model.label}, {precision}, {mode}, micro-batch {self.micro_batch}, "
            f"{self.devices} devices{fewer}"
        )

    def make(self, place: torch.device) -> nn.Module:
        """Return the model on a device; its initial values are always the same."""
        torch.manual_seed(0)
        with place:
            model = self.model.make()
        model = model.to(torch.bfloat16) if self.half else model
        return model.train(self.training)

    def batch(self, place: torch.device, size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and target on a device; they are always the same."""
        torch.manual_seed(1)
        with place:
            inputs, target = self.model.inputs(size), self.model.target(size)
        return (
            inputs.to(torch.bfloat16) if self.half and inputs.is_floating_point() else inputs
        ), target

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss in float32."""
        return self.model.loss(output.float(), target)


def of(model: Model) -> list[Case]:
    """Return the four ways of a model."""
    small, large = model.micro_batches
    return [
        Case(model, half=False, training=True, wanted=2, micro_batch=large),
        Case(model, half=True, training=True, wanted=4, micro_batch=small),
        Case(model, half=False, training=False, wanted=4, micro_batch=small),
        Case(model, half=True, training=False, wanted=2, micro_batch=large),
    ]


def known() -> dict[str, Model]:
    """Return the models by name, the most important first; they are tiny without GPUs."""
    return {model.name: model for model in (SMALL if is_small() else FULL)}


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _images(size: int) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor]]:
    return (lambda count: torch.randn(count, 3, size, size)), (
        lambda count: torch.randint(1000, (count,))
    )


def _vision(
    name: str, label: str, make: Callable[[], nn.Module], size: int, micro_batches: tuple[int, int]
) -> Model:
    return Model(
        name, f"{label}, {size} px", make, *_images(size), functional.cross_entropy, micro_batches
    )


def _pixels(label: str, width: int, size: int, micro_batches: tuple[int, int]) -> Model:
    return Model(
        "unet",
        f"{label}, {size} px",
        lambda: zoo.unet(width=width),
        _images(size)[0],
        lambda count: torch.randint(2, (count, size, size)),
        functional.cross_entropy,
        micro_batches,
    )


def _text(
    name: str,
    label: str,
    make: Callable[[], nn.Module],
    vocabulary: int,
    length: int,
    micro_batches: tuple[int, int],
) -> Model:
    def tokens(count: int) -> Tensor:
        return torch.randint(vocabulary, (count, length))

    return Model(name, f"{label}, {length} tokens", make, tokens, tokens, token_loss, micro_batches)


FULL = (
    _vision("resnet101", "ResNet-101", zoo.resnet101, 224, (16, 32)),
    _text(
        "gpt",
        "GPT, 24 layers, d=2048",
        lambda: zoo.gpt(24, 2048, 16, 1024, 50304),
        50304,
        1024,
        (2, 4),
    ),
    _pixels("U-Net", 64, 192, (8, 16)),
    _vision("inception", "Inception-v3", models.inception, 299, (16, 32)),
    _text("llama", "Llama-like, 16 layers, d=4096", zoo.llama, 32000, 1024, (1, 2)),
    _text(
        "t5",
        "T5-like, 12 + 12 layers, d=1024",
        lambda: models.T5(12, 1024, 16, 4096, 32128),
        32128,
        512,
        (4, 8),
    ),
)

SMALL = (
    _vision("resnet101", "tiny: ResNet-18", zoo.resnet18, 32, (2, 4)),
    _text("gpt", "tiny: GPT, 2 layers, d=32", lambda: zoo.gpt(2, 32, 2, 16, 64), 64, 16, (2, 4)),
    _pixels("tiny: U-Net", 4, 32, (1, 2)),
    _vision("inception", "tiny: Inception-v3", models.inception, 75, (2, 4)),
    _text(
        "llama",
        "tiny: Llama-like, 2 layers",
        lambda: zoo.llama(2, 32, 2, 1, 48, 64),
        64,
        16,
        (2, 4),
    ),
    _text("t5", "tiny: T5-like, 1 + 1 layers", lambda: models.T5(1, 32, 2, 64, 64), 64, 16, (2, 4)),
)
