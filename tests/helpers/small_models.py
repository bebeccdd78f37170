"""Models written for the tests: what torchvision, transformers and placer.zoo do not have."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    """Two convolutions with group norm, the time embedding added between them."""

    def __init__(self, in_channels: int, channels: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.time = nn.Linear(embedding, channels)
        self.norm2 = nn.GroupNorm(4, channels)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = (
            nn.Conv2d(in_channels, channels, 1) if in_channels != channels else nn.Identity()
        )

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + self.time(functional.silu(embedding))[:, :, None, None]
        h = self.conv2(self.dropout(functional.silu(self.norm2(h))))
        return h + self.skip(x)


class Attention(nn.Module):
    """Self-attention over the pixels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = self.norm(x).reshape(n, c, h * w).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return x + mixed.transpose(1, 2).reshape(n, c, h, w)


class DiffusionUNet(nn.Module):
    """Predicts an image's noise: a U-Net with skips appended to and popped from a list."""

    def __init__(self, channels: int = 8, levels: int = 2) -> None:
        super().__init__()
        embedding = 4 * channels
        self.channels = channels
        self.time_embedding = nn.Sequential(
            nn.Linear(channels, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)
        widths = [channels * 2**level for level in range(levels)]
        skips, here = [channels], channels
        self.down = nn.ModuleList()
        for level, width in enumerate(widths):
            stage = nn.ModuleDict(
                {"block": ResidualBlock(here, width, embedding), "attention": Attention(width)}
            )
            skips.append(width)
            if level + 1 < levels:
                stage["downsample"] = nn.Conv2d(width, width, 3, stride=2, padding=1)
                skips.append(width)
            self.down.append(stage)
            here = width
        self.middle = nn.ModuleList(
            [ResidualBlock(here, here, embedding), ResidualBlock(here, here, embedding)]
        )
        self.up = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            blocks = nn.ModuleList()
            for _ in range(2):
                blocks.append(ResidualBlock(here + skips.pop(), width, embedding))
                here = width
            stage = nn.ModuleDict({"blocks": blocks})
            if level:
                stage["upsample"] = nn.ConvTranspose2d(width, width, 2, stride=2)
            self.up.append(stage)
        self.conv_out = nn.Conv2d(here, 3, 3, padding=1)

    def forward(
        self, sample: Tensor, time: Tensor, *, return_dict: bool = True
    ) -> dict[str, Tensor] | tuple[Tensor]:
        half = self.channels // 2
        rates = torch.exp(
            -math.log(10000) * torch.arange(half, device=time.device, dtype=sample.dtype) / half
        )
        angles = time[:, None].to(sample.dtype) * rates
        embedding = self.time_embedding(torch.cat([angles.sin(), angles.cos()], dim=1))
        h = self.conv_in(sample)
        skips = [h]
        for stage in self.down:
            h = stage["attention"](stage["block"](h, embedding))
            skips.append(h)
            if "downsample" in stage:
                h = stage["downsample"](h)
                skips.append(h)
        for block in self.middle:
            h = block(h, embedding)
        for stage in self.up:
            for block in stage["blocks"]:
                h = block(torch.cat([h, skips.pop()], dim=1), embedding)
            if "upsample" in stage:
                h = stage["upsample"](h)
        noise = self.conv_out(h)
        return {"sample": noise} if return_dict else (noise,)


class Tagger(nn.Module):
    """Embedding, stacked bidirectional LSTM, linear: a class for each token, and the last state."""

    def __init__(
        self, bidirectional: bool = True, batch_first: bool = True, layers: int = 2
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(
            8,
            6,
            num_layers=layers,
            bidirectional=bidirectional,
            batch_first=batch_first,
            dropout=0.1 * (layers > 1),
        )
        self.head = nn.Linear(12 if bidirectional else 6, 5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(tokens)
        y, (hidden, _) = self.lstm(embedded if self.batch_first else embedded.transpose(0, 1))
        return self.head(y), hidden


class StackedLSTMs(nn.Module):
    """LSTM after LSTM as modules of their own, the state of one handed to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(4, 6, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.decoder = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.encoder(x)
        z, _ = self.decoder(self.norm(y), state)
        return self.head(z[:, -1])


class Add(nn.Module):
    """A layer without state, through which a gradient passes as it is."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Skips(nn.Module):
    """Every layer reads all that was made before it, so that a random map sends values between all
    devices."""

    def __init__(self, layers: int = 6, features: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(features * (index + 1), features) for index in range(layers)
        )
        self.add = Add()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(torch.tanh(layer(torch.cat(made, dim=1))))
        return self.norm(self.add(made[-1], made[-3])) + made[0] * made[2]


class TiedTokens(nn.Module):
    """Tokens in, logits out: the head's weight is the embedding's."""

    def __init__(self, vocabulary: int = 7, features: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.mix = nn.Linear(features, features)
        self.head = nn.Linear(features, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


class Branching(nn.Module):
    """A branch on a tensor's value: it cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        result: Tensor = self.last(2 * y if y.sum().item() > 0 else y)
        return result


def tokens_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of ``(N, T, vocabulary)`` logits."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
