"""A decoder-only transformer like GPT-2, with learned positions and pre-normalisation.

    tokens ─▶ token + position embedding ─▶ blocks ─▶ norm ─▶ head ─▶ logits
                                            └─ each  x + attention(norm(x)),  then  x + mlp(norm(x))

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention: ``(N, T, width)`` to ``(N, T, width)``.

    Args:
        width: of the embedding.
        heads: number of heads; they share the width evenly.
        dropout: probability of dropping an attention weight in training.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be shared evenly by {heads} heads")
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return attention outputs of shape ``(N, T, width)``."""
        size, length, width = x.shape
        # (N, T, 3 * width) -> three of (N, heads, T, width / heads)
        split = self.qkv(x).view(size, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        dropped = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropped, is_causal=True
        )
        mixed: Tensor = self.out(seen.transpose(1, 2).reshape(size, length, width))
        return mixed


class Block(nn.Module):
    """Attention and a two-layer perceptron with residuals: ``(N, T, width)`` to ``(N, T, width)``.

    Args:
        width: of the embedding; the perceptron's hidden layer has four times as many features.
        heads: of the attention.
        dropout: probability of dropping a feature in training.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shape ``(N, T, width)``."""
        x = x + self.attention(self.norm1(x))
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


class GPT(nn.Module):
    """A language model: int64 tokens ``(N, T)`` to next-token logits ``(N, T, vocabulary)``.

    T is at most ``context``. With ``tied`` and the other defaults, it is GPT-2 with 124 million
    parameters.

    Args:
        layers: number of blocks.
        width: of the embedding.
        heads: of each block's attention.
        context: maximum number of tokens in a sequence.
        vocabulary: number of distinct tokens.
        dropout: probability of dropping a feature in training.
        tied: whether the head shares the token embedding's weight.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        context: int = 1024,
        vocabulary: int = 50257,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)
        # after initialisation, which would otherwise run twice on the shared weight
        if tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape ``(N, T, vocabulary)`` for int64 tokens of shape ``(N, T)``."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x: Tensor = self.drop(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


gpt = GPT
"""The callable that makes a GPT, in lower case like ``resnet50``."""


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
