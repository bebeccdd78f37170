"""Inlining of the regions that torch.export nests.

    wrap_with_set_grad_enabled(False, body, x)      ->   the nodes of body, each with
                                                         meta[REGIONS] = (("grad", False),)
    wrap_with_autocast("cuda", dtype, ..., body, x) ->   ... (("autocast", "cuda", dtype, ...),)

With notes instead of nested graphs, a layer border may lie inside a region.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

REGIONS = "placer_regions"
"""Key in ``node.meta``: the regions around a node, outermost first.

A region is ``("grad", enabled)`` or ``("autocast", device type, dtype, enabled, cache)``.
"""


def inline_regions(module: fx.GraphModule, regions: tuple[Any, ...] = ()) -> None:
    """Inline the nested regions of a graph, and note on every node the regions around it.

    Args:
        module: the graph; it is changed.
        regions: the regions around the whole graph, outermost first.
    """
    graph = module.graph
    for node in list(graph.nodes):
        # ``Exported.covers`` runs the shape guards of torch.export instead.
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
            continue
        region = _region(node)
        if region is None:
            node.meta.setdefault(REGIONS, regions)
            continue
        # The settings of the region come before its body: one for gradients, four for autocast.
        body_index = 1 if region[0] == "grad" else 4
        body = getattr(module, str(node.args[body_index].target))
        inline_regions(body, (*regions, region))
        _inline_body(module, node, body, node.args[body_index + 1 :])
    # Nobody uses the nodes that named the bodies any more.
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "get_attr"
            and not node.users
            and isinstance(getattr(module, str(node.target), None), fx.GraphModule)
        ):
            graph.erase_node(node)


def _region(node: fx.Node) -> tuple[Any, ...] | None:
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return ("grad", node.args[0])
    if getattr(node.target, "__name__", "") == "wrap_with_autocast":
        return ("autocast", *node.args[:4])
    return None


def _inline_body(
    module: fx.GraphModule, call: fx.Node, body: fx.GraphModule, arguments: Sequence[Any]
) -> None:
    """Replace ``call`` by a copy of ``body``'s nodes.

    The attributes that these refer to become attributes of ``module`` under new names.
    """
    graph = module.graph
    env: dict[fx.Node, Any] = {}
    places = iter(arguments)
    results: Sequence[Any] = ()
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(places)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], lambda inner: env[inner])
            else:
                env[node] = graph.node_copy(node, lambda inner: env[inner])
                if node.op == "get_attr":
                    env[node].target = f"{call.name}_{node.name}"
                    setattr(module, env[node].target, operator.attrgetter(str(node.target))(body))
    # A region returns a tuple, and each user takes one item of it.
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(call)
