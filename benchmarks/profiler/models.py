"""Two models that ``placer.zoo`` does not have: the shapes of Inception-v3 and of T5."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Unit(nn.Sequential):
    """A convolution, batch normalisation and a ReLU."""

    def __init__(
        self, inside: int, outside: int, kernel: int | tuple[int, int] = 1, stride: int = 1
    ) -> None:
        sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if stride > 1 else (sizes[0] // 2, sizes[1] // 2)
        convolution = nn.Conv2d(inside, outside, sizes, stride, padding, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outside, eps=0.001), nn.ReLU(inplace=True))


class Mixed(nn.Module):
    """Branches side by side, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _row(inside: int, *widths: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """Return convolutions one after another, each given by its channels and kernel."""
    units, here = [], inside
    for outside, kernel in widths:
        units.append(Unit(here, outside, kernel))
        here = outside
    return nn.Sequential(*units)


def _pooled(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Unit(inside, outside))


def _mixed_a(inside: int, pool: int) -> Mixed:
    rows = (
        _row(inside, (64, 1)),
        _row(inside, (48, 1), (64, 5)),
        _row(inside, (64, 1), (96, 3), (96, 3)),
    )
    return Mixed(*rows, _pooled(inside, pool))


def _mixed_c(width: int) -> Mixed:
    across, down = (1, 7), (7, 1)
    five = ((width, 1), (width, down), (width, across), (width, down), (192, across))
    return Mixed(
        _row(768, (192, 1)),
        _row(768, (width, 1), (width, across), (192, down)),
        _row(768, *five),
        _pooled(768, 192),
    )


def _mixed_e(inside: int) -> Mixed:
    fork = Mixed(Unit(384, 384, (1, 3)), Unit(384, 384, (3, 1)))
    other = Mixed(Unit(384, 384, (1, 3)), Unit(384, 384, (3, 1)))
    long = nn.Sequential(_row(inside, (448, 1), (384, 3)), other)
    return Mixed(
        _row(inside, (320, 1)), nn.Sequential(Unit(inside, 384), fork), long, _pooled(inside, 192)
    )


def inception(num_classes: int = 1000) -> nn.Sequential:
    """Return the layers of Inception-v3 without its auxiliary head, for at least 75 pixels.

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016,
    table 1.
    """
    stem = nn.Sequential(
        Unit(3, 32, 3, 2),
        Unit(32, 32, 3),
        Unit(32, 64, 3),
        nn.MaxPool2d(3, 2),
        Unit(64, 80),
        Unit(80, 192, 3),
        nn.MaxPool2d(3, 2),
    )
    shrink_b = Mixed(
        Unit(288, 384, 3, 2),
        nn.Sequential(_row(288, (64, 1), (96, 3)), Unit(96, 96, 3, 2)),
        nn.MaxPool2d(3, 2),
    )
    sevens = _row(768, (192, 1), (192, (1, 7)), (192, (7, 1)))
    shrink_d = Mixed(
        nn.Sequential(Unit(768, 192), Unit(192, 320, 3, 2)),
        nn.Sequential(sevens, Unit(192, 192, 3, 2)),
        nn.MaxPool2d(3, 2),
    )
    mixed = [_mixed_a(192, 32), _mixed_a(256, 64), _mixed_a(288, 64), shrink_b]
    mixed += [
        _mixed_c(128),
        _mixed_c(160),
        _mixed_c(160),
        _mixed_c(192),
        shrink_d,
        _mixed_e(1280),
        _mixed_e(2048),
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(2048, num_classes))
    return nn.Sequential(stem, *mixed, head)


class Attention(nn.Module):
    """Attention of ``x`` to ``memory``, or to itself without a memory."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        pairs = ((self.query, x), (self.key, memory), (self.value, memory))
        split = [
            layer(source).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, source in pairs
        ]
        seen = functional.scaled_dot_product_attention(
            split[0], split[1], split[2], is_causal=self.causal
        )
        mixed: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """A block of the encoder, or of the decoder if it gets a memory."""

    def __init__(self, width: int, heads: int, hidden: int, decodes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if decodes else 2))
        self.attention = Attention(width, heads, causal=decodes)
        self.cross = Attention(width, heads, causal=False) if decodes else None
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False)
        )

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory)
        added: Tensor = x + self.mlp(self.norms[-1](x))
        return added


class T5(nn.Module):
    """An encoder, and a decoder that reads the encoder's result in every block.

    It maps (N, T) tokens to tokens and has no relative positions.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", JMLR 2020, section 2.1.
    """

    def __init__(self, layers: int, width: int, heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(
            Block(width, heads, hidden, decodes=False) for _ in range(layers)
        )
        self.between = nn.RMSNorm(width)
        self.decoder = nn.ModuleList(
            Block(width, heads, hidden, decodes=True) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        memory: Tensor = self.embedding(tokens)
        for block in self.encoder:
            memory = block(memory)
        memory = self.between(memory)
        x: Tensor = self.embedding(tokens)
        for block in self.decoder:
            x = block(x, memory)
        logits: Tensor = self.head(self.norm(x))
        return logits
