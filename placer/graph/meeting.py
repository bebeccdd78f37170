"""Where the samples of a batch meet one another, so that micro-batches give something else than the batch.

    similarities of every sample to every other one          (n, n): both dimensions are the batch's
    a softmax, a sort, a running sum over the samples        the operation goes along the batch's dimension

Batch normalisation is no such place: that it takes micro-batches for batches is known of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from placer.graph.batch import grows
from placer.graph.granularity import module_stack
from placer.graph.lying import shape

_aten = torch.ops.aten
_ALONG: dict[Any, int] = {
    **dict.fromkeys((_aten.softmax.int, _aten.log_softmax.int, _aten._softmax.default, _aten._log_softmax.default), 1),
    **dict.fromkeys((_aten.cumsum.default, _aten.cumprod.default, _aten.sort.default, _aten.argsort.default), 1),
    _aten.flip.default: 1,
    _aten.roll.default: 2,
}
"""Operations that go along dimensions which one of their arguments names, and its place."""


def meeting(graph: fx.Graph, symbols: frozenset[Any]) -> str:
    """The first operation in which samples meet, and the module that runs it; empty where none is seen.

    Args:
        graph: a captured one.
        symbols: of the batch's size; where it is fixed, nothing is seen.
    """
    operations = (node for node in graph.nodes if node.op == "call_function")
    node = next((node for node in operations if _crosses(node, symbols) or _goes_along(node, symbols)), None)
    if node is None:
        return ""
    path = next((path for path, _ in reversed(module_stack(node))), "")
    return f"{node.target} of {repr(path) if path else 'the model itself'}"


def _crosses(node: fx.Node, symbols: frozenset[Any]) -> bool:
    return sum(grows(size, symbols) for size in shape(node)) > 1


def _goes_along(node: fx.Node, symbols: frozenset[Any]) -> bool:
    place = _ALONG.get(node.target)
    if place is None or place >= len(node.args):
        return False
    named, rank = node.args[place], len(shape(node.args[0]))
    dims = named if isinstance(named, (list, tuple)) else [named]
    sizes = [shape(node.args[0])[dim % rank] for dim in dims if isinstance(dim, int) and rank]
    # Of all tokens of all samples, as experts sort them, nothing is said: that is undone.
    return any(grows(size, symbols) and size.node.expr in symbols for size in sizes)
