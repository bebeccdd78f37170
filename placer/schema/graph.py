"""A captured model as data: operations, shapes, dtypes and attributes, without weights or code.

    laptop: model ──▶ capture ──▶ Graph ──▶ GPU node: replay, layer by layer, on random values ──▶
        Profile

Arguments of operations are JSON: null, booleans, numbers, text, lists, and objects of one key:

    {"ref": name}            a result, or one of the layer's reads or state, by its local name
    {"device": true}         the layer's device
    {"device": "cpu"}        the host
    {"dtype": "bfloat16"}    a dtype
    {"memory_format": ...}   a memory format
    {"layout": "strided"}    a layout
    {"float": "inf"}         inf, -inf or nan
    {"complex": [re, im]}    a complex number
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import Field, StringConstraints, model_validator

from placer.schema.base import (
    FIRST,
    MAX_DEVICES,
    MAX_LAYERS,
    SCHEMA_VERSION,
    Name,
    Wire,
    refuse_duplicates,
    refuse_unknown,
)

DType = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
Optimizer = Literal[
    "adam",
    "adamw",
    "sgd",
    "rmsprop",
    "adagrad",
    "adafactor",
    "nadam",
    "radam",
    "adamax",
    "adadelta",
    "asgd",
    "rprop",
]
MemoryFormat = Literal["contiguous_format", "channels_last", "channels_last_3d", "preserve_format"]
DTYPES: tuple[str, ...] = get_args(DType)
MEMORY_FORMATS: tuple[str, ...] = get_args(MemoryFormat)
TAGS = frozenset({"ref", "device", "dtype", "memory_format", "layout", "float", "complex"})

MAX_BYTES = 2**46
"""Largest size of one tensor; no device holds a larger one."""

MAX_OPERATIONS = 500_000
MAX_ITEMS = 10_000
MAX_DEPTH = 3
_SIZES = {"float64": 8, "complex64": 8, "complex128": 16, "int64": 8, "float32": 4, "int32": 4}

Length = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Shape = Annotated[tuple[Length, ...], Field(max_length=16), FIRST]
Names = Annotated[tuple[Name, ...], Field(max_length=MAX_OPERATIONS), FIRST]


Sized = TypeVar("Sized", "GraphState", "GraphValue")


def _refuse_large(tensor: Sized) -> Sized:
    # dtypes outside the table take 1 or 2 bytes; 2 is on the safe side
    size = _SIZES.get(tensor.dtype or "", 2)
    for length in tensor.shape:
        size *= length
        if size > MAX_BYTES:
            raise ValueError(
                f"{tensor.name!r} of shape {list(tensor.shape)} takes more than {MAX_BYTES} bytes"
            )
    return tensor


class GraphState(Wire):
    """A parameter, buffer or constant of the graph; its values are not sent.

    Attributes:
        name: in the model, unique.
        shape: its dimensions.
        dtype: of its elements.
        kind: what it is.
        requires_grad: whether it requires a gradient in training.
        memory_format: its memory layout.
    """

    name: Name
    shape: Shape = ()
    dtype: DType
    kind: Literal["parameter", "buffer", "constant"]
    requires_grad: bool = False
    memory_format: MemoryFormat = "contiguous_format"

    _fits = model_validator(mode="after")(_refuse_large)


class GraphValue(Wire):
    """A value that enters or leaves a layer: a tensor, or a number computed from a shape.

    Attributes:
        name: unique in the graph.
        shape: for one micro-batch; empty for a number.
        dtype: null for a number.
        batched: whether its first dimension is the batch.
        differentiable: whether a gradient flows back through it in training.
        source: the layer that makes it; null for a model input.
    """

    name: Name
    shape: Shape = ()
    dtype: DType | None = None
    batched: bool = False
    differentiable: bool = False
    source: Name | None = None

    _fits = model_validator(mode="after")(_refuse_large)


class Operation(Wire):
    """One ATen operator, function of numbers, or border of a region.

    Attributes:
        op: the full name, such as ``aten.linear.default``; ``placer.profiler.remote.allowed_ops``
            lists the allowed ones.
        out: the name of its result in the layer.
        args: positional arguments, see above.
        kwargs: keyword arguments, see above.
    """

    op: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    out: Name
    args: Annotated[tuple[Any, ...], Field(max_length=64)] = ()
    kwargs: Annotated[
        dict[Annotated[str, StringConstraints(max_length=64)], Any], Field(max_length=64)
    ] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _plain(self) -> Self:
        for argument in (*self.args, *self.kwargs.values()):
            _check_argument(argument, MAX_DEPTH)
        return self


class GraphLayer(Wire):
    """A layer with its operations.

    Attributes:
        name: as in the resulting profile.
        modules: the module paths that it covers.
        module: the class of the module, for display.
        state: the state that it uses; ``s0``, ``s1``, ... in its operations.
        mutated: the entries of ``state`` that it changes in place.
        reads: the values that it reads; ``r0``, ``r1``, ... in its operations.
        writes: the values that it makes.
        results: the local name of each of ``writes``.
        operations: in order.
        signature: equal for layers of equal cost.
        random: whether it draws random numbers.
    """

    name: Name
    modules: Names = ()
    module: Annotated[str, StringConstraints(max_length=512)] = ""
    state: Names = ()
    mutated: Names = ()
    reads: Names = ()
    writes: Names = ()
    results: Names = ()
    operations: Annotated[tuple[Operation, ...], Field(max_length=MAX_OPERATIONS), FIRST] = ()
    signature: Annotated[str, StringConstraints(max_length=128)] = ""
    random: bool = False


class Graph(Wire):
    """A captured model, divided into layers.

    Attributes:
        model: the name of the model's class.
        hash: equal for equal graphs, shapes and types.
        training: whether it was captured in training mode.
        batch_size: samples in the captured micro-batch.
        granularity: how the layers were formed.
        state: parameters, buffers and constants.
        values: inputs, and values between layers.
        inputs: names of the model's inputs.
        outputs: names of the model's results.
        colocated: groups of layers that share state and therefore a device.
        layers: in execution order.
    """

    model: Annotated[str, StringConstraints(max_length=512)] = ""
    hash: Annotated[str, StringConstraints(max_length=128)] = ""
    training: bool = False
    batch_size: Annotated[int, Field(ge=1, le=2**31)] = 1
    granularity: (
        Annotated[int, Field(ge=1, le=1000)] | Annotated[str, StringConstraints(max_length=64)]
    ) = "auto"
    state: Annotated[tuple[GraphState, ...], Field(max_length=MAX_OPERATIONS), FIRST] = ()
    values: Annotated[tuple[GraphValue, ...], Field(max_length=MAX_OPERATIONS), FIRST] = ()
    inputs: Names = ()
    outputs: Names = ()
    colocated: Annotated[tuple[Names, ...], FIRST] = ()
    layers: Annotated[tuple[GraphLayer, ...], Field(min_length=1, max_length=MAX_LAYERS), FIRST]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse_duplicates("layer", [layer.name for layer in self.layers])
        refuse_duplicates("state", [state.name for state in self.state])
        refuse_duplicates("value", [value.name for value in self.values])
        state = {one.name for one in self.state}
        values = {value.name for value in self.values}
        # values must exist before they are read, so the order of layers is checked on the way
        there = set(self.inputs)
        refuse_unknown("inputs", there, values, "value")
        for layer in self.layers:
            label = f"layer {layer.name!r}"
            refuse_unknown(label, layer.state, state, "state")
            refuse_unknown(f"{label} changes", layer.mutated, set(layer.state), "state of its own")
            refuse_unknown(f"{label} reads", layer.reads, there, "value made before it")
            refuse_unknown(f"{label} writes", layer.writes, values, "value")
            if len(layer.results) != len(layer.writes):
                raise ValueError(
                    f"{label} has {len(layer.writes)} writes and {len(layer.results)} results"
                )
            there.update(layer.writes)
        refuse_unknown("outputs", self.outputs, there, "value")
        layers = {layer.name for layer in self.layers}
        for value in self.values:
            if value.source is not None:
                refuse_unknown(f"the source of value {value.name!r}", (value.source,), layers)
        for group in self.colocated:
            refuse_unknown("colocated", group, layers, "layer")
        return self


class ProfileRequest(Wire):
    """A request to measure the layers of a graph on a node's devices.

    Attributes:
        graph: the model, captured with one micro-batch.
        devices: number of the node's devices to measure; null for all.
        optimizer: the optimizer whose state and step count, in training; null for none.
        repeats: maximum number of timings of each pass.
    """

    schema_version: Literal["3"] = SCHEMA_VERSION
    graph: Graph
    devices: Annotated[int, Field(ge=1, le=MAX_DEVICES)] | None = None
    optimizer: Optimizer | None = "adam"
    repeats: Annotated[int, Field(ge=1, le=50)] = 10


def _check_argument(argument: Any, depth: int) -> None:
    """Raise a ValueError for an argument that the module's docstring does not list."""
    if argument is None or isinstance(argument, bool | float):
        return
    if isinstance(argument, int):
        if abs(argument) >= 2**63:
            raise ValueError("an integer does not fit into 64 bits")
    elif isinstance(argument, str):
        if len(argument) > 64:
            raise ValueError(f"text of {len(argument)} characters; at most 64 are taken")
    elif isinstance(argument, list | tuple) and depth > 0 and len(argument) <= MAX_ITEMS:
        for item in argument:
            _check_argument(item, depth - 1)
    elif isinstance(argument, dict) and len(argument) == 1 and TAGS.issuperset(argument):
        _check_tagged(*next(iter(argument.items())))
    else:
        raise ValueError(
            f"{str(argument)[:80]} is not an argument that can be sent, or nested too deeply"
        )


def _check_tagged(tag: str, content: Any) -> None:
    fine = {
        "ref": isinstance(content, str) and 0 < len(content) <= 512,
        "device": content is True or content == "cpu",
        "dtype": isinstance(content, str) and len(content) <= 32,
        "memory_format": isinstance(content, str) and len(content) <= 32,
        "layout": content == "strided",
        "float": content in ("inf", "-inf", "nan"),
        "complex": isinstance(content, list | tuple)
        and len(content) == 2
        and all(type(part) in (int, float) for part in content),
    }
    if not fine[tag]:
        raise ValueError(f"{str({tag: content})[:80]} is not an argument that can be sent")
