"""From groups of operations to layers: each group becomes a function of (device, state, reads).

group of nodes  ->  def forward(device, regions, state..., reads...): ...; return writes
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer import devices
from placer.capture.export import nested_ops
from placer.capture.export.export import PREFIX, Exported
from placer.capture.export.inlining import REGIONS
from placer.capture.export.mode_regions import Region, Regions, enter, leave
from placer.capture.export.op_effects import draws_random, updates_running_statistics
from placer.capture.granularity import hint, is_fixed
from placer.capture.grouping import Group, storage_roots, written
from placer.capture.layers import Layer, Value, named_state
from placer.capture.python_state.plain_tensors import plain_names
from placer.capture.pytrees import NUMBERS


@dataclass
class State:
    """The tensors that the graph's ``get_attr`` nodes mean, under one name each.

    Attributes:
        tensors: the user's parameters and buffers, and the plain tensors that the graph reads, by
            name.
        constants: the names of the plain tensors: those that are neither parameters nor buffers.
        name_of: get_attr node -> name.
    """

    tensors: dict[str, Tensor]
    constants: frozenset[str]
    name_of: dict[fx.Node, str]


def find_state(exported: Exported, module: nn.Module) -> State:
    """Match the graph's attributes with the user's own tensors by identity; a tied one goes by its
    first name.
    """
    own = named_state(module)
    first_name = {id(tensor): name for name, tensor in own.items()}
    every = dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )
    plain = plain_names(module)
    tensors, constants, name_of = dict(own), set(), {}
    for node in exported.module.graph.nodes:
        if node.op != "get_attr":
            continue
        path = str(node.target).removeprefix(PREFIX)
        value = _attribute(exported.module, str(node.target))
        # By path first: while the model was exported, tensors of other devices were replaced by
        # stand-ins.
        known = first_name.get(id(every.get(path, value)))
        if known is not None:
            name_of[node] = known
        elif isinstance(value, Tensor):
            name_of[node] = f"constant {plain.get(id(value), path)}"
            tensors[name_of[node]] = value
            constants.add(name_of[node])
    return State(tensors, frozenset(constants), name_of)


def _attribute(root: Any, path: str) -> Any:
    for step in path.split("."):
        root = getattr(root, step)
    return root


@dataclass
class _Draft:
    """A layer while its reads and writes are gathered."""

    group: Group
    state: list[str] = field(default_factory=list)
    state_nodes: dict[str, fx.Node] = field(default_factory=dict)
    reads: list[fx.Node] = field(default_factory=list)
    writes: list[fx.Node] = field(default_factory=list)


class Builder:
    """Builds the layers and values of one captured graph."""

    def __init__(
        self, exported: Exported, module: nn.Module, groups: Sequence[Group], state: State
    ) -> None:
        self._exported = exported
        self._module = module
        self._state = state
        self._graph = exported.module.graph
        self._home = {node: index for index, group in enumerate(groups) for node in group.nodes}
        self._drafts = [_Draft(group) for group in groups]
        self._mutated = _mutated(self._graph, state)
        self._gradient = _gradients(self._graph, state)
        self._border()

    def layers(self) -> list[Layer]:
        """The layers in execution order."""
        return [self._layer(draft) for draft in self._drafts]

    def values(self) -> dict[str, Value]:
        """Every value that crosses a layer's border, and the inputs of the model."""
        values = {
            node.name: self._value(node, None)
            for node in self._graph.nodes
            if node.op == "placeholder"
        }
        for draft in self._drafts:
            for node in draft.writes:
                values[node.name] = self._value(node, draft.group.name)
        return values

    def outputs(self) -> tuple[str, ...]:
        """The names of the values that the model returns."""
        return tuple(node.name for node in self._returned())

    def colocated(self) -> tuple[tuple[str, ...], ...]:
        """Groups of layers that share a parameter, or another tensor that one of them changes."""
        users: dict[str, list[str]] = {}
        for draft in self._drafts:
            for name in draft.state:
                users.setdefault(name, []).append(draft.group.name)
        return tuple(dict.fromkeys(tuple(names) for names in users.values() if len(names) > 1))

    def _returned(self) -> list[fx.Node]:
        output = next(node for node in reversed(self._graph.nodes) if node.op == "output")
        return [item for item in output.args[0] if isinstance(item, fx.Node)]

    def _border(self) -> None:
        """Find what each layer reads and writes."""
        owner: dict[str, int] = {}
        needed: dict[fx.Node, None] = dict.fromkeys(self._returned())
        shared: dict[str, fx.Node] = {}
        for index, draft in enumerate(self._drafts):
            for node in draft.group.nodes:
                for source in node.all_input_nodes:
                    name = self._state.name_of.get(source)
                    if name is None:
                        self._read(index, source, needed)
                    elif owner.setdefault(name, index) == index or not self._is_passed_on(name):
                        self._use(draft, name, source)
                    else:
                        # a tensor that nobody changes is sent to its later readers like any other
                        # value
                        shared.setdefault(name, source)
        for source in [*self._returned(), *shared.values()]:
            name = self._state.name_of.get(source)
            if name is not None:
                self._use(self._drafts[owner.setdefault(name, 0)], name, source)
        self._pass_on(shared, owner, needed)
        for node in needed:
            home = self._home.get(node)
            if home is None and node in self._state.name_of:
                home = owner[self._state.name_of[node]]
            if home is not None and node not in self._drafts[home].writes:
                self._drafts[home].writes.append(node)

    def _read(self, index: int, source: fx.Node, needed: dict[fx.Node, None]) -> None:
        if source.op == "get_attr" or self._home.get(source) == index:
            return
        needed[source] = None
        if source not in self._drafts[index].reads:
            self._drafts[index].reads.append(source)

    def _is_passed_on(self, name: str) -> bool:
        return not isinstance(self._state.tensors[name], nn.Parameter) and name not in self._mutated

    def _use(self, draft: _Draft, name: str, source: fx.Node) -> None:
        if name not in draft.state_nodes:
            draft.state.append(name)
            draft.state_nodes[name] = source

    def _pass_on(
        self, shared: Mapping[str, fx.Node], owner: Mapping[str, int], needed: dict[fx.Node, None]
    ) -> None:
        for name in shared:
            representative = self._drafts[owner[name]].state_nodes[name]
            needed[representative] = None
            for index, draft in enumerate(self._drafts):
                uses = any(
                    self._state.name_of.get(source) == name
                    for node in draft.group.nodes
                    for source in node.all_input_nodes
                )
                if uses and index != owner[name]:
                    draft.reads.append(representative)

    def _value(self, node: fx.Node, source: str | None) -> Value:
        example = node.meta.get("val")
        if not isinstance(example, Tensor):
            from_values = isinstance(example, NUMBERS) and not example.node.has_hint()
            return Value(node.name, (), None, 0, None, False, source, from_values)
        shape = tuple(hint(size) for size in example.shape)
        batch_dim = next(
            (dim for dim, size in enumerate(example.shape) if self._is_batch(size, dim)), None
        )
        size = example.element_size()
        for length in shape:
            size *= length
        return Value(
            node.name,
            shape,
            example.dtype,
            size,
            batch_dim,
            self._gradient.get(node, False),
            source,
        )

    def _is_batch(self, size: int | torch.SymInt, dim: int) -> bool:
        if not self._exported.batch_symbols:
            return dim == 0 and is_fixed(size) and hint(size) == self._exported.batch_size
        return isinstance(size, torch.SymInt) and size.node.expr in self._exported.batch_symbols

    def _layer(self, draft: _Draft) -> Layer:
        names = draft.group.units
        program = self._program(draft)
        has_regions = any(
            node.meta.get(REGIONS) or nested_ops.is_transform(node) for node in draft.group.nodes
        )
        return Layer(
            name=draft.group.name,
            modules=tuple(name.partition("@")[0] for name in names),
            module_type=self._module_type(names[0].partition("@")[0]),
            state=tuple(draft.state),
            mutated=tuple(name for name in draft.state if name in self._mutated),
            statistics=self._statistics(draft),
            reads=tuple(node.name for node in draft.reads),
            writes=tuple(node.name for node in draft.writes),
            function=_runner(program.forward, self._exported.device.type, has_regions),
            program=program.graph,
            signature=self._signature(draft),
            random=any(draws_random(node) for node in draft.group.nodes),
            told_by_signature=all(_is_known(node.target) for node in draft.group.nodes)
            and all(devices.is_block(self._state.tensors[name]) for name in draft.state),
        )

    def _statistics(self, draft: _Draft) -> tuple[str, ...]:
        """State that the layer uses for running statistics of torch's normalisations alone, or to
        count batches.
        """
        gathered, read = set[str](), {node for node in draft.writes if node.op == "get_attr"}
        others = {self._state.name_of[node] for node in read if node in self._state.name_of}
        for node in draft.group.nodes:
            running = node.args[3:5] if updates_running_statistics(node) else ()
            for source in node.all_input_nodes:
                if source in self._state.name_of:
                    only = source in running or _counts(node)
                    (gathered if only else others).add(self._state.name_of[source])
        return tuple(
            name for name in draft.state if name in self._mutated and name in gathered - others
        )

    def _module_type(self, path: str) -> str:
        try:
            return type(self._module.get_submodule(path)).__name__
        except AttributeError:
            return type(self._module).__name__

    def _program(self, draft: _Draft) -> fx.GraphModule:
        """Compile the operations of one layer: a function of device, regions, state and reads."""
        graph = fx.Graph()
        # not "device": constants of other devices are written with it
        device = graph.placeholder("place")
        regions = graph.placeholder("regions")
        env: dict[fx.Node, Any] = {}
        by_name = {
            name: graph.placeholder(f"state_{index}") for index, name in enumerate(draft.state)
        }
        for node in draft.reads:
            env[node] = graph.placeholder(f"read_{node.name}")
            if node in self._state.name_of:
                by_name[self._state.name_of[node]] = env[node]
        inside: tuple[Region, ...] = ()
        for node in draft.group.nodes:
            for source in node.all_input_nodes:
                if source in self._state.name_of:
                    env[source] = by_name[self._state.name_of[source]]
                elif source.op == "get_attr" and source not in env:
                    env[source] = graph.node_copy(source)
                    if nested_ops.body(self._exported.module, source) is not None:
                        kind = self._exported.device.type
                        env[source] = graph.call_function(
                            nested_ops.on, (env[source], kind, device)
                        )
            inside = _switch(graph, inside, node.meta.get(REGIONS, ()), regions, device)
            copy = graph.node_copy(node, env.__getitem__)
            copy.args = fx.node.map_aggregate(copy.args, lambda item: self._placed(item, device))
            copy.kwargs = fx.node.map_aggregate(
                copy.kwargs, lambda item: self._placed(item, device)
            )
            env[node] = copy
        _switch(graph, inside, (), regions, device)
        for node in draft.writes:
            if node in self._state.name_of:
                env[node] = by_name[self._state.name_of[node]]
        graph.output(tuple(env[node] for node in draft.writes))
        return fx.GraphModule(self._exported.module, graph)

    def _placed(self, argument: Any, device: fx.Node) -> Any:
        """The device that was captured becomes the device that the layer runs on."""
        if isinstance(argument, torch.device) and argument.type == self._exported.device.type:
            return device
        return argument

    def _signature(self, draft: _Draft) -> str:
        """A hash of the operations and of the shapes and dtypes that go in: equal for layers that
        cost the same.
        """
        index: dict[Any, str] = {name: f"s{number}" for number, name in enumerate(draft.state)}
        index |= {node: f"r{number}" for number, node in enumerate(draft.reads)}
        parts = [
            _shape_of(self._state.tensors[name], name in self._mutated) for name in draft.state
        ]
        parts += [
            _shape_of(node.meta.get("val"), self._gradient.get(node, False)) for node in draft.reads
        ]
        for number, node in enumerate(draft.group.nodes):
            index[node] = f"n{number}"
            parts.append(
                f"{nested_ops.name(node)}{self._written(node.args, index)}{self._written(node.kwargs, index)}"
            )
            parts.append(f"{node.meta.get(REGIONS, ())}")
            bodies = (
                nested_ops.body(self._exported.module, source) for source in node.all_input_nodes
            )
            parts += [nested_ops.spelt(body) for body in bodies if body is not None]
        parts.append(",".join(index.get(node, "s") for node in draft.writes))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]

    def _written(self, arguments: Any, index: Mapping[Any, str]) -> str:
        def spell(item: Any) -> Any:
            if isinstance(item, fx.Node):
                return index.get(
                    self._state.name_of.get(item, ""), index.get(item, str(item.target))
                )
            return "device" if isinstance(item, torch.device) else repr(item)

        return repr(fx.node.map_aggregate(arguments, spell))


def _runner(
    forward: Callable[..., Any], captured_on: str, has_regions: bool
) -> Callable[..., tuple[Any, ...]]:
    def run(device: torch.device, state: Sequence[Tensor], reads: Sequence[Any]) -> tuple[Any, ...]:
        result: tuple[Any, ...] = forward(device, None, *state, *reads)
        return result

    def run_in_regions(
        device: torch.device, state: Sequence[Tensor], reads: Sequence[Any]
    ) -> tuple[Any, ...]:
        with Regions(captured_on) as regions:
            result: tuple[Any, ...] = forward(device, regions, *state, *reads)
        return result

    return run_in_regions if has_regions else run


def _switch(
    graph: fx.Graph,
    inside: tuple[Region, ...],
    wanted: tuple[Region, ...],
    regions: fx.Node,
    device: fx.Node,
) -> tuple[Region, ...]:
    """Leave and enter regions until those around the next operation are the wanted ones."""
    common = 0
    while common < min(len(inside), len(wanted)) and inside[common] == wanted[common]:
        common += 1
    for _ in inside[common:]:
        graph.call_function(leave, (regions,))
    for region in wanted[common:]:
        graph.call_function(enter, (regions, device, *region))
    return wanted


def _mutated(graph: fx.Graph, state: State) -> set[str]:
    """Names of the state that the graph writes to in place, through views too."""
    operations = [node for node in graph.nodes if node.op == "call_function"]
    roots = storage_roots(operations)
    mutated: set[str] = set()
    for node in operations:
        if updates_running_statistics(node):
            mutated.update(
                state.name_of[source] for source in node.args[3:5] if source in state.name_of
            )
        for target in written(node):
            mutated.update(
                state.name_of[root] for root in roots.get(target, {target}) if root in state.name_of
            )
    return mutated


def _counts(node: fx.Node) -> bool:
    """Whether it adds a number to what nobody reads: a counter of batches."""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name == "aten::add_" and not node.users and not isinstance(node.args[1], fx.Node)


def _gradients(graph: fx.Graph, state: State) -> dict[fx.Node, bool]:
    """Whether a gradient flows back through each node."""
    flows: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        example = node.meta.get("val")
        if node.op == "placeholder":
            flows[node] = isinstance(example, Tensor) and example.requires_grad
        elif node.op == "get_attr":
            flows[node] = node in state.name_of and state.tensors[state.name_of[node]].requires_grad
        elif node.op == "call_function":
            flows[node] = (
                any(flows.get(source, False) for source in node.all_input_nodes)
                and (
                    not isinstance(example, Tensor)
                    or example.is_floating_point()
                    or example.is_complex()
                )
                and ("grad", False) not in node.meta.get(REGIONS, ())
                and getattr(node.target, "overloadpacket", None)
                not in (torch.ops.aten.detach, torch.ops.aten.detach_)
            )
    return flows


def _shape_of(value: Any, flag: bool) -> str:
    if not isinstance(value, Tensor):
        return "number"
    shape = tuple(hint(size) for size in value.shape)
    return f"{shape}{_steps(value, shape)}{value.dtype}{value.requires_grad}{flag}{_inside(value)}"


_PLACES = re.compile(r"device\(.*?\)| at 0x[0-9a-f]+")
"""What differs between equal wrappers in the text of a context: the device, and where an object
lies in memory."""


def _inside(value: Tensor) -> str:
    """What a wrapper or a sparse tensor consists of; two that look alike may cost something else."""
    if devices.is_block(value):
        return ""
    context = repr(value.__tensor_flatten__()[1]) if hasattr(value, "__tensor_flatten__") else ""
    inside = [f"{tuple(part.shape)}{part.dtype}" for part in devices.own_parts(value)]
    return f"{type(value).__qualname__}{value.layout}{inside}{_PLACES.sub('', context)}"


def _steps(value: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The distances in memory between neighbours, where there are any: channels-last costs
    something else.
    """
    if value.layout != torch.strided:
        return ()
    return tuple(hint(step) for step, size in zip(value.stride(), shape, strict=True) if size > 1)


def _is_known(target: Any) -> bool:
    """Whether an operation is torch's own and all of it stands in the node: no custom operator, no
    nested graph.
    """
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "prims")
    return not isinstance(target, torch._ops.HigherOrderOperator)
