"""The trained models with their data, at full size on GPUs and tiny on CPU stand-ins."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import zoo

STAND_INS = 2
sgd = partial(torch.optim.SGD, lr=1e-3)
"""The optimizer of all training cases; the large one has its own."""
Loss = Callable[[Tensor, Tensor], Tensor]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Training:
    """A training step.

    Attributes:
        name: the name that selects it.
        label: the name in tables.
        make: makes the model.
        data: makes one batch, inputs and target.
        loss: a function of output and target, a mean over samples.
        chunks: the numbers of micro-batches to try.
        granularity: how finely the placement may cut.
    """

    name: str
    label: str
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Loss
    chunks: tuple[int, ...]
    granularity: str = "auto"

    def tried(self, count: int) -> tuple[int, ...]:
        """Return the numbers of micro-batches to try on ``count`` devices.

        These are two and four per device, where ``chunks`` contains them.
        """
        return (
            tuple(chunks for chunks in self.chunks if chunks in (2 * count, 4 * count))
            or self.chunks
        )

    def model(self, place: torch.device) -> nn.Module:
        """Return the model on a device; its initial values are always the same."""
        torch.manual_seed(0)
        with place:
            return self.make()

    def batch(self, place: torch.device) -> tuple[Tensor, Tensor]:
        """Return the batch on a device; it is always the same."""
        torch.manual_seed(1)
        with place:
            return self.data()


def on_gpus() -> bool:
    """Return whether GPUs are there to run on; otherwise CPU stand-ins are used."""
    return torch.cuda.is_available()


def is_small() -> bool:
    """Return whether to use the tiny sizes: without GPUs, or on request for a trial run."""
    return not on_gpus() or bool(os.environ.get("PLACER_EXECUTOR_TINY"))


def sized(small: Value, full: Value) -> Value:
    """Return the value for the present size.

    Asked for when it is needed, since what a module fixes when it is imported stays at that size.
    """
    return small if is_small() else full


def places(count: int | None = None) -> list[torch.device]:
    """Return the first ``count`` GPUs, all of them if None, or CPU stand-ins."""
    if not on_gpus():
        return [torch.device("cpu", index) for index in range(count or STAND_INS)]
    return [torch.device("cuda", index) for index in range(count or torch.cuda.device_count())]


def home() -> torch.device:
    """Return the device on which models and batches are made."""
    return torch.device("cuda", 0) if on_gpus() else torch.device("cpu")


def counts() -> list[int]:
    """Return the numbers of devices to try: all, and two if there are more."""
    everything = len(places())
    return [everything] if everything <= 2 else [everything, 2]


def prepare() -> None:
    """Set what all engines share: TF32 on GPUs, one thread per process on stand-ins.

    The processes of stand-ins share the cores.
    """
    if not on_gpus():
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True


def training(name: str) -> Training:
    """Return a case by its name: ``resnet101``, ``gpt`` or ``unet``."""
    return sized(SMALL, FULL)[name]


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross entropy of ``(N, T, vocabulary)`` logits."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _tokens(vocabulary: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, shape), torch.randint(vocabulary, shape)


def _images(batch: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))


def _pixels(batch: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(2, (batch, size, size))


def _gpt(layers: int, width: int, heads: int, context: int, vocabulary: int) -> nn.Module:
    model = zoo.gpt(layers=layers, width=width, heads=heads, context=context, vocabulary=vocabulary)
    return model if is_small() else model.to(torch.bfloat16)


FULL = {
    case.name: case
    for case in (
        Training(
            "resnet101",
            "ResNet-101, 224 px, batch 256, TF32",
            zoo.resnet101,
            lambda: _images(256, 224),
            functional.cross_entropy,
            (4, 8, 16),
        ),
        Training(
            "gpt",
            "GPT, 24 layers, d=2048, 32 x 1024 tokens, bf16",
            lambda: _gpt(24, 2048, 16, 1024, 50304),
            lambda: _tokens(50304, 32, 1024),
            token_loss,
            (4, 8, 16),
            "fine",
        ),
        Training(
            "unet",
            "U-Net, width 64, 192 px, batch 256, TF32",
            zoo.unet,
            lambda: _pixels(256, 192),
            functional.cross_entropy,
            (4, 8, 16),
            "fine",
        ),
    )
}

SMALL = {
    case.name: case
    for case in (
        Training(
            "resnet101",
            "tiny: ResNet-18, 32 px, batch 16",
            zoo.resnet18,
            lambda: _images(16, 32),
            functional.cross_entropy,
            (4,),
        ),
        Training(
            "gpt",
            "tiny: GPT, 2 layers, d=32, 8 x 16 tokens",
            lambda: _gpt(2, 32, 2, 16, 64),
            lambda: _tokens(64, 8, 16),
            token_loss,
            (4,),
        ),
        Training(
            "unet",
            "tiny: U-Net, width 4, 32 px, batch 8",
            lambda: zoo.unet(width=4),
            lambda: _pixels(8, 32),
            functional.cross_entropy,
            (4,),
        ),
    )
}
