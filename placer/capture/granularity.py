"""Which modules are opened: where the tree of module calls is cut into layers.

A module that is not opened is one layer; the operations of an opened one belong to the layers
inside it.

    granularity     opened
    "submodule"     the model alone: its named children are the layers
    3               every module less than 3 names deep
    "fine"          every module that calls others: its leaves are the layers
    "auto"          what holds a large share of parameters, time and activations, and all that is built like it
    "blocks"        as "auto", but no repeated block: what ``_no_split_modules`` names, else what a container repeats
    a callable      every module for which it returns False
    names           what it takes to make these names layers
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from placer.capture.export.module_names import call_number
from placer.capture.layers import tensor_bytes
from placer.errors import InputError
from placer.schema.base import MERGED
from placer.schema.device_map import never_split

Granularity = str | int | Collection[str] | Callable[[str, nn.Module], bool]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

LARGE_PARAMS, LARGE_TIME, LARGE_ACTIVATIONS = 1 / 4, 1 / 8, 1 / 4
"""A module is opened by ``auto`` while it holds more than one of these shares of the model."""


@dataclass
class Opened:
    """A decision for every module path, and the path depth at which even a closed path is cut.

    Attributes:
        paths: the opened ones.
        depth: names in a layer's path at most.
        named: layers that were asked for by name; a list of modules may be one, though nobody calls
            a list.
    """

    paths: set[str]
    depth: int | None = None
    named: frozenset[str] = frozenset()

    def cut(self, stack: Iterable[tuple[str, int]]) -> str | None:
        """The layer that a node belongs to by its module stack, outermost first, or None for a node
        between layers.
        """
        for path, call in stack:
            if self.depth is not None and path.count(".") + 1 > self.depth:
                return ".".join(path.split(".")[: self.depth])
            around = next((outer for outer in _around(path) if outer in self.named), None)
            if around is not None:
                return around
            if path not in self.paths:
                return f"{path}@{call}" if call else path
        return None


def label(granularity: Granularity) -> int | str:
    """The granularity as a profile and a placement name it."""
    return granularity if isinstance(granularity, (int, str)) else "custom"


def as_named(granularity: Granularity, names: Collection[str]) -> Granularity:
    """A granularity by which layers are no larger than the modules that a map names; another one
    only if it must be.

    Args:
        granularity: "fine", "submodule", or the names of a placement.
        names: of the map.
    """
    if granularity == "fine" or (isinstance(granularity, tuple) and set(names) == set(granularity)):
        return granularity
    above = _above(names)
    inner = tuple(name for name in names if name not in above)
    return inner if len(above) > 1 else "submodule"


def opened(granularity: Granularity, module: nn.Module, nodes: list[fx.Node]) -> Opened:
    """Decide which modules are opened.

    Args:
        granularity: see the table above.
        module: the user's model.
        nodes: the captured operations.

    Raises:
        InputError: the granularity is none of the above.
    """
    callers = _callers(nodes)
    if granularity == "auto":
        return Opened(_large(module, nodes, callers))
    if granularity == "blocks":
        whole = blocks(module)
        return Opened(_outside(whole, _large(module, nodes, callers)) | _above(whole), named=whole)
    if granularity == "fine":
        return Opened(callers)
    if granularity == "submodule":
        return Opened({""}, depth=1)
    if isinstance(granularity, int) and not isinstance(granularity, bool) and granularity >= 1:
        return Opened(
            {path for path in callers if path == "" or path.count(".") + 1 < granularity},
            depth=granularity,
        )
    if callable(granularity):
        return Opened(
            {
                path
                for path in callers
                if path == "" or not granularity(path, module.get_submodule(path))
            }
        )
    if isinstance(granularity, Collection) and not isinstance(granularity, str):
        return Opened(
            _above(granularity),
            named=frozenset(part for name in granularity for part in name.split(MERGED)),
        )
    raise InputError(
        f"granularity {granularity!r} is not known; give 'auto', 'blocks', 'submodule', 'fine', a depth of 1 or more, "
        "or a function of a module's path and the module that returns True for a layer"
    )


def blocks(module: nn.Module) -> frozenset[str]:
    """Return the paths of the modules that ``granularity="blocks"`` keeps whole.

    These are the modules of the classes that ``_no_split_modules`` names, as models of transformers
    have it. In other models a block is a module of several parts that an ``nn.Sequential``,
    ``nn.ModuleList`` or ``nn.ModuleDict`` holds together with others of its class. Of blocks inside
    one another the outermost counts.
    """
    named = frozenset(never_split(module))
    if named:
        return named
    found: set[str] = set()
    for path, container in module.named_modules():
        if not isinstance(container, _CONTAINERS) or not _outside(found, [path]):
            continue
        items = [
            (name, item)
            for name, item in container.named_children()
            if not isinstance(item, _CONTAINERS)
        ]
        kinds = Counter(type(item) for _, item in items if any(item.children()))
        found |= {f"{path}.{name}".lstrip(".") for name, item in items if kinds[type(item)] > 1}
    return frozenset(found)


def _outside(whole: Collection[str], paths: Iterable[str]) -> set[str]:
    """The paths that are neither blocks nor inside of one."""
    return {path for path in paths if not any(outer in whole for outer in (*_around(path), path))}


def module_stack(node: fx.Node) -> list[tuple[str, int]]:
    """The module calls around a node, the model's own first: (path, number of the call)."""
    stack, prefix = [], "module"  # what the model is called in what was exported
    for key, (path, *_) in (node.meta.get("nn_module_stack") or {}).items():
        if path == prefix or path.startswith(f"{prefix}."):
            stack.append((path[len(prefix) + 1 :], call_number(key)))
    return stack


def _callers(nodes: list[fx.Node]) -> set[str]:
    """Every module that calls another one, the model among them."""
    callers = {""}
    for node in nodes:
        callers.update(path for path, _ in module_stack(node)[:-1])
    return callers


def _above(names: Collection[str]) -> set[str]:
    """All that is above any of these layers."""
    paths = {""}
    for name in names:
        for part in name.split(MERGED):
            steps = part.partition("@")[0].split(".")
            paths.update(".".join(steps[:depth]) for depth in range(1, len(steps)))
    return paths


def _around(path: str) -> Iterator[str]:
    """The paths around a module, the outermost first."""
    steps = path.split(".")
    return (".".join(steps[:depth]) for depth in range(1, len(steps)))


@dataclass
class _Weight:
    """What a module holds, its submodules included."""

    params: float = 0.0
    time: float = 0.0
    activations: float = 0.0
    kind: tuple[str, ...] = field(default=())


def _large(module: nn.Module, nodes: list[fx.Node], callers: set[str]) -> set[str]:
    """Open what is large, and alike what is built alike, until nothing large is left to open."""
    weights = _weights(module, nodes)
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


def _weights(module: nn.Module, nodes: list[fx.Node]) -> dict[str, _Weight]:
    weights: dict[str, _Weight] = defaultdict(_Weight)
    for path, child in module.named_modules():
        weights[path].kind = (
            type(child).__name__,
            *sorted({type(inner).__name__ for inner in child.children()}),
        )
        weights[path].params = sum(tensor_bytes(parameter) for parameter in child.parameters())
    for node in nodes:
        result = node.meta.get("val")
        activations = float(_elements(result)) if isinstance(result, Tensor) else 0.0
        time = operations(node) / 100 + activations
        for path, _ in module_stack(node):
            weights[path].time += time
            weights[path].activations += activations
    return weights


def operations(node: fx.Node) -> float:
    """Multiply-adds of a node, by the closed forms of the operations that dominate; 0 for the
    others.
    """
    aten = torch.ops.aten
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    shapes = [_shape(value) for value in values if isinstance(value, Tensor)]
    result = node.meta.get("val")
    if not isinstance(result, Tensor) or len(shapes) < 2:
        return 0.0
    name = node.target if not hasattr(node.target, "overloadpacket") else node.target.overloadpacket
    if name in (aten.conv1d, aten.conv2d, aten.conv3d):
        weight = shapes[1]
        return _elements(result) * _product(weight[1:])
    if name in (aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d):
        return _product(shapes[0]) * _product(shapes[1][1:])
    if name in (aten.linear, aten.matmul, aten.bmm, aten.mm):
        return _elements(result) * shapes[0][-1]
    if name is aten.addmm:
        return _elements(result) * shapes[1][-1]
    if name is aten.scaled_dot_product_attention:
        return 2 * _product(shapes[0]) * shapes[1][-2]
    return 0.0


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(hint(size) for size in tensor.shape)


def hint(size: int | torch.SymInt) -> int:
    """A size at the example's batch size."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_fixed(size: int | torch.SymInt) -> bool:
    """Whether the graph holds for this size alone; one that was open until the model asked for its
    number, too.
    """
    return isinstance(size, int) or bool(size.node.expr.is_number)


def _elements(tensor: Tensor) -> float:
    return _product(_shape(tensor))


def _product(sizes: Iterable[int]) -> float:
    result = 1.0
    for size in sizes:
        result *= size
    return result
