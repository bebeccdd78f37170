"""A UNet with the shapes of Stable Diffusion XL's, in plain torch.

    latents ─▶ conv_in ─▶ down 0: 2 residual blocks ───────────────────── skips ──▶ up 2 ─▶ conv_out
                           └▶ down 1: 2 residual blocks, transformers ── skips ──▶ up 1
                               └▶ down 2: the same, deeper ───────────── skips ──▶ up 0
                                   └▶ middle ───────────────────────────────────────┘

At full size it has the parameters of ``stabilityai/stable-diffusion-xl-base-1.0``: 2,567,463,684.

Source: Podell et al., "SDXL: Improving Latent Diffusion Models for High-Resolution Image
Synthesis", 2023, table 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """The sizes of a UNet and its inputs.

    Attributes:
        channels: of each level.
        depths: transformer blocks in each transformer of a level; 0 for none.
        head: width of an attention head.
        context: width of a text state.
        added: width of the pooled text and the sizes of the image together.
        pixels: of a latent image, each way.
        tokens: of a text.
        groups: of group normalisation.
    """

    channels: tuple[int, ...] = (320, 640, 1280)
    depths: tuple[int, ...] = (0, 2, 10)
    head: int = 64
    context: int = 2048
    added: int = 2816
    pixels: int = 128
    tokens: int = 77
    groups: int = 32


TINY = Sizes((8, 16), (0, 1), head=8, context=12, added=10, pixels=16, tokens=5, groups=4)
"""Sizes for a trial on CPUs."""


class ResidualBlock(nn.Module):
    """Two convolutions with the embedding of the time between them: ``(N, in, H, W)``."""

    def __init__(self, channels: int, out_channels: int, embedding: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.time = nn.Linear(embedding, out_channels)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = (
            nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)
        )

    def forward(self, images: Tensor, embedding: Tensor) -> Tensor:
        """Return ``(N, out_channels, H, W)``."""
        hidden = self.conv1(functional.silu(self.norm1(images)))
        hidden = hidden + self.time(functional.silu(embedding))[:, :, None, None]
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        return self.shortcut(images) + hidden


class Attention(nn.Module):
    """Attention of pixels to themselves or to a text: ``(N, L, width)``."""

    def __init__(self, width: int, context: int, head: int) -> None:
        super().__init__()
        self.heads = width // head
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(context, width, bias=False)
        self.value = nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, pixels: Tensor, context: Tensor) -> Tensor:
        """Return ``(N, L, width)``."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(pixels), self.key(context), self.value(context))
        )
        found = functional.scaled_dot_product_attention(query, key, value)
        return self.out(found.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A gated linear layer and a linear layer: ``(N, L, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 8 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return ``(N, L, width)``."""
        hidden, gate = self.gate(pixels).chunk(2, dim=-1)
        return self.out(hidden * functional.gelu(gate))


class TransformerBlock(nn.Module):
    """Attention to pixels, attention to the text and a feed-forward layer: ``(N, L, width)``."""

    def __init__(self, width: int, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.own = Attention(width, width, sizes.head)
        self.text = Attention(width, sizes.context, sizes.head)
        self.feed_forward = FeedForward(width)

    def forward(self, pixels: Tensor, text: Tensor) -> Tensor:
        """Return ``(N, L, width)``."""
        normed = self.norm1(pixels)
        pixels = pixels + self.own(normed, normed)
        pixels = pixels + self.text(self.norm2(pixels), text)
        return pixels + self.feed_forward(self.norm3(pixels))


class Transformer(nn.Module):
    """Transformer blocks over the pixels of an image: ``(N, width, H, W)``."""

    def __init__(self, width: int, depth: int, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(sizes.groups, width)
        self.proj_in = nn.Linear(width, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, sizes) for _ in range(depth))
        self.proj_out = nn.Linear(width, width)

    def forward(self, images: Tensor, text: Tensor) -> Tensor:
        """Return ``(N, width, H, W)``."""
        pixels = self.proj_in(self.norm(images).flatten(2).transpose(1, 2))
        for block in self.blocks:
            pixels = block(pixels, text)
        found = self.proj_out(pixels).transpose(1, 2).unflatten(2, images.shape[2:])
        return images + found


class Level(nn.Module):
    """Residual blocks of one resolution, each with a transformer if ``depth`` is positive."""

    def __init__(self, inputs: Sequence[int], width: int, depth: int, sizes: Sizes) -> None:
        super().__init__()
        embedding = 4 * sizes.channels[0]
        self.residual = nn.ModuleList(
            ResidualBlock(channels, width, embedding, sizes.groups) for channels in inputs
        )
        self.transformers = nn.ModuleList(
            Transformer(width, depth, sizes) for _ in (inputs if depth else ())
        )

    def step(self, number: int, images: Tensor, embedding: Tensor, text: Tensor) -> Tensor:
        """Return the images after one block and its transformer."""
        images = self.residual[number](images, embedding)
        return self.transformers[number](images, text) if self.transformers else images


class Upsample(nn.Module):
    """Twice the pixels each way, and a convolution: ``(N, width, 2 H, 2 W)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(N, width, 2 H, 2 W)``."""
        return self.conv(functional.interpolate(images, scale_factor=2.0, mode="nearest"))


class SDXLUNet(nn.Module):
    """The noise in latent images, by the time, a text and further conditions.

    Args:
        sizes: of everything.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        channels, levels = sizes.channels, len(sizes.channels)
        embedding = 4 * channels[0]
        self.frequencies = channels[0] // 2
        self.time = nn.Sequential(
            nn.Linear(channels[0], embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.added = nn.Sequential(
            nn.Linear(sizes.added, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.conv_in = nn.Conv2d(4, channels[0], 3, padding=1)
        skips = [channels[0]]
        self.down, self.smaller = nn.ModuleList(), nn.ModuleList()
        before = channels[0]
        for level, (width, depth) in enumerate(zip(channels, sizes.depths, strict=True)):
            self.down.append(Level((before, width), width, depth, sizes))
            skips += [width, width]
            if level + 1 < levels:
                self.smaller.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
            before = width
        self.middle = Level((before,), before, sizes.depths[-1], sizes)
        self.middle_out = ResidualBlock(before, before, embedding, sizes.groups)
        self.up, self.larger = nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(levels)):
            width, inputs = channels[level], []
            for _ in range(3):
                inputs.append(before + skips.pop())
                before = width
            self.up.append(Level(inputs, width, sizes.depths[level], sizes))
            if level:
                self.larger.append(Upsample(width))
        self.norm_out = nn.GroupNorm(sizes.groups, channels[0])
        self.conv_out = nn.Conv2d(channels[0], 4, 3, padding=1)

    def forward(self, latents: Tensor, times: Tensor, text: Tensor, added: Tensor) -> Tensor:
        """Return the noise.

        Args:
            latents: ``(N, 4, pixels, pixels)``.
            times: ``(N,)``, the steps of denoising.
            text: ``(N, tokens, context)``, the states of a text encoder.
            added: ``(N, added)``, the pooled text and the sizes of the image.
        """
        steps = torch.arange(self.frequencies, device=times.device) / self.frequencies
        angles = times[:, None] * torch.exp(-9.210340371976184 * steps)[None]
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(latents.dtype)
        embedding = self.time(waves) + self.added(added)
        images = self.conv_in(latents)
        skips = [images]
        for number, level in enumerate(self.down):
            for block in range(2):
                images = level.step(block, images, embedding, text)
                skips.append(images)
            if number < len(self.smaller):
                images = self.smaller[number](images)
                skips.append(images)
        images = self.middle_out(self.middle.step(0, images, embedding, text), embedding)
        for number, level in enumerate(self.up):
            for block in range(3):
                images = torch.cat([images, skips.pop()], dim=1)
                images = level.step(block, images, embedding, text)
            if number < len(self.larger):
                images = self.larger[number](images)
        return self.conv_out(functional.silu(self.norm_out(images)))


def batch(sizes: Sizes, images: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return random inputs for a number of images, on torch's default device."""
    return (
        torch.randn(images, 4, sizes.pixels, sizes.pixels, dtype=dtype),
        torch.randint(1000, (images,)).float(),
        torch.randn(images, sizes.tokens, sizes.context, dtype=dtype),
        torch.randn(images, sizes.added, dtype=dtype),
    )
