"""What a gradient goes back to, told by a look at autograd's graph: none is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from placer.executor.training.slot import Key


def reached(result: Any, leaves: Mapping[Key, Tensor]) -> frozenset[Key]:
    """The leaves that a result was made of.

    Args:
        result: a tensor, or a number, of which no gradient goes back.
        leaves: of autograd, by name or position.
    """
    names = {id(leaf): key for key, leaf in leaves.items()}
    waiting = [result.grad_fn] if isinstance(result, Tensor) and result.grad_fn is not None else []
    seen = set(waiting)
    found = []
    while waiting:
        node = waiting.pop()
        found.append(names.get(id(getattr(node, "variable", None))))
        sources = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= sources
        waiting += sources
    return frozenset(key for key in found if key is not None)
