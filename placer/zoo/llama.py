"""A Llama: rotary positions, RMS normalisation, gated perceptrons and grouped-query attention.

    tokens ─▶ embedding ─▶ blocks ─▶ norm ─▶ head ─▶ logits
                           └─ each  x + attention(norm(x)),  then  x + mlp(norm(x))

Parameters have the names of transformers' ``LlamaForCausalLM``, without the prefix ``model.``.

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, section 2.2,
and "Llama 2", 2023, section 2.2; Su et al., "RoFormer", 2021, for the rotary positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine by position, each of shape ``(T, width / heads)``."""


class Attention(nn.Module):
    """Causal grouped-query self-attention: ``(N, T, width)`` to ``(N, T, width)``.

    Args:
        width: of the embedding.
        heads: number of query heads.
        key_heads: number of key and value heads; each serves ``heads / key_heads`` query heads.
    """

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        if width % heads or heads % key_heads:
            raise ValueError(
                f"{key_heads} key heads, {heads} heads and a width of {width} do not divide one "
                "another"
            )
        self.size = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, key_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, key_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return attention outputs of shape ``(N, T, width)``."""
        count, length, _ = x.shape
        shape = (count, length, -1, self.size)
        query, key, value = (
            layer(x).view(shape).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotated(query, rotation), rotated(key, rotation)
        seen = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        mixed: Tensor = self.o_proj(seen.transpose(1, 2).reshape(count, length, -1))
        return mixed


class MLP(nn.Module):
    """A gated perceptron: ``(N, T, width)`` to ``(N, T, width)``.

    Args:
        width: of the embedding.
        hidden: number of hidden features.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape ``(N, T, width)``."""
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """Attention and a gated perceptron with residuals: ``(N, T, width)`` to ``(N, T, width)``."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = Attention(width, heads, key_heads)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return the block's output, shape ``(N, T, width)``."""
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        added: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added


class Llama(nn.Module):
    """A language model: int64 tokens ``(N, T)`` to next-token logits ``(N, T, vocabulary)``.

    At the defaults, it is half of an 8-billion model, with 3.8 billion parameters.

    Args:
        layers: number of blocks.
        width: of the embedding.
        heads: query heads of each block.
        key_heads: key and value heads of each block.
        hidden: hidden features of each block's perceptron.
        vocabulary: number of distinct tokens.
    """

    def __init__(
        self,
        layers: int = 16,
        width: int = 4096,
        heads: int = 32,
        key_heads: int = 8,
        hidden: int = 14336,
        vocabulary: int = 32000,
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, key_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape ``(N, T, vocabulary)`` for int64 tokens of shape ``(N, T)``."""
        x: Tensor = self.embed_tokens(tokens)
        rotation = rotations(tokens.size(1), self.size, x)
        for block in self.layers:
            x = block(x, rotation)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


llama = Llama
"""The callable that makes a Llama, in lower case like ``resnet50``."""


def llama_70b() -> Llama:
    """Return a Llama of the sizes of Llama 2 70B, with 69.0 billion parameters.

    Create it under ``torch.device("meta")``.
    """
    return Llama(layers=80, width=8192, heads=64, key_heads=8, hidden=28672, vocabulary=32000)


def rotations(length: int, size: int, like: Tensor) -> Rotation:
    """Return cosine and sine of every position's angles, each of shape ``(length, size)``.

    Args:
        length: number of positions.
        size: features of a head; its two halves have equal angles.
        like: a tensor of the wanted device and dtype.
    """
    places = torch.arange(length, device=like.device, dtype=torch.float32)
    speeds = 10000.0 ** -(torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size)
    # feature i turns by 10000^(-i / size) per position; both halves have equal angles
    angles = torch.outer(places, speeds).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of features ``i`` and ``i + size / 2`` by its position's angle.

    Args:
        x: shape ``(N, heads, T, size)``.
        rotation: of the T positions.
    """
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
