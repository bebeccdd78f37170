"""A Llama: rotary positions, normalisation by the root mean square, gated perceptrons, fewer heads
for keys and values.

    tokens ─▶ embedding ─▶ blocks ─▶ norm ─▶ head ─▶ logits
                           └─ each  x + attention(norm(x)),  then  x + mlp(norm(x))

Parameters have the names of transformers' ``LlamaForCausalLM``, without its ``model.`` in front.

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, section 2.2,
and "Llama 2", 2023, section 2.2; Su et al., "RoFormer", 2021, for the rotary positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Llama", "llama", "llama_70b"]

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine by position, each of shape ``(T, width / heads)``."""


class Attention(nn.Module):
    """Each token looks at itself and those before it: ``(N, T, width)`` to ``(N, T, width)``.

    Args:
        width: of the embedding.
        heads: of the queries.
        key_heads: of the keys and values; each serves ``heads / key_heads`` heads of the queries.
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
        """Shape ``(N, T, width)`` for an input of that shape and the rotation of its positions."""
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
        hidden: features between.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(N, T, width)`` for an input of that shape."""
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """Attention and a gated perceptron, each added to its input: ``(N, T, width)`` to ``(N, T,
    width)``.
    """

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = Attention(width, heads, key_heads)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Shape ``(N, T, width)`` for an input of that shape and the rotation of its positions."""
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        added: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added


class Llama(nn.Module):
    """Next-token logits: int64 tokens of shape ``(N, T)`` to ``(N, T, vocabulary)``.

    Args:
        layers: blocks.
        width: of the embedding.
        heads: of each block's queries.
        key_heads: of each block's keys and values.
        hidden: features between the linears of each block's perceptron.
        vocabulary: distinct tokens.
    """

    def __init__(
        self, layers: int, width: int, heads: int, key_heads: int, hidden: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, key_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape ``(N, T, vocabulary)`` for int64 tokens of shape ``(N, T)``."""
        x: Tensor = self.embed_tokens(tokens)
        rotation = rotations(tokens.size(1), self.size, x)
        for block in self.layers:
            x = block(x, rotation)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def llama(
    layers: int = 16,
    width: int = 4096,
    heads: int = 32,
    key_heads: int = 8,
    hidden: int = 14336,
    vocabulary: int = 32000,
) -> Llama:
    """A Llama; at the defaults half of an 8-billion one: 3.8 billion parameters.

    Args:
        layers: blocks.
        width: of the embedding.
        heads: of each block's queries.
        key_heads: of each block's keys and values.
        hidden: features between the linears of each block's perceptron.
        vocabulary: distinct tokens.
    """
    return Llama(layers, width, heads, key_heads, hidden, vocabulary)


def llama_70b() -> Llama:
    """A Llama of the sizes of Llama 2 70B: 69.0 billion parameters; make it under
    ``torch.device("meta")``.
    """
    return Llama(layers=80, width=8192, heads=64, key_heads=8, hidden=28672, vocabulary=32000)


def rotations(length: int, size: int, like: Tensor) -> Rotation:
    """Cosine and sine of every position's angles, each of shape ``(length, size)``.

    Args:
        length: positions.
        size: features of a head; two halves of it turn by the same angles.
        like: a tensor of the wanted device and dtype.
    """
    places = torch.arange(length, device=like.device, dtype=torch.float32)
    speeds = 10000.0 ** -(torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size)
    angles = torch.outer(places, speeds).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Each pair of features ``i`` and ``i + size / 2`` turned by its position's angle.

    Args:
        x: shape ``(N, heads, T, size)``.
        rotation: of the T positions.
    """
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
