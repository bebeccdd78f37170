"""The models of the cases as chains, which torchgpipe needs.

Tuples carry the tensors that later modules read.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from placer.zoo.llama import Llama, rotations

from ..executor import parts
from . import models

Values = tuple[Tensor, ...]


def units(model: nn.Module) -> list[nn.Module]:
    """Return a model as a chain of modules; each takes the previous module's result.

    Raises:
        TypeError: the model has no chain here.
    """
    if isinstance(model, Llama):
        return [
            Rotated(model),
            *map(Turn, model.layers),
            Last(nn.Sequential(model.norm, model.lm_head), 0),
        ]
    if isinstance(model, models.T5):
        return list(_t5(model))
    if isinstance(model, nn.Sequential):
        return list(model)
    return parts.units(model)


def _t5(model: models.T5) -> Iterator[nn.Module]:
    """Yield the encoder, then the decoder.

    The encoder carries the tokens along with its values, the decoder the encoder's last value.
    """
    yield Begin(model.embedding)
    yield from map(Encode, model.encoder)
    yield Between(model.between, model.embedding)
    yield from map(Decode, model.decoder)
    yield Last(nn.Sequential(model.norm, model.head), 1)


class Rotated(nn.Module):
    """An embedding of tokens, with the rotation of their positions."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.embedding, self.size = model.embed_tokens, model.size

    def forward(self, tokens: Tensor) -> Values:
        x: Tensor = self.embedding(tokens)
        return (x, *rotations(tokens.size(1), self.size, x))


class Turn(nn.Module):
    """A block of a Llama."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, values: Values) -> Values:
        x, cosine, sine = values
        return self.block(x, (cosine, sine)), cosine, sine


class Begin(nn.Module):
    """An embedding of tokens that also returns the tokens."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens: Tensor) -> Values:
        return tokens, self.embedding(tokens)


class Encode(nn.Module):
    """A block of an encoder."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, values: Values) -> Values:
        tokens, memory = values
        return tokens, self.block(memory)


class Between(nn.Module):
    """The transition from the encoder to the decoder, which embeds the tokens again."""

    def __init__(self, norm: nn.Module, embedding: nn.Module) -> None:
        super().__init__()
        self.norm, self.embedding = norm, embedding

    def forward(self, values: Values) -> Values:
        tokens, memory = values
        return self.norm(memory), self.embedding(tokens)


class Decode(nn.Module):
    """A block of a decoder."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, values: Values) -> Values:
        memory, x = values
        return memory, self.block(x, memory)


class Last(nn.Module):
    """The head, applied to one of the values."""

    def __init__(self, head: nn.Module, index: int) -> None:
        super().__init__()
        self.head, self.index = head, index

    def forward(self, values: Values) -> Tensor:
        logits: Tensor = self.head(values[self.index])
        return logits


__all__ = ["units"]
