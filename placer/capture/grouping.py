"""Assignment of operations to layers, and the order in which the layers run.

    operations:   conv1   relu   conv2   add   linear          (execution order)
    inside:       "a"     -      "b"     -     "c"             (the module that is not opened)
    layers:       [a: conv1 relu] [b: conv2 add] [c: linear]

1. An operation inside a module that is not opened belongs to that module's layer.

2. An operation between modules joins the layer of its latest producer. Without a producer, it joins
the layer among its readers' layers that begins first.

3. Writes in place order their neighbours. They merge layers if a copy on another device would miss
the write.

4. Layers that depend on one another in both directions become one layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import getitem

import networkx
import torch
from torch import fx

from placer.capture.export.nested_ops import outermost_transforms
from placer.capture.granularity import OpenedModules, module_stack
from placer.capture.pytrees import SYMBOLIC_NUMBERS
from placer.schema.base import MERGED, WHOLE

# Characters. A longer name of merged layers keeps its first and last part only: names are keys in
# files and responses.
_MAX_NAME_LENGTH = 16_000
# These return their own input in evaluation mode, although their schema declares no alias.
_IDENTITY_IN_EVAL = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}


@dataclass
class Group:
    """The operations of one layer, in execution order.

    Attributes:
        name: the layer's name.
        layer_names: the names of the layers that were merged into it; usually only its own.
        nodes: the operations, in the order in which the model ran them.
    """

    name: str
    layer_names: tuple[str, ...]
    nodes: list[fx.Node]


def group_operations(graph: fx.Graph, opened: OpenedModules) -> list[Group]:
    """Cut the operations of a graph into layers, in execution order.

    Writes in place become explicit: a later use of the overwritten value becomes a use of the
    write's result.

    Args:
        graph: the flat graph of a captured model; it is changed.
        opened: which modules are opened.

    Returns:
        One group for each layer.
    """
    operations = [node for node in graph.nodes if node.op == "call_function"]
    position = {node: index for index, node in enumerate(graph.nodes)}
    layer_of = _assign_operations(operations, opened, position)
    _write_to_state_itself(operations, layer_of)
    writes = _WriteOrder(operations, layer_of, position)
    # A transform of torch.func cannot be split: its beginning and end act on the thread that runs
    # it.
    transforms = [
        {layer_of[node] for node in inside} for inside in outermost_transforms(operations)
    ]
    network = networkx.DiGraph()
    network.add_nodes_from(dict.fromkeys(layer_of.values()))
    for node in operations:
        network.add_edges_from(
            (layer_of[producer], layer_of[node])
            for producer in node.all_input_nodes
            if producer in layer_of
        )
    network.add_edges_from(writes.ordering)
    # Edges in both directions between members of a merge: they fall into one component of rule 4.
    for members in (*writes.merges, *transforms):
        network.add_edges_from((one, other) for one in members for other in members)
    network.remove_edges_from(list(networkx.selfloop_edges(network)))
    return _sort_groups(network, operations, layer_of, position)


def _assign_operations(
    operations: list[fx.Node], opened: OpenedModules, position: dict[fx.Node, int]
) -> dict[fx.Node, str]:
    """Assign each operation to a layer by rules 1 and 2."""
    layer_of: dict[fx.Node, str] = {}
    began: dict[str, int] = {}
    _assign_by_module_or_producer(operations, opened, position, layer_of, began)
    _assign_by_reader(operations, layer_of, began)
    # Items of a list stay with the operation that makes the list: only tensors pass between layers.
    for node in operations:
        if node.target is getitem:
            layer_of.update(
                (node, layer_of[maker]) for maker in node.all_input_nodes[:1] if maker in layer_of
            )
    # What is left depends on nothing and is read by nobody; it joins the first layer.
    first = next(
        (layer_of[node] for node in operations if node in layer_of and not _is_input_size(node)),
        WHOLE,
    )
    for node in operations:
        layer_of.setdefault(node, first)
    return layer_of


def _assign_by_module_or_producer(
    operations: list[fx.Node],
    opened: OpenedModules,
    position: dict[fx.Node, int],
    layer_of: dict[fx.Node, str],
    began: dict[str, int],
) -> None:
    """Apply rule 1, and rule 2 to operations with producers.

    The latest producer is the layer that began last. So an operation between modules never closes a
    cycle by itself.

    Args:
        operations: in execution order.
        opened: which modules are opened.
        position: of each node in the graph.
        layer_of: receives the layer of each assigned operation.
        began: receives the position of each layer's first operation.
    """
    for node in operations:
        layer = None
        if node.target is not getitem:
            layer = opened.layer_of(module_stack(node))
        if layer is None:
            producers = [layer_of[one] for one in node.all_input_nodes if one in layer_of]
            layer = max(producers, key=began.__getitem__) if producers else None
        if layer is not None:
            layer_of[node] = layer
            began.setdefault(layer, position[node])


def _assign_by_reader(
    operations: list[fx.Node], layer_of: dict[fx.Node, str], began: dict[str, int]
) -> None:
    """Assign operations without producers, such as constants and sizes, to the layer of a reader.

    Args:
        operations: in execution order.
        layer_of: the layer of each assigned operation; it is extended.
        began: the position of each layer's first operation.
    """
    roots = storage_roots(operations)

    def join(node: fx.Node, readers: Iterable[fx.Node]) -> bool:
        layers = [layer_of[reader] for reader in readers if reader in layer_of]
        if layers:
            layer_of[node] = min(layers, key=began.__getitem__)
        return bool(layers)

    # Backwards, because the reader may itself be assigned by its reader.
    for node in reversed(operations):
        if node not in layer_of:
            readers = (*node.users, *_other_readers_of_input(node))
            join(node, readers) or join(node, _readers_of_written(node, roots))
    # A write whose result nobody reads joins earlier readers of its memory. Some of these were
    # assigned only by the loop above.
    for node in operations:
        if node not in layer_of:
            join(node, _readers_of_written(node, roots))


def _is_input_size(node: fx.Node) -> bool:
    """Return whether a node is a number computed from the sizes of inputs.

    A graph without open sizes has no such nodes.
    """
    value = node.meta.get("val")
    return isinstance(value, SYMBOLIC_NUMBERS) and value.node.has_hint()


def _other_readers_of_input(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the other readers of the input whose size this node takes.

    The size joins their layer, so that no layer receives an input only for its size.
    """
    if not isinstance(node.meta.get("val"), torch.Tensor):
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                yield from source.users


def _readers_of_written(write: fx.Node, roots: dict[fx.Node, set[fx.Node]]) -> Iterator[fx.Node]:
    """Yield the readers of the storages that an operation writes to.

    The result of such a write may itself have no reader.
    """
    family = {root for target in written_arguments(write) for root in roots.get(target, {target})}
    if family:
        yield from (
            reader for reader, _ in _uses_of([node for node, of in roots.items() if of & family])
        )


def _sort_groups(
    network: networkx.DiGraph,
    operations: list[fx.Node],
    layer_of: dict[fx.Node, str],
    position: dict[fx.Node, int],
) -> list[Group]:
    """Return the groups by rule 4, in the model's own order as far as dependencies allow."""
    condensed = networkx.condensation(network)
    component_of: dict[str, int] = condensed.graph["mapping"]
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node in operations:
        members[component_of[layer_of[node]]].append(node)
    order = networkx.lexicographical_topological_sort(
        condensed, key=lambda index: position[members[index][0]]
    )
    return [_make_group(members[index], layer_of) for index in order]


def _make_group(nodes: list[fx.Node], layer_of: dict[fx.Node, str]) -> Group:
    names = list(dict.fromkeys(layer_of[node] for node in nodes))
    name = MERGED.join(names)
    if len(name) > _MAX_NAME_LENGTH:
        name = MERGED.join((names[0], names[-1]))
    return Group(name, tuple(names), nodes)


class _WriteOrder:
    """Rule 3: the order and the merges of layers around writes in place.

        before the write     reader ──▶ writer     the reader's layer runs first
        after the write      writer ──▶ reader     if the reader receives the written tensor
                             writer  =  reader     if it could hold a copy without the write

    Args:
        operations: in execution order.
        layer_of: the layer of each operation.
        position: of each node in the graph.

    Attributes:
        ordering: pairs of layers, the first of which runs first.
        merges: sets of layers to merge.
    """

    def __init__(
        self,
        operations: list[fx.Node],
        layer_of: dict[fx.Node, str],
        position: dict[fx.Node, int],
    ) -> None:
        self.ordering: set[tuple[str, str]] = set()
        self.merges: list[set[str]] = []
        self._layer_of = layer_of
        self._position = position
        self._roots = storage_roots(operations)
        for write in operations:
            for target in written_arguments(write):
                _redirect(target, write, position)
                self._add_write(target, write)

    def _add_write(self, target: fx.Node, write: fx.Node) -> None:
        family = self._roots.get(target, {target})
        relatives = [node for node, of in self._roots.items() if of & family]
        is_state = any(root.op == "get_attr" for root in family)
        is_input = any(root.op == "placeholder" for root in family)
        makers = self._producers_before(write, relatives)
        # A value that passes between layers may be a copy, in which a write would be lost.
        if is_state:
            self.merges.append(_layers_of_views(target, self._layer_of) | {self._layer_of[write]})
        derived = _views_of_result(write)
        for reader, alias in _uses_of(relatives):
            if reader is write or alias in derived or reader in derived:
                continue
            if is_state:
                self._add_reader_of_state(write, reader, alias)
            else:
                self._add_reader_of_value(write, reader, makers, is_input)

    def _add_reader_of_state(self, write: fx.Node, reader: fx.Node, alias: fx.Node) -> None:
        if reader not in self._layer_of:
            return
        writing, reading = self._layer_of[write], self._layer_of[reader]
        if self._position[reader] < self._position[write]:
            self.ordering.add((reading, writing))
        elif viewed := _layers_of_views(alias, self._layer_of) - {writing}:
            self.merges.append(viewed | {writing, reading})
        else:
            self.ordering.add((writing, reading))

    def _add_reader_of_value(
        self, write: fx.Node, reader: fx.Node, makers: set[str], is_input: bool
    ) -> None:
        writing, reading = self._layer_of[write], self._layer_of.get(reader)
        is_later = self._position[reader] > self._position[write]
        if reading is None or reading == writing:
            # A reader in the same layer, and the caller, still need the value's producer in the
            # layer that writes.
            if is_later:
                self.merges.append(makers | {writing})
        elif not is_later:
            self.ordering.add((reading, writing))
        elif makers == {writing} and not is_input:
            # A value is sent when its layer has finished, so the reader receives the written value.
            self.ordering.add((writing, reading))
        else:
            self.merges.append(makers | {writing, reading})

    def _producers_before(self, write: fx.Node, relatives: list[fx.Node]) -> set[str]:
        before = self._position[write]
        return {
            self._layer_of[node]
            for node in relatives
            if node in self._layer_of and self._position[node] < before
        }


def _write_to_state_itself(operations: list[fx.Node], layer_of: dict[fx.Node, str]) -> None:
    """Make every write to state that several layers write to refer to the state itself.

    A layer may work on a copy of its state. A later layer would otherwise write to the copy that an
    earlier layer passed on.
    """
    writes: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    origin: dict[fx.Node, fx.Node] = {}
    for node in operations:
        for target in written_arguments(node):
            state = origin.get(target, target)
            if state.op == "get_attr" and _returns_written(node, target):
                writes[state].append(node)
                origin[node] = state
    for state, found in writes.items():
        if len({layer_of[write] for write in found}) > 1:
            for write in found:
                write.replace_all_uses_with(state)


def _layers_of_views(alias: fx.Node, layer_of: dict[fx.Node, str]) -> set[str]:
    """Return the layers in which a view of state was made, step by step.

    The set is empty for the state itself.
    """
    lineage, stack = {alias}, [alias]
    while stack:
        news = set(_aliased_arguments(stack.pop())) - lineage
        lineage |= news
        stack.extend(news)
    return {layer_of[node] for node in lineage if node in layer_of}


def storage_roots(operations: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Return for each node the nodes whose storage its result may share.

    Args:
        operations: in execution order.
    """
    roots: dict[fx.Node, set[fx.Node]] = {}
    for node in operations:
        shared = {
            root
            for source in _aliased_arguments(node)
            for root in roots.setdefault(source, {source})
        }
        roots[node] = shared or {node}
    return roots


def _aliased_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments whose storage the result may share."""
    if node.target is getitem:
        yield from node.all_input_nodes
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    if node.target._schema.name.partition("::")[2] in _IDENTITY_IN_EVAL and node.args[2:] == (
        False,
    ):
        yield from node.all_input_nodes
    for argument, given in _schema_arguments(node):
        if argument.alias_info is not None and isinstance(given, fx.Node):
            yield given


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for argument, given in _schema_arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.extend(item for item in _as_sequence(given) if isinstance(item, fx.Node))
    return written


def _schema_arguments(node: fx.Node) -> Iterator[tuple[torch._C.Argument, object]]:
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _as_sequence(given: object) -> Iterable[object]:
    return given if isinstance(given, (list, tuple)) else (given,)


def _redirect(target: fx.Node, write: fx.Node, position: dict[fx.Node, int]) -> None:
    """Make later readers of ``target`` read the write's result, if that is the tensor itself."""
    if target.op == "get_attr" or not _returns_written(write, target):
        return
    later = {user for user in target.users if position[user] > position[write]}
    target.replace_all_uses_with(write, delete_user_cb=later.__contains__)


def _returns_written(write: fx.Node, target: fx.Node) -> bool:
    """Return whether a write's result is the tensor that it wrote to, or its ``out`` argument."""
    assert isinstance(write.target, torch._ops.OpOverload)
    results = [result.alias_info for result in write.target._schema.returns]
    if len(results) != 1 or results[0] is None:
        return False
    return any(
        given is target
        and argument.alias_info is not None
        and argument.alias_info.before_set == results[0].before_set
        for argument, given in _schema_arguments(write)
    )


def _views_of_result(write: fx.Node) -> set[fx.Node]:
    """Return the result of a write and every value that is a view of it."""
    derived = {write}
    stack = [write]
    while stack:
        for user in stack.pop().users:
            if user not in derived and derived & set(_aliased_arguments(user)):
                derived.add(user)
                stack.append(user)
    return derived


def _uses_of(relatives: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (reader, value) for every use of these values."""
    for alias in relatives:
        for user in alias.users:
            yield user, alias
