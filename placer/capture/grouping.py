"""From operations to groups: which operation belongs to which layer, and in which order the layers
run.

1. An operation inside a module that is not opened belongs to that module's layer.
2. An operation between modules joins the layer of its latest producer; one that nothing produces,
   that of its readers' layers which begins first.
3. Writes in place order their neighbours, and join layers where a copy on another device would miss
them.
4. Layers that depend on one another both ways become one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import getitem

import networkx
import torch
from torch import fx

from placer.capture.export.nested_ops import transformed
from placer.capture.granularity import Opened, module_stack
from placer.capture.pytrees import NUMBERS
from placer.schema.base import MERGED, WHOLE

_LONGEST_NAME = 16_000
_ALIASING_WHEN_IDLE = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}


@dataclass
class Group:
    """The operations of one layer, in their order.

    Attributes:
        name: of the layer.
        units: the names that were merged into it; its own alone, mostly.
        nodes: in the order in which the model ran them.
    """

    name: str
    units: tuple[str, ...]
    nodes: list[fx.Node]


def group(graph: fx.Graph, opened: Opened) -> list[Group]:
    """Cut the operations of a graph into layers, in execution order.

    Writes in place are made explicit on the way: a later use of the overwritten value becomes a use
    of the result.
    """
    operations = [node for node in graph.nodes if node.op == "call_function"]
    place = {node: index for index, node in enumerate(graph.nodes)}
    units = _units(operations, opened, place)
    _leave_where_it_is(operations, units)
    ordering, merges = _writes_in_place(operations, units, place)
    merges += [{units[node] for node in inside} for inside in transformed(operations)]
    network = networkx.DiGraph()
    network.add_nodes_from(dict.fromkeys(units.values()))
    for node in operations:
        network.add_edges_from(
            (units[producer], units[node]) for producer in node.all_input_nodes if producer in units
        )
    network.add_edges_from(ordering)
    for members in merges:
        network.add_edges_from((one, other) for one in members for other in members)
    network.remove_edges_from(list(networkx.selfloop_edges(network)))
    return _ordered(network, operations, units, place)


def _units(
    operations: list[fx.Node], opened: Opened, place: dict[fx.Node, int]
) -> dict[fx.Node, str]:
    """Rules 1 and 2. The latest layer is the one that began last: then no such operation closes a
    cycle by itself.
    """
    units: dict[fx.Node, str] = {}
    began: dict[str, int] = {}
    for node in operations:
        unit = None
        if node.target is not getitem:
            unit = opened.cut(module_stack(node))
        if unit is None:
            producers = [units[producer] for producer in node.all_input_nodes if producer in units]
            unit = max(producers, key=began.__getitem__) if producers else None
        if unit is not None:
            units[node] = unit
            began.setdefault(unit, place[node])
    roots = storage_roots(operations)
    for node in reversed(operations):
        if node not in units:
            readers = [reader for reader in (*node.users, *_beside(node)) if reader in units]
            if not readers:
                readers = [reader for reader in _readers_of_written(node, roots) if reader in units]
            if readers:
                units[node] = min((units[reader] for reader in readers), key=began.__getitem__)
    # a write that is read by nobody goes with those who read before it, which are known now
    for node in operations:
        readers = (
            []
            if node in units
            else [one for one in _readers_of_written(node, roots) if one in units]
        )
        if readers:
            units[node] = min((units[reader] for reader in readers), key=began.__getitem__)
    # parts of a list stay with what makes it: tensors alone pass between layers
    for node in operations:
        if node.target is getitem:
            units.update(
                (node, units[maker]) for maker in node.all_input_nodes[:1] if maker in units
            )
    first = next(
        (units[node] for node in operations if node in units and not _is_size(node)), WHOLE
    )
    for node in operations:
        units.setdefault(node, first)
    return units


def _is_size(node: fx.Node) -> bool:
    """Whether it is a number that follows from sizes of inputs: where these are not open, the graph
    has no such.
    """
    value = node.meta.get("val")
    return isinstance(value, NUMBERS) and value.node.has_hint()


def _beside(node: fx.Node) -> Iterator[fx.Node]:
    """For the size of an input: what else reads the input, so that no layer is sent an input for
    its size alone.
    """
    if not isinstance(node.meta.get("val"), torch.Tensor):
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                yield from source.users


def _readers_of_written(write: fx.Node, roots: dict[fx.Node, set[fx.Node]]) -> Iterator[fx.Node]:
    """What reads the storages that an operation writes to, whose own result nobody may read."""
    family = {root for target in written(write) for root in roots.get(target, {target})}
    if family:
        yield from (
            reader for reader, _ in _readers([node for node, of in roots.items() if of & family])
        )


def _ordered(
    network: networkx.DiGraph,
    operations: list[fx.Node],
    units: dict[fx.Node, str],
    place: dict[fx.Node, int],
) -> list[Group]:
    """Rule 4, and the order: as the model ran them, as far as dependencies allow."""
    condensed = networkx.condensation(network)
    component_of: dict[str, int] = condensed.graph["mapping"]
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node in operations:
        members[component_of[units[node]]].append(node)
    order = networkx.lexicographical_topological_sort(
        condensed, key=lambda index: place[members[index][0]]
    )
    return [_group(members[index], units) for index in order]


def _group(nodes: list[fx.Node], units: dict[fx.Node, str]) -> Group:
    names = list(dict.fromkeys(units[node] for node in nodes))
    name = MERGED.join(names)
    if len(name) > _LONGEST_NAME:
        name = MERGED.join((names[0], names[-1]))
    return Group(name, tuple(names), nodes)


def _writes_in_place(
    operations: list[fx.Node], units: dict[fx.Node, str], place: dict[fx.Node, int]
) -> tuple[set[tuple[str, str]], list[set[str]]]:
    """Rule 3: orders between layers, and sets of layers that must be one."""
    roots = storage_roots(operations)
    ordering: set[tuple[str, str]] = set()
    merges: list[set[str]] = []
    for write in operations:
        for target in written(write):
            _redirect(target, write, place)
            family = roots.get(target, {target})
            is_state = any(root.op == "get_attr" for root in family)
            is_input = any(root.op == "placeholder" for root in family)
            relatives = [node for node, of in roots.items() if of & family]
            makers = _makers(relatives, write, units, place)
            # what goes from layer to layer may be a copy, to which no layer's write would be seen
            if is_state:
                merges.append(_viewed_in(target, units) | {units[write]})
            derived = _derived(write)
            for reader, alias in _readers(relatives):
                if reader is write or alias in derived or reader in derived:
                    continue
                if reader not in units or (units[reader] == units[write] and not is_state):
                    # A reader in the same layer, and the caller, still need the value's maker
                    # beside the write.
                    if place[reader] > place[write] and not is_state:
                        merges.append(makers | {units[write]})
                    continue
                if place[reader] < place[write]:
                    ordering.add((units[reader], units[write]))
                elif is_state and (viewed := _viewed_in(alias, units) - {units[write]}):
                    merges.append(viewed | {units[write], units[reader]})
                elif is_state or (makers == {units[write]} and not is_input):
                    # what is sent leaves when the layer has run
                    ordering.add((units[write], units[reader]))
                else:
                    merges.append(makers | {units[write], units[reader]})
    return ordering, [members for members in merges if len(members) > 1]


def _leave_where_it_is(operations: list[fx.Node], units: dict[fx.Node, str]) -> None:
    """Let layers write to state that several of them write to, not to what the one before handed
    on.

    A layer may work on a copy of its state, and hands that on.
    """
    writes: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    origin: dict[fx.Node, fx.Node] = {}
    for node in operations:
        for target in written(node):
            state = origin.get(target, target)
            if state.op == "get_attr" and _returns(node, target):
                writes[state].append(node)
                origin[node] = state
    for state, found in writes.items():
        if len({units[write] for write in found}) > 1:
            for write in found:
                write.replace_all_uses_with(state)


def _makers(
    relatives: list[fx.Node], write: fx.Node, units: dict[fx.Node, str], place: dict[fx.Node, int]
) -> set[str]:
    return {units[node] for node in relatives if node in units and place[node] < place[write]}


def _viewed_in(alias: fx.Node, units: dict[fx.Node, str]) -> set[str]:
    """The layers in which a view of state was made, step by step; none for the state itself."""
    lineage, stack = {alias}, [alias]
    while stack:
        news = set(_aliased(stack.pop())) - lineage
        lineage |= news
        stack.extend(news)
    return {units[node] for node in lineage if node in units}


def storage_roots(operations: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """For each node, the nodes whose storage its result may share."""
    roots: dict[fx.Node, set[fx.Node]] = {}
    for node in operations:
        shared = {root for source in _aliased(node) for root in roots.setdefault(source, {source})}
        roots[node] = shared or {node}
    return roots


def _aliased(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments whose storage the result may share."""
    if node.target is getitem:
        yield from node.all_input_nodes
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    if node.target._schema.name.partition("::")[2] in _ALIASING_WHEN_IDLE and node.args[2:] == (
        False,
    ):
        yield from node.all_input_nodes
    for argument, given in _arguments(node):
        if argument.alias_info is not None and isinstance(given, fx.Node):
            yield given


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that the operation writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for argument, given in _arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.extend(item for item in _flat(given) if isinstance(item, fx.Node))
    return written


def _arguments(node: fx.Node) -> Iterator[tuple[torch._C.Argument, object]]:
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _flat(given: object) -> Iterable[object]:
    return given if isinstance(given, (list, tuple)) else (given,)


def _redirect(target: fx.Node, write: fx.Node, place: dict[fx.Node, int]) -> None:
    """Let what reads ``target`` after the write read its result, where the result is the written
    value itself.
    """
    if target.op == "get_attr" or not _returns(write, target):
        return
    later = {user for user in target.users if place[user] > place[write]}
    target.replace_all_uses_with(write, delete_user_cb=later.__contains__)


def _returns(write: fx.Node, target: fx.Node) -> bool:
    """Whether the result of a write is what it wrote to, given by place or as ``out``."""
    assert isinstance(write.target, torch._ops.OpOverload)
    results = [result.alias_info for result in write.target._schema.returns]
    if len(results) != 1 or results[0] is None:
        return False
    return any(
        given is target
        and argument.alias_info is not None
        and argument.alias_info.before_set == results[0].before_set
        for argument, given in _arguments(write)
    )


def _derived(write: fx.Node) -> set[fx.Node]:
    """The result of a write, and every value that is a view of it."""
    derived = {write}
    stack = [write]
    while stack:
        for user in stack.pop().users:
            if user not in derived and derived & set(_aliased(user)):
                derived.add(user)
                stack.append(user)
    return derived


def _readers(relatives: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(reader, what it reads) for every use of these values."""
    for alias in relatives:
        for user in alias.users:
            yield user, alias
