"""Small networks in float64 whose weights and data are formulas, so that no generator is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = 8
VOCABULARY = 11


def waves(*shape: int, phase: float = 0.0) -> Tensor:
    """Return a tensor of cosines that are all unlike."""
    count = 1
    for length in shape:
        count *= length
    return torch.cos(0.37 * torch.arange(count, dtype=torch.float64) + phase).reshape(shape)


def tokens(*shape: int, step: int = 7) -> Tensor:
    """Return token numbers below ``VOCABULARY``."""
    count = 1
    for length in shape:
        count *= length
    return (torch.arange(count) * step // 3 % VOCABULARY).reshape(shape)


def with_known_weights(model: nn.Module) -> nn.Module:
    """Return the model in float64, every parameter a formula of its position."""
    model = model.double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            scale = 0.7 / max(1, parameter[0].numel()) ** 0.5 if parameter.dim() > 1 else 0.3
            shift = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(scale * waves(*parameter.shape, phase=number) + shift * scale)
    return model


def mlp() -> nn.Module:
    """Linear layers with unlike widths."""
    widths = (6, 12, 9, 7, 5)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation, and the input added to their result."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(x + self.second_norm(self.second(y)))


def residual_cnn() -> nn.Module:
    """A stem, two residual blocks and a classifier."""
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    return nn.Sequential(stem, ResidualBlock(4), ResidualBlock(4), head)


class UNet(nn.Module):
    """Two levels down and up, with a skip connection at each level."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 3, 3, padding=1)
        self.down2 = nn.Conv2d(3, 6, 3, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.mix2 = nn.Conv2d(12, 3, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(3, 3, 2, stride=2)
        self.mix1 = nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.tanh(self.down1(x))
        two = torch.tanh(self.down2(functional.max_pool2d(one, 2)))
        low = torch.tanh(self.bottom(functional.max_pool2d(two, 2)))
        two = torch.tanh(self.mix2(torch.cat([two, self.up2(low)], dim=1)))
        return self.mix1(torch.cat([one, self.up1(two)], dim=1))


class Encoder(nn.Module):
    """A transformer encoder without dropout, with a mask that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.position = nn.Parameter(torch.zeros(6, 8))
        options = {"nhead": 2, "dim_feedforward": 12, "dropout": 0.0, "batch_first": True}
        self.first = nn.TransformerEncoderLayer(8, **options)
        self.second = nn.TransformerEncoderLayer(8, **options, norm_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool, device=words.device).triu(1)
        x = self.embedding(words) + self.position
        return self.head(self.second(self.first(x, src_mask=mask), src_mask=mask))


class Recurrent(nn.Module):
    """Two LSTMs, the state of the first handed to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.encoder = nn.LSTM(5, 6, batch_first=True)
        self.decoder = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        x, state = self.encoder(self.embedding(words))
        x, _ = self.decoder(x, state)
        return self.head(x)


class Tied(nn.Module):
    """A language model whose head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.mix1, self.mix2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.mix1(self.embedding(words)))
        return self.head(self.norm(torch.tanh(self.mix2(x))))


def batch_norm_mlp() -> nn.Module:
    """Batch normalisation between linear layers, with unlike momenta."""
    first = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU())
    second = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU())
    return nn.Sequential(first, second, nn.Linear(8, 7), nn.Linear(7, 5))


class Mixer(nn.Module):
    """Dropout with probability 0, and an operator between modules that reads three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.left = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.0))
        self.right = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.SiLU())
        self.leave = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(torch.cat([self.left(x) * 2, self.right(x), x], dim=1))


class Named(nn.Module):
    """Keyword arguments in, a dictionary out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 6)
        self.numbers = nn.Linear(4, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, *, words: Tensor, numbers: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.words(words).mean(1) + scale * self.numbers(numbers)
        hidden = torch.tanh(self.mix(x))
        return {"logits": self.head(hidden), "hidden": hidden}


class Branching(nn.Module):
    """A branch on a value, which no graph can hold, so that the model runs through hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        if y.sum().item() > 0:
            y = 2 * y
        return self.last(torch.tanh(self.middle(y)))


class Pair(nn.Module):
    """Two results, one of which comes from the first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.side = nn.Linear(6, 3)
        self.deep = nn.Sequential(nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.sigmoid(self.trunk(x))
        return self.head(self.deep(x) + x), self.side(x)


def squares(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean square of the difference."""
    return functional.mse_loss(output, target)


def words_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of logits of shape ``(N, T, vocabulary)``."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def named_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Return the cross entropy of the logits, and a penalty of the hidden values."""
    penalty = output["hidden"].square().mean()
    return functional.cross_entropy(output["logits"], target) + 0.1 * penalty


def pair_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Return the loss of both results."""
    return functional.cross_entropy(output[0], target) + output[1].square().mean()


@dataclass(frozen=True)
class Network:
    """A model with a batch to train on.

    Attributes:
        make: builds the model.
        inputs: one batch of ``SAMPLES``: a tensor, or a dictionary of keyword arguments.
        target: of the same samples.
        loss_fn: the loss, a mean over samples.
        captured: whether a graph of the model can be captured; else it runs through hooks.
    """

    make: Callable[[], nn.Module]
    inputs: Any
    target: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor]
    captured: bool = True


_FEATURES = waves(SAMPLES, 6)
_CLASSES = tokens(SAMPLES) % 5
_WORDS = tokens(SAMPLES, 6)
_NEXT_WORDS = tokens(SAMPLES, 6, step=5)

NETWORKS: dict[str, Network] = {
    "mlp": Network(mlp, _FEATURES, waves(SAMPLES, 5, phase=1.0), squares),
    "residual cnn": Network(
        residual_cnn, waves(SAMPLES, 3, 8, 8), _CLASSES, functional.cross_entropy
    ),
    "u-net with skips": Network(
        UNet, waves(SAMPLES, 1, 8, 8), waves(SAMPLES, 2, 8, 8, phase=2.0), squares
    ),
    "transformer encoder": Network(Encoder, _WORDS, _NEXT_WORDS, words_loss),
    "lstm": Network(Recurrent, _WORDS, _NEXT_WORDS, words_loss),
    "tied weights": Network(Tied, _WORDS, _NEXT_WORDS, words_loss),
    "batch normalisation": Network(batch_norm_mlp, _FEATURES, _CLASSES, functional.cross_entropy),
    "dropout of 0": Network(Mixer, _FEATURES, _CLASSES, functional.cross_entropy),
    "dictionary inputs": Network(
        Named, {"words": _WORDS, "numbers": waves(SAMPLES, 4)}, _CLASSES, named_loss
    ),
    "through hooks": Network(
        Branching, _FEATURES, _CLASSES, functional.cross_entropy, captured=False
    ),
    "two results": Network(Pair, _FEATURES, _CLASSES, pair_loss),
}
