"""Conversion of groups of operations to layers: each group becomes one function.

    group of nodes   ──▶   def forward(device, regions, state..., reads...): ...; return writes

    reads     values from earlier layers, and inputs of the model
    state     parameters, buffers and constants that the operations use
    regions   torch.no_grad() and torch.autocast, which the function enters and leaves itself

The function runs on any device: ``device`` replaces the device of the capture.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer import devices
from placer.capture.export import nested_ops
from placer.capture.export.export import Exported
from placer.capture.export.inlining import REGIONS
from placer.capture.export.mode_regions import Region, Regions, enter_region, leave_region
from placer.capture.export.op_effects import node_draws_random, updates_running_statistics
from placer.capture.export.traced_graph import PREFIX
from placer.capture.granularity import hint, is_fixed
from placer.capture.grouping import Group, storage_roots, written_arguments
from placer.capture.layers import Layer, Value, named_state
from placer.capture.python_state.plain_tensors import plain_names
from placer.capture.pytrees import SYMBOLIC_NUMBERS


@dataclass
class State:
    """The tensors that the graph's ``get_attr`` nodes refer to, under one name each.

    Attributes:
        tensors: the user's parameters and buffers, and the plain tensors that the graph reads, by
            name.
        constants: the names of the plain tensors: neither parameters nor buffers.
        name_of: from ``get_attr`` node to name.
    """

    tensors: dict[str, Tensor]
    constants: frozenset[str]
    name_of: dict[fx.Node, str]


def find_state(exported: Exported, module: nn.Module) -> State:
    """Match the graph's attributes with the user's own tensors by identity.

    A tied tensor goes by its first name.

    Args:
        exported: the exported model.
        module: the module that was exported.
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
        # By path first: during export, stand-ins replaced the tensors that are on other devices.
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
class _LayerDraft:
    """A layer while its reads and writes are gathered."""

    group: Group
    state: list[str] = field(default_factory=list)
    state_nodes: dict[str, fx.Node] = field(default_factory=dict)
    reads: list[fx.Node] = field(default_factory=list)
    writes: list[fx.Node] = field(default_factory=list)


class LayerBuilder:
    """The layers and values of one captured graph.

    Args:
        exported: the exported model.
        module: the module that was exported.
        groups: the operations of each layer, in execution order.
        state: the tensors that the graph refers to.
    """

    def __init__(
        self, exported: Exported, module: nn.Module, groups: Sequence[Group], state: State
    ) -> None:
        self._exported = exported
        self._module = module
        self._state = state
        self._graph = exported.module.graph
        self._layer_index = {
            node: index for index, group in enumerate(groups) for node in group.nodes
        }
        self._drafts = [_LayerDraft(group) for group in groups]
        self._mutated = _mutated_state(self._graph, state)
        self._gradient = _gradient_flow(self._graph, state)
        self._find_reads_and_writes()

    def layers(self) -> list[Layer]:
        """Return the layers in execution order."""
        return [self._layer(draft) for draft in self._drafts]

    def values(self) -> dict[str, Value]:
        """Return the inputs of the model and every value that passes between layers."""
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
        """Return the names of the values that the model returns."""
        return tuple(node.name for node in self._returned())

    def colocated(self) -> tuple[tuple[str, ...], ...]:
        """Return groups of layers that share a parameter, or a tensor that one of them changes."""
        users: dict[str, list[str]] = {}
        for draft in self._drafts:
            for name in draft.state:
                users.setdefault(name, []).append(draft.group.name)
        return tuple(dict.fromkeys(tuple(names) for names in users.values() if len(names) > 1))

    def _returned(self) -> list[fx.Node]:
        output = next(node for node in reversed(self._graph.nodes) if node.op == "output")
        return [item for item in output.args[0] if isinstance(item, fx.Node)]

    def _find_reads_and_writes(self) -> None:
        """Find which values each layer reads and writes."""
        # The first layer that uses a tensor owns it.
        owner: dict[str, int] = {}
        needed: dict[fx.Node, None] = dict.fromkeys(self._returned())
        shared: dict[str, fx.Node] = {}
        for index, draft in enumerate(self._drafts):
            for node in draft.group.nodes:
                for source in node.all_input_nodes:
                    name = self._state.name_of.get(source)
                    if name is None:
                        self._add_read(index, source, needed)
                    elif owner.setdefault(name, index) == index or not self._can_be_sent(name):
                        self._add_state(draft, name, source)
                    else:
                        # Nobody changes this tensor: its owner sends it to later readers like any
                        # other value.
                        shared.setdefault(name, source)
        # A returned tensor needs an owner even if no operation uses it.
        for source in [*self._returned(), *shared.values()]:
            name = self._state.name_of.get(source)
            if name is not None:
                self._add_state(self._drafts[owner.setdefault(name, 0)], name, source)
        self._send_shared_state(shared, owner, needed)
        for node in needed:
            owner_index = self._layer_index.get(node)
            if owner_index is None and node in self._state.name_of:
                owner_index = owner[self._state.name_of[node]]
            if owner_index is not None and node not in self._drafts[owner_index].writes:
                self._drafts[owner_index].writes.append(node)

    def _add_read(self, index: int, source: fx.Node, needed: dict[fx.Node, None]) -> None:
        if source.op == "get_attr" or self._layer_index.get(source) == index:
            return
        needed[source] = None
        if source not in self._drafts[index].reads:
            self._drafts[index].reads.append(source)

    def _can_be_sent(self, name: str) -> bool:
        # Parameters stay where they are: their gradients must arrive in the user's own tensor.
        return not isinstance(self._state.tensors[name], nn.Parameter) and name not in self._mutated

    def _add_state(self, draft: _LayerDraft, name: str, source: fx.Node) -> None:
        if name not in draft.state_nodes:
            draft.state.append(name)
            draft.state_nodes[name] = source

    def _send_shared_state(
        self, shared: Mapping[str, fx.Node], owner: Mapping[str, int], needed: dict[fx.Node, None]
    ) -> None:
        """Make other layers read a constant from its owner, by one node for all its uses.

        Args:
            shared: constants that several layers use, by name.
            owner: index of the layer that owns each tensor, by name.
            needed: receives the nodes that the owners must return.
        """
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
            from_values = isinstance(example, SYMBOLIC_NUMBERS) and not example.node.has_hint()
            return Value(node.name, (), None, 0, None, False, source, from_values)
        shape = tuple(hint(size) for size in example.shape)
        batch_dim = next(
            (dim for dim, size in enumerate(example.shape) if self._is_batch(size, dim)), None
        )
        return Value(
            name=node.name,
            shape=shape,
            dtype=example.dtype,
            # Not numel(), which is symbolic for open sizes.
            bytes=example.element_size() * math.prod(shape),
            batch_dim=batch_dim,
            requires_grad=self._gradient.get(node, False),
            source=source,
        )

    def _is_batch(self, size: int | torch.SymInt, dim: int) -> bool:
        # Without a symbol only the convention is left: the first dimension, if its size fits.
        if not self._exported.batch_symbols:
            return dim == 0 and is_fixed(size) and hint(size) == self._exported.batch_size
        return isinstance(size, torch.SymInt) and size.node.expr in self._exported.batch_symbols

    def _layer(self, draft: _LayerDraft) -> Layer:
        names = draft.group.layer_names
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
            function=_layer_function(program.forward, self._exported.device.type, has_regions),
            program=program.graph,
            signature=self._signature(draft),
            random=any(node_draws_random(node) for node in draft.group.nodes),
            signature_is_complete=all(
                _is_described_by_node(node.target) for node in draft.group.nodes
            )
            and all(devices.is_block(self._state.tensors[name]) for name in draft.state),
        )

    def _statistics(self, draft: _LayerDraft) -> tuple[str, ...]:
        """Return the state that is used only for running statistics or to count batches."""
        # State among the layer's results has readers outside of it, so it does more than gather.
        gathered, read = set[str](), {node for node in draft.writes if node.op == "get_attr"}
        others = {self._state.name_of[node] for node in read if node in self._state.name_of}
        for node in draft.group.nodes:
            # aten's batch norms take the running mean and variance as arguments 3 and 4.
            running = node.args[3:5] if updates_running_statistics(node) else ()
            for source in node.all_input_nodes:
                if source in self._state.name_of:
                    only = source in running or _is_batch_counter(node)
                    (gathered if only else others).add(self._state.name_of[source])
        return tuple(
            name for name in draft.state if name in self._mutated and name in gathered - others
        )

    def _module_type(self, path: str) -> str:
        try:
            return type(self._module.get_submodule(path)).__name__
        except AttributeError:
            return type(self._module).__name__

    def _program(self, draft: _LayerDraft) -> fx.GraphModule:
        """Compile one layer's operations to a function of device, regions, state and reads."""
        graph = fx.Graph()
        # Not "device": graphs print constants of other devices under that name.
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
            # Arguments from outside of the layer: state, and bodies of nested operations.
            for source in node.all_input_nodes:
                if source in self._state.name_of:
                    env[source] = by_name[self._state.name_of[source]]
                elif source.op == "get_attr" and source not in env:
                    env[source] = graph.node_copy(source)
                    if nested_ops.nested_graph(self._exported.module, source) is not None:
                        kind = self._exported.device.type
                        env[source] = graph.call_function(
                            nested_ops.graph_on_device, (env[source], kind, device)
                        )
            inside = _switch_regions(graph, inside, node.meta.get(REGIONS, ()), regions, device)
            copy = graph.node_copy(node, env.__getitem__)
            copy.args = fx.node.map_aggregate(
                copy.args, lambda item: self._to_layer_device(item, device)
            )
            copy.kwargs = fx.node.map_aggregate(
                copy.kwargs, lambda item: self._to_layer_device(item, device)
            )
            env[node] = copy
        _switch_regions(graph, inside, (), regions, device)
        for node in draft.writes:
            if node in self._state.name_of:
                env[node] = by_name[self._state.name_of[node]]
        graph.output(tuple(env[node] for node in draft.writes))
        return fx.GraphModule(self._exported.module, graph)

    def _to_layer_device(self, argument: Any, device: fx.Node) -> Any:
        """Replace the captured device by the device that the layer runs on."""
        if isinstance(argument, torch.device) and argument.type == self._exported.device.type:
            return device
        return argument

    def _signature(self, draft: _LayerDraft) -> str:
        """Return a hash that is equal for layers that cost the same.

        It covers the operations, and the shapes and dtypes of state and inputs.
        """
        # Positions replace names, so that equal layers at different places have equal hashes.
        index: dict[Any, str] = {name: f"s{number}" for number, name in enumerate(draft.state)}
        index |= {node: f"r{number}" for number, node in enumerate(draft.reads)}
        parts = [
            _describe_tensor(self._state.tensors[name], name in self._mutated)
            for name in draft.state
        ]
        parts += [
            _describe_tensor(node.meta.get("val"), self._gradient.get(node, False))
            for node in draft.reads
        ]
        for number, node in enumerate(draft.group.nodes):
            index[node] = f"n{number}"
            args = self._describe_arguments(node.args, index)
            kwargs = self._describe_arguments(node.kwargs, index)
            parts.append(f"{nested_ops.operation_name(node)}{args}{kwargs}")
            parts.append(f"{node.meta.get(REGIONS, ())}")
            bodies = (
                nested_ops.nested_graph(self._exported.module, source)
                for source in node.all_input_nodes
            )
            parts += [nested_ops.graph_text(body) for body in bodies if body is not None]
        parts.append(",".join(index.get(node, "s") for node in draft.writes))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]

    def _describe_arguments(self, arguments: Any, index: Mapping[Any, str]) -> str:
        def describe(item: Any) -> Any:
            if isinstance(item, fx.Node):
                return index.get(
                    self._state.name_of.get(item, ""), index.get(item, str(item.target))
                )
            return "device" if isinstance(item, torch.device) else repr(item)

        return repr(fx.node.map_aggregate(arguments, describe))


def _layer_function(
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


def _switch_regions(
    graph: fx.Graph,
    inside: tuple[Region, ...],
    wanted: tuple[Region, ...],
    regions: fx.Node,
    device: fx.Node,
) -> tuple[Region, ...]:
    """Leave and enter regions until the wanted regions are open.

        open       grad_off  autocast
        wanted     grad_off  grad_on       ->  leave autocast, enter grad_on

    Common outer regions stay open.
    """
    common = 0
    while common < min(len(inside), len(wanted)) and inside[common] == wanted[common]:
        common += 1
    for _ in inside[common:]:
        graph.call_function(leave_region, (regions,))
    for region in wanted[common:]:
        graph.call_function(enter_region, (regions, device, *region))
    return wanted


def _mutated_state(graph: fx.Graph, state: State) -> set[str]:
    """Return the names of the state that the graph writes to in place, also through views."""
    operations = [node for node in graph.nodes if node.op == "call_function"]
    roots = storage_roots(operations)
    mutated: set[str] = set()
    for node in operations:
        if updates_running_statistics(node):
            mutated.update(
                state.name_of[source] for source in node.args[3:5] if source in state.name_of
            )
        for target in written_arguments(node):
            mutated.update(
                state.name_of[root] for root in roots.get(target, {target}) if root in state.name_of
            )
    return mutated


def _is_batch_counter(node: fx.Node) -> bool:
    """Return whether a node adds a number and nobody reads the result: a counter of batches."""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name == "aten::add_" and not node.users and not isinstance(node.args[1], fx.Node)


def _gradient_flow(graph: fx.Graph, state: State) -> dict[fx.Node, bool]:
    """Return for each node whether a gradient flows back through it."""
    flows: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        example = node.meta.get("val")
        if node.op == "placeholder":
            flows[node] = isinstance(example, Tensor) and example.requires_grad
        elif node.op == "get_attr":
            flows[node] = node in state.name_of and state.tensors[state.name_of[node]].requires_grad
        elif node.op == "call_function":
            # A gradient ends at integers, in no_grad regions and at detach.
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


def _describe_tensor(value: Any, flag: bool) -> str:
    if not isinstance(value, Tensor):
        return "number"
    shape = tuple(hint(size) for size in value.shape)
    layout = f"{shape}{_strides(value, shape)}{value.dtype}"
    return f"{layout}{value.requires_grad}{flag}{_describe_parts(value)}"


_DEVICE_OR_ADDRESS = re.compile(r"device\(.*?\)| at 0x[0-9a-f]+")
"""Parts of a wrapper's printed context that differ between equal wrappers: device, address."""


def _describe_parts(value: Tensor) -> str:
    """Describe a wrapper's or sparse tensor's parts: equal shapes may cost differently."""
    if devices.is_block(value):
        return ""
    context = repr(value.__tensor_flatten__()[1]) if hasattr(value, "__tensor_flatten__") else ""
    inside = [f"{tuple(part.shape)}{part.dtype}" for part in devices.own_parts(value)]
    return f"{type(value).__qualname__}{value.layout}{inside}{_DEVICE_OR_ADDRESS.sub('', context)}"


def _strides(value: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the dimensions with more than one element.

    Channels-last tensors, for example, cost differently.
    """
    if value.layout != torch.strided:
        return ()
    return tuple(hint(step) for step, size in zip(value.stride(), shape, strict=True) if size > 1)


def _is_described_by_node(target: Any) -> bool:
    """Return whether an operation is torch's own and the node describes it completely.

    Custom operators and nested graphs are not.
    """
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "prims")
    return not isinstance(target, torch._ops.HigherOrderOperator)
