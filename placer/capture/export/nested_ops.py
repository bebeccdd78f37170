"""Operations that stand for several: with graphs of their own, or between the ends of a transform.

    torch.cond(pred, f, g, (x,))  ->  cond(pred, f_graph, g_graph, (x,))   one node in one layer
    torch.vmap(f)(x)              ->  increment_nesting, operations of f, decrement_nesting
                                                                           all in one layer

``while_loop``, ``map``, ``scan`` and flex attention have graphs of their own, too.
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
# Copies of bodies for devices other than the capture's. Weak keys: they go with the layer's graph.
_graphs_on_devices: WeakKeyDictionary[
    fx.GraphModule, dict[tuple[str, torch.device], fx.GraphModule]
] = WeakKeyDictionary()


def nested_graph(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a node stands for; None if it does not stand for a graph."""
    found = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None
    return found if isinstance(found, fx.GraphModule) else None


def has_nested_graphs(module: fx.GraphModule) -> bool:
    """Return whether an operation has graphs of its own.

    Raises:
        CaptureError: such a graph writes to its arguments, which no other node would know.
    """
    bodies = [
        found for node in module.graph.nodes if (found := nested_graph(module, node)) is not None
    ]
    for inner in (
        child for found in bodies for child in found.modules() if isinstance(child, fx.GraphModule)
    ):
        for node in inner.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                raise CaptureError(
                    f"{node.target} writes in place inside a nested graph, such as torch.cond's"
                )
    return bool(bodies)


def graph_on_device(
    graph: fx.GraphModule, captured_on: str, device: torch.device
) -> fx.GraphModule:
    """Return a body whose operations create tensors on ``device`` instead of the capture's device.

    Args:
        graph: the body.
        captured_on: the type of the capture's device.
        device: where the layer runs.
    """
    # CPU stand-ins share the host's memory, whatever their index.
    if device.type == captured_on == "cpu":
        return graph
    copies = _graphs_on_devices.setdefault(graph, {})
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


def graph_text(graph: fx.GraphModule) -> str:
    """Return the code of a body as text; equal bodies have equal texts."""
    return "\n".join(inner.code for inner in graph.modules() if isinstance(inner, fx.GraphModule))


def operation_name(node: fx.Node) -> str:
    """Return an operation's name, equal in every process."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return str(node.target.name())  # type: ignore[no-untyped-call]
    return node.target.__name__ if is_transform(node) else str(node.target)  # type: ignore[union-attr]


def is_transform(node: fx.Node) -> bool:
    """Return whether a node begins, ends or serves a transform of torch.func."""
    return getattr(node.target, "__module__", "") == _TRANSFORMS


def outermost_transforms(operations: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield the operations of each outermost transform, from its beginning to its end.

        operation   increment  a  increment  b  decrement  c  decrement
        depth       1          1  2          2  1          1  0          ->  one list of all seven

    Transforms inside a transform belong to the outer one's list.
    """
    inside: list[fx.Node] = []
    depth = 0
    for node in operations:
        called = operation_name(node) if is_transform(node) else ""
        depth += called.endswith("_increment_nesting")
        if depth:
            inside.append(node)
        depth -= called.endswith("_decrement_nesting")
        if inside and not depth:
            yield inside
            inside = []


def run_under_mode(
    mode: AbstractContextManager[Any],
    operation: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an operation with graphs of its own so that a dispatch mode sees their operations.

    Args:
        mode: not active at the moment, because its own ``__torch_dispatch__`` runs.
        operation: a higher-order operator.
        args: its positional arguments; callables among them are the graphs.
        kwargs: its keyword arguments.
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
