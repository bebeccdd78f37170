"""Operations that are more than one: those with graphs of their own, and those that torch.func
stands around.

torch.cond(pred, one, other, (x,))   ->   cond(pred, one_graph, other_graph, (x,))      one node, in one layer
torch.vmap(f)(x)                     ->   increment_nesting ... f's operations ... decrement_nesting    in one layer

Graphs of their own have also ``while_loop``, ``map``, ``scan`` and attention with functions of
scores.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.utils._pytree import tree_map

from placer.errors import CaptureError

_TRANSFORMS = "torch._functorch.predispatch"
_placed: WeakKeyDictionary[fx.GraphModule, dict[tuple[str, torch.device], fx.GraphModule]] = (
    WeakKeyDictionary()
)


def body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node stands for, if it stands for one."""
    found = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None
    return found if isinstance(found, fx.GraphModule) else None


def has_bodies(module: fx.GraphModule) -> bool:
    """Whether an operation has graphs of its own.

    Raises:
        CaptureError: one writes to what it is given, which nothing outside would know of.
    """
    bodies = [found for node in module.graph.nodes if (found := body(module, node)) is not None]
    for inner in (
        child for found in bodies for child in found.modules() if isinstance(child, fx.GraphModule)
    ):
        for node in inner.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                raise CaptureError(
                    f"{node.target} writes in place inside an operation that has a graph of its own"
                )
    return bool(bodies)


def on(graph: fx.GraphModule, captured_on: str, device: torch.device) -> fx.GraphModule:
    """A body whose operations make tensors on a device, where they made them on that of the
    capture.
    """
    # one device, whatever number a stand-in has
    if device.type == captured_on == "cpu":
        return graph
    copies = _placed.setdefault(graph, {})
    if (captured_on, device) not in copies:
        placed = copy.deepcopy(graph)

        def there(item: Any) -> Any:
            return device if isinstance(item, torch.device) and item.type == captured_on else item

        for inner in placed.modules():
            for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
                node.args = fx.node.map_aggregate(node.args, there)
                node.kwargs = fx.node.map_aggregate(node.kwargs, there)
            if isinstance(inner, fx.GraphModule):
                inner.recompile()
        copies[captured_on, device] = placed
    return copies[captured_on, device]


def spelt(graph: fx.GraphModule) -> str:
    """What a body does, equal for equal bodies."""
    return "\n".join(inner.code for inner in graph.modules() if isinstance(inner, fx.GraphModule))


def name(node: fx.Node) -> str:
    """What an operation is called, in every process alike."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return str(node.target.name())  # type: ignore[no-untyped-call]
    return node.target.__name__ if is_transform(node) else str(node.target)  # type: ignore[union-attr]


def is_transform(node: fx.Node) -> bool:
    """Whether the node begins, ends or serves what torch.func does to the operations between."""
    return getattr(node.target, "__module__", "") == _TRANSFORMS


def transformed(operations: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """The operations of each outermost transform, its beginning and its end among them."""
    inside: list[fx.Node] = []
    depth = 0
    for node in operations:
        called = name(node) if is_transform(node) else ""
        depth += called.endswith("_increment_nesting")
        if depth:
            inside.append(node)
        depth -= called.endswith("_decrement_nesting")
        if inside and not depth:
            yield inside
            inside = []


def run_under(
    mode: AbstractContextManager[Any],
    operation: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an operation with graphs of its own so that a dispatch mode sees their operations.

    Args:
        mode: is not in force now, as inside its ``__torch_dispatch__``.
        operation: a higher-order operator.
        args: of it; callables among them are the graphs.
        kwargs: the same.
    """

    def seen(item: Any) -> Any:
        if not callable(item) or isinstance(item, torch.Tensor):
            return item

        def run(*given: Any) -> Any:
            with mode:
                return item(*given)

        return run

    args, kwargs = tree_map(seen, (args, dict(kwargs)))
    return operation(*args, **kwargs)
