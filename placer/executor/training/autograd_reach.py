"""The leaves that a gradient would go back to, found in autograd's graph without computing one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from placer.executor.training.stages.training_slot import Key


def reached(result: Any, leaves: Mapping[Key, Tensor]) -> frozenset[Key]:
    """Return the leaves that a result was made of.

    Args:
        result: a tensor, or a number, from which no gradient goes back.
        leaves: of autograd, by name or position.
    """
    names = {id(leaf): key for key, leaf in leaves.items()}
    return frozenset(names[id(leaf)] for leaf in _leaves(result) if id(leaf) in names)


def parameters(result: Tensor) -> list[nn.Parameter]:
    """Return the parameters that a gradient goes back to.

    Passes run over aliases of a model's parameters, which are not ``nn.Parameter`` objects.
    """
    return [leaf for leaf in _leaves(result) if isinstance(leaf, nn.Parameter)]


def _leaves(result: Any) -> Iterator[Tensor]:
    waiting = [result.grad_fn] if isinstance(result, Tensor) and result.grad_fn is not None else []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        sources = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= sources
        waiting += sources
