"""Granularity: where to cut the tree of module calls into layers.

A module that is not opened is one layer. The operations of an opened module belong to the layers
inside it.

    granularity     opened modules
    "submodule"     the model alone: its named children are the layers
    3               every module less than 3 names deep
    "fine"          every module that calls others: its leaves are the layers
    "auto"          modules with a large share of parameters, time or activations, and modules
                    built like them
    "blocks"        as "auto", but no repeated block: the classes in ``_no_split_modules``, or
                    else what a container repeats
    a callable      every module for which it returns False
    names           the modules around these names, which become the layers
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from placer.capture.export.module_names import call_number
from placer.capture.layers import tensor_bytes
from placer.errors import InputError
from placer.schema.base import MERGED, is_part, module_paths, paths_around
from placer.schema.export import never_split

Granularity = str | int | Collection[str] | Callable[[str, nn.Module], bool]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

LARGE_PARAMS, LARGE_TIME, LARGE_ACTIVATIONS = 1 / 4, 1 / 8, 1 / 4
"""``auto`` opens a module while it exceeds one of these shares of the model.

Smaller shares give more layers, and longer profiles and searches.
"""


@dataclass
class OpenedModules:
    """The opened modules, and where to cut regardless of them.

    Attributes:
        paths: the opened modules.
        depth: maximum number of names in a layer's path; None for no limit.
        named: layers requested by name. A ModuleList may be one, although nobody calls it.
    """

    paths: set[str]
    depth: int | None = None
    named: frozenset[str] = frozenset()

    def layer_of(self, stack: Iterable[tuple[str, int]]) -> str | None:
        """Return the layer of a node by its module stack; None for a node between layers.

        Args:
            stack: the module calls around the node, outermost first: (path, number of the call).
        """
        for path, call in stack:
            if self.depth is not None and path.count(".") + 1 > self.depth:
                return ".".join(path.split(".")[: self.depth])
            # without the model itself, which is the last one
            around = [outer for outer in paths_around(path)[:-1] if outer in self.named]
            if around:
                return around[-1]  # the outermost
            if path not in self.paths:
                return f"{path}@{call}" if call else path
        return None


def granularity_name(granularity: Granularity) -> int | str:
    """Return the granularity's name in profiles and placements.

    Args:
        granularity: any granularity.
    """
    return granularity if isinstance(granularity, (int, str)) else "custom"


def granularity_for_map(granularity: Granularity, names: Collection[str]) -> Granularity:
    """Return a granularity whose layers are no larger than the modules that a map names.

    Args:
        granularity: "fine", "submodule", or the names of a placement; it is returned if it
            suffices.
        names: the names in the map.
    """
    if granularity == "fine" or (isinstance(granularity, tuple) and set(names) == set(granularity)):
        return granularity
    above = _modules_above(names)
    inner = tuple(name for name in names if name not in above)
    return inner if len(above) > 1 else "submodule"


def opened_modules(
    granularity: Granularity, module: nn.Module, nodes: list[fx.Node]
) -> OpenedModules:
    """Decide which modules to open.

    Args:
        granularity: see the table above.
        module: the user's model.
        nodes: the captured operations.

    Raises:
        InputError: the granularity is unknown.
    """
    callers = _calling_modules(nodes)
    if granularity == "auto":
        return OpenedModules(_open_large_modules(module, nodes, callers))
    if granularity == "blocks":
        whole = repeated_blocks(module)
        return OpenedModules(
            _outside_blocks(whole, _open_large_modules(module, nodes, callers))
            | _modules_above(whole),
            named=whole,
        )
    if granularity == "fine":
        return OpenedModules(callers)
    if granularity == "submodule":
        return OpenedModules({""}, depth=1)
    if isinstance(granularity, int) and not isinstance(granularity, bool) and granularity >= 1:
        return OpenedModules(
            {path for path in callers if path == "" or path.count(".") + 1 < granularity},
            depth=granularity,
        )
    if callable(granularity):
        return OpenedModules(_opened_by_function(granularity, module, callers))
    if isinstance(granularity, Collection) and not isinstance(granularity, str):
        return OpenedModules(
            _modules_above(granularity),
            named=frozenset(part for name in granularity for part in name.split(MERGED)),
        )
    raise InputError(
        f"granularity {granularity!r} is unknown; give 'auto', 'blocks', 'submodule', 'fine', a "
        "depth of 1 or more, or a function of a module's path and the module that returns True "
        "for a layer"
    )


def _opened_by_function(
    is_layer: Callable[[str, nn.Module], bool], module: nn.Module, callers: set[str]
) -> set[str]:
    """Return the model itself and the modules that a user's function does not make a layer."""
    return {
        path for path in callers if path == "" or not is_layer(path, module.get_submodule(path))
    }


def repeated_blocks(module: nn.Module) -> frozenset[str]:
    """Return the paths of the modules that ``granularity="blocks"`` keeps whole.

    These are the modules whose classes ``_no_split_modules`` names, as in transformers. In other
    models, a block is a module with children in an ``nn.Sequential``, ``nn.ModuleList`` or
    ``nn.ModuleDict`` that holds several of its class. Of nested blocks, the outermost counts.

    Args:
        module: the user's model.
    """
    named = frozenset(never_split(module))
    if named:
        return named
    found: set[str] = set()
    for path, container in module.named_modules():
        if not isinstance(container, _CONTAINERS) or not _outside_blocks(found, [path]):
            continue
        items = [
            (name, item)
            for name, item in container.named_children()
            if not isinstance(item, _CONTAINERS)
        ]
        kinds = Counter(type(item) for _, item in items if any(item.children()))
        found |= {f"{path}.{name}".lstrip(".") for name, item in items if kinds[type(item)] > 1}
    return frozenset(found)


def _outside_blocks(whole: Collection[str], paths: Iterable[str]) -> set[str]:
    """Return the paths that are neither blocks nor inside a block."""
    return {
        path
        for path in paths
        if not any(outer in whole for outer in (path, *paths_around(path)[:-1]))
    }


def module_stack(node: fx.Node) -> list[tuple[str, int]]:
    """Return the module calls around a node, outermost first: (path, number of the call).

    Args:
        node: an operation of a captured graph.
    """
    # The model's name inside the exported wrapper.
    stack, prefix = [], "module"
    for key, (path, *_) in (node.meta.get("nn_module_stack") or {}).items():
        if is_part(path, prefix):
            stack.append((path[len(prefix) + 1 :], call_number(key)))
    return stack


def _calling_modules(nodes: list[fx.Node]) -> set[str]:
    """Return the model and every module that calls another one."""
    callers = {""}
    for node in nodes:
        callers.update(path for path, _ in module_stack(node)[:-1])
    return callers


def _modules_above(names: Collection[str]) -> set[str]:
    """Return the paths of all modules around these layers."""
    paths = (path for name in names for path in module_paths(name))
    return {"", *(outer for path in paths for outer in paths_around(path))}


@dataclass
class _ModuleCost:
    """The size and cost of a module, including its submodules."""

    params: float = 0.0
    time: float = 0.0
    activations: float = 0.0
    kind: tuple[str, ...] = field(default=())


def _open_large_modules(module: nn.Module, nodes: list[fx.Node], callers: set[str]) -> set[str]:
    """Open large modules, and all modules of the same kind, until none is left."""
    weights = _module_costs(module, nodes)
    total = weights[""]
    children = defaultdict(set)
    for node in nodes:
        stack = [path for path, _ in module_stack(node)]
        for parent, child in pairwise(stack):
            children[parent].add(child)

    def is_large(path: str) -> bool:
        weight = weights[path]
        return (
            weight.params > LARGE_PARAMS * total.params
            or weight.time > LARGE_TIME * total.time
            or weight.activations > LARGE_ACTIVATIONS * total.activations
        )

    # The border is every closed module directly inside an open one. Only modules that call others
    # can be opened.
    opened_paths = {""}
    kinds: set[tuple[str, ...]] = set()
    border = set(children[""])
    while True:
        kinds |= {weights[path].kind for path in border & callers if is_large(path)}
        ready = {path for path in border & callers if weights[path].kind in kinds}
        if not ready:
            return opened_paths
        opened_paths |= ready
        border = (border - ready).union(*(children[path] for path in ready))


def _module_costs(module: nn.Module, nodes: list[fx.Node]) -> dict[str, _ModuleCost]:
    weights: dict[str, _ModuleCost] = defaultdict(_ModuleCost)
    for path, child in module.named_modules():
        # Two modules are of one kind if their classes and their children's classes agree.
        weights[path].kind = (
            type(child).__name__,
            *sorted({type(inner).__name__ for inner in child.children()}),
        )
        weights[path].params = sum(tensor_bytes(parameter) for parameter in child.parameters())
    for node in nodes:
        result = node.meta.get("val")
        activations = float(math.prod(_shape(result))) if isinstance(result, Tensor) else 0.0
        # In units of one element read or written: an accelerator does about 100 multiply-adds
        # meanwhile.
        time = multiply_adds(node) / 100 + activations
        for path, _ in module_stack(node):
            weights[path].time += time
            weights[path].activations += activations
    return weights


def multiply_adds(node: fx.Node) -> float:
    """Return the multiply-adds of a node; 0 for operations that do not dominate.

    Args:
        node: an operation of a captured graph.
    """
    aten = torch.ops.aten
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    shapes = [_shape(value) for value in values if isinstance(value, Tensor)]
    result = node.meta.get("val")
    if not isinstance(result, Tensor) or len(shapes) < 2:
        return 0.0
    name = node.target if not hasattr(node.target, "overloadpacket") else node.target.overloadpacket
    # An element of the result sums over the weights of one output channel. In a transposed
    # convolution, an element of the input goes to as many elements.
    if name in (aten.conv1d, aten.conv2d, aten.conv3d):
        weight = shapes[1]
        return math.prod(_shape(result)) * math.prod(weight[1:])
    if name in (aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d):
        return math.prod(shapes[0]) * math.prod(shapes[1][1:])
    if name in (aten.linear, aten.matmul, aten.bmm, aten.mm):
        return math.prod(_shape(result)) * shapes[0][-1]
    if name is aten.addmm:
        return math.prod(_shape(result)) * shapes[1][-1]
    # Two products of the same cost: the scores, and the weighted sum of the values.
    if name is aten.scaled_dot_product_attention:
        return 2 * math.prod(shapes[0]) * shapes[1][-2]
    return 0.0


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(hint(size) for size in tensor.shape)


def hint(size: int | torch.SymInt) -> int:
    """Return a size at the example's batch size."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_fixed(size: int | torch.SymInt) -> bool:
    """Return whether a graph is valid for this size only.

    That includes an open size whose value the model read.
    """
    return isinstance(size, int) or bool(size.node.expr.is_number)
