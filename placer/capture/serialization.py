"""Description of a captured layer graph as data, for a service that profiles it on its devices."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, fx, nn

from placer import devices
from placer.capture import autocast
from placer.capture.export.mode_regions import enter_region, leave_region
from placer.capture.layers import Layer, LayerGraph, Value
from placer.errors import CaptureError
from placer.schema.graph import (
    DType,
    Graph,
    GraphLayer,
    GraphState,
    GraphValue,
    MemoryFormat,
    Operation,
)

# Names of the operations that enter and leave an autocast or no_grad region.
ENTER, LEAVE = "placer.enter", "placer.leave"

NUMBER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "neg": operator.neg,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
"""Functions of numbers and of lists of tensors in captured graphs, called ``number.add`` etc."""

_NAMES: dict[Any, str] = {function: f"number.{name}" for name, function in NUMBER_FUNCTIONS.items()}
_DTYPES: dict[torch.dtype, DType] = {getattr(torch, name): name for name in get_args(DType)}


def to_wire(graph: LayerGraph) -> Graph:
    """Describe a captured graph without weights, values of inputs or code.

    Each layer will run there under the caller's autocast.

    Args:
        graph: from ``capture_graph``, in the mode and under the autocast to be profiled.

    Raises:
        CaptureError: an operation or a tensor cannot be described; profile the model where its code
            is.
    """
    if not graph.captured:
        raise CaptureError(
            f"{graph.model} could not be captured ({graph.not_captured_because}), so there is no "
            "graph to send; profile it on the machine with the devices"
        )
    return Graph(
        model=graph.model,
        hash=graph.hash,
        training=graph.training,
        batch_size=graph.batch_size,
        granularity=graph.granularity,
        state=tuple(_state(name, tensor, graph) for name, tensor in _used_state(graph).items()),
        values=tuple(_value(value) for value in graph.values.values()),
        inputs=graph.inputs,
        outputs=tuple(dict.fromkeys(graph.outputs)),
        colocated=graph.colocated,
        layers=tuple(_layer(layer) for layer in graph.layers),
    )


def _used_state(graph: LayerGraph) -> Mapping[str, Tensor]:
    names = dict.fromkeys(name for layer in graph.layers for name in layer.state)
    return {name: graph.state[name] for name in names}


def _state(name: str, tensor: Tensor, graph: LayerGraph) -> GraphState:
    if not devices.is_block(tensor):
        what = (
            f"a {type(tensor).__name__}"
            if tensor.layout == torch.strided
            else f"of layout {tensor.layout}"
        )
        raise CaptureError(
            f"{name!r} is {what}, and only plain tensors can be sent with a graph; profile the "
            "model on the machine with the devices"
        )
    kind = (
        "constant"
        if name in graph.constants
        else "parameter"
        if isinstance(tensor, nn.Parameter)
        else "buffer"
    )
    return GraphState(
        name=name,
        shape=tuple(tensor.shape),
        dtype=_dtype(tensor.dtype, name),
        kind=kind,
        requires_grad=tensor.requires_grad,
        memory_format=_memory_format(tensor),
    )


def _memory_format(tensor: Tensor) -> MemoryFormat:
    if tensor.is_contiguous():
        return "contiguous_format"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "channels_last_3d"
    return "contiguous_format"


def _value(value: Value) -> GraphValue:
    return GraphValue(
        name=value.name,
        shape=value.shape,
        dtype=None if value.dtype is None else _dtype(value.dtype, value.name),
        batched=value.batch_dim == 0,
        differentiable=value.requires_grad,
        source=value.source,
    )


def _dtype(dtype: torch.dtype, where: str) -> DType:
    if dtype not in _DTYPES:
        raise CaptureError(
            f"{where!r} has the dtype {dtype}, which cannot be sent; supported are "
            f"{', '.join(_DTYPES.values())}"
        )
    return _DTYPES[dtype]


def _layer(layer: Layer) -> GraphLayer:
    if layer.program is None:
        raise CaptureError(
            f"layer {layer.name!r} calls modules, not operations, so it cannot be sent"
        )
    operations, results = _Program(layer).written()
    dtype = autocast.current_dtype()
    if dtype is not None:
        region = ("autocast", "device", {"dtype": _dtype(dtype, "torch.autocast")}, True, False)
        operations = [
            Operation(op=ENTER, out="around", args=region),
            *operations,
            Operation(op=LEAVE, out="end"),
        ]
    return GraphLayer(
        name=layer.name,
        modules=layer.modules,
        module=layer.module_type,
        state=layer.state,
        mutated=layer.mutated,
        reads=layer.reads,
        writes=layer.writes,
        results=tuple(results),
        operations=tuple(operations),
        signature=layer.signature,
        random=layer.random,
    )


class _Program:
    """The operations of one layer as data.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Layer) -> None:
        assert layer.program is not None
        self._layer = layer
        self._graph = layer.program
        self._names: dict[fx.Node, Any] = {}

    def written(self) -> tuple[list[Operation], list[str]]:
        """Return the operations, and the names of the layer's results."""
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        # State and reads come after device and regions.
        inner = placeholders[2:]
        states = len(self._layer.state)
        for index, node in enumerate(inner):
            self._names[node] = {"ref": f"s{index}" if index < states else f"r{index - states}"}
        self._names[placeholders[0]] = {"device": True}
        operations: list[Operation] = []
        results: list[str] = []
        for node in self._graph.nodes:
            if node.op == "call_function":
                operations.append(self._operation(node, len(operations)))
            elif node.op == "output":
                results = [self._names[item]["ref"] for item in node.args[0]]
            elif node.op != "placeholder":
                raise CaptureError(
                    f"layer {self._layer.name!r} has a nested graph ({node.target}), which cannot "
                    "be sent; profile it where its code is"
                )
        return operations, results

    def _operation(self, node: fx.Node, index: int) -> Operation:
        out = f"n{index}"
        self._names[node] = {"ref": out}
        if node.target is enter_region:
            return Operation(
                op=ENTER, out=out, args=tuple(self._argument(item) for item in node.args[2:])
            )
        if node.target is leave_region:
            return Operation(op=LEAVE, out=out)
        kwargs = {name: self._argument(item) for name, item in node.kwargs.items()}
        return Operation(
            op=self._called(node),
            out=out,
            args=tuple(self._argument(item) for item in node.args),
            kwargs=kwargs,
        )

    def _called(self, node: fx.Node) -> str:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
            return str(target)
        if target in _NAMES:
            return _NAMES[target]
        raise CaptureError(
            f"layer {self._layer.name!r} calls {target}, which cannot be sent; profile it where "
            "its code is"
        )

    def _argument(self, item: Any) -> Any:
        if isinstance(item, fx.Node):
            return self._names[item]
        if item is None or isinstance(item, bool | int | str):
            return item
        # JSON has no NaN and no infinity.
        if isinstance(item, float):
            return item if math.isfinite(item) else {"float": str(item)}
        if isinstance(item, complex):
            return {"complex": [item.real, item.imag]}
        if isinstance(item, list | tuple):
            return [self._argument(inner) for inner in item]
        if isinstance(item, torch.dtype):
            return {"dtype": str(item).removeprefix("torch.")}
        if isinstance(item, torch.memory_format):
            return {"memory_format": str(item).removeprefix("torch.")}
        if item is torch.strided:
            return {"layout": "strided"}
        # True stands for the layer's own device, which the receiver chooses.
        if isinstance(item, torch.device):
            return {"device": "cpu"} if item.type == "cpu" else {"device": True}
        raise CaptureError(
            f"layer {self._layer.name!r} has the argument {item!r}, which cannot be sent"
        )
