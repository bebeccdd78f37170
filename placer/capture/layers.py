"""The layer graph: layers in execution order, and the values that pass between them.

    inputs ──▶ layer ──▶ value ──▶ layer ──▶ ... ──▶ outputs
                 │
               state (the user's own parameters and buffers, by their names in the model)

The profiler and the executor share it: a layer is a function of a device, its state and the values
that it reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer import devices
from placer.capture.pytrees import Structure
from placer.utils.python_objects import fields

LayerFunction = Callable[[torch.device, Sequence[Tensor], Sequence[Any]], tuple[Any, ...]]
"""``function(device, state, reads) -> writes``: differentiable, without moves between devices."""


@dataclass(frozen=True)
class Value:
    """A tensor that passes between layers, or a number that the model computed.

    Attributes:
        name: unique in its graph.
        shape: at the example's batch size; () for a number.
        dtype: None for a number.
        bytes: at the example's batch size; 0 for a number.
        batch_dim: the batch dimension; None without one.
        requires_grad: whether a gradient flows back through it in training.
        source: the layer that produces it; None for an input of the model.
        from_values: whether it is a number read from a tensor's values, so that other values give
            another number.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    bytes: int
    batch_dim: int | None
    requires_grad: bool
    source: str | None
    from_values: bool = False

    def on_meta(self) -> Any:
        """Return a tensor like the value on ``meta``; 1 for a number."""
        return 1 if self.dtype is None else torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Layer:
    """The unit of placement.

    Attributes:
        name: the module path, with ``@1``, ``@2`` for later calls of the same module.
        modules: the module paths that the layer covers: one, or several if a cycle was merged.
        module_type: the class name of the module, for display.
        state: names of the parameters and buffers that the layer uses, in the order of
            ``function``'s ``state``.
        mutated: names in ``state`` that the layer changes in place.
        reads: names of the values that the layer reads, in the order of ``function``'s ``reads``.
        writes: names of the values that the layer produces, in the order of ``function``'s result.
        function: computes ``writes`` from ``state`` and ``reads`` on one device.
        signature: a hash, equal for layers with the same operations, shapes, dtypes and state
            shapes.
        random: whether the layer draws random numbers.
        signature_is_complete: whether the signature determines the layer completely, so that
            measurements of one such layer hold for every other, in later runs too. False where
            modules, custom operators or nested graphs run.
        program: the graph that ``function`` runs, over device, regions, state and reads; None if
            the layer calls modules.
        statistics: names in ``mutated`` that are running statistics of a normalisation, or its
            counters, and that the layer updates but does not read.
    """

    name: str
    modules: tuple[str, ...]
    module_type: str
    state: tuple[str, ...]
    mutated: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    function: LayerFunction
    signature: str
    random: bool = False
    signature_is_complete: bool = True
    program: fx.Graph | None = None
    statistics: tuple[str, ...] = ()


@dataclass
class LayerGraph:
    """The layers of a model, in execution order.

    Attributes:
        layers: in execution order: a value is produced before it is read.
        values: by name.
        inputs: names of the model's input values, in the order of its flattened tensors.
        outputs: names of the model's result values, in the order of its flattened tensors.
        colocated: groups of layers that share a parameter, or another tensor that one of them
            changes.
        state: the user's parameters and buffers by name, and the plain tensors that the graph
            reads.
        training: whether the model was captured in training mode.
        batch_size: number of samples in the example.
        granularity: how the layers were cut.
        constants: the names in ``state`` of plain tensors: unregistered attributes, variables,
            items of lists. They stay where they are, and layers on other devices read copies.
        captured: False if the model runs through hooks.
        not_captured_because: the reason if ``captured`` is False.
        hash: equal for the same operations, shapes and dtypes.
        model: the class name of the model.
        result: how the model returns ``outputs``; None if the graph was not captured in this
            process.
    """

    layers: list[Layer]
    values: dict[str, Value]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    colocated: tuple[tuple[str, ...], ...]
    state: Mapping[str, Tensor]
    training: bool
    batch_size: int
    granularity: int | str
    constants: frozenset[str] = frozenset()
    captured: bool = True
    not_captured_because: str = ""
    hash: str = ""
    model: str = ""
    result: Structure | None = None
    _by_name: dict[str, Layer] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._by_name = {layer.name: layer for layer in self.layers}

    @property
    def passes_value_numbers(self) -> bool:
        """Return whether a layer reads a number that another layer took from a tensor."""
        return any(value.from_values for value in self.values.values())

    def __getitem__(self, name: str) -> Layer:
        """Return the layer with this name."""
        return self._by_name[name]

    def readers(self) -> dict[str, list[str]]:
        """Return for each value the layers that read it, in execution order."""
        readers: dict[str, list[str]] = {name: [] for name in self.values}
        for layer in self.layers:
            for name in dict.fromkeys(layer.reads):
                readers[name].append(layer.name)
        return readers


def graph_hash(layers: Sequence[Layer]) -> str:
    """Return a hash of what each layer computes and how layers are connected.

    Args:
        layers: in execution order.
    """
    wiring = "\n".join(f"{layer.signature} {layer.reads} {layer.writes}" for layer in layers)
    return hashlib.sha256(wiring.encode()).hexdigest()[:32]


def tensor_bytes(tensor: Tensor, counted: set[Any] | None = None) -> int:
    """Return the bytes stored for a tensor, with the tensors that it wraps or has attached.

    Args:
        tensor: any tensor.
        counted: memory that is already counted and is not counted again; this call adds its own.
    """
    counted = set() if counted is None else counted
    total = 0
    for part in devices.parts(tensor):
        key = devices.memory_key(part)
        if key not in counted:
            counted.add(key)
            total += part.numel() * part.element_size()
    return total


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name, persistent or not.

    A shared tensor goes by its first name.
    """
    state: dict[str, Tensor] = dict(module.named_parameters())
    state.update(module.named_buffers())
    return state


def attached_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in objects and dicts that modules have as attributes, by name.

    Libraries keep the state of quantised weights there. Tensors that are attributes themselves, or
    items of a list, are constants of a graph. Tensors in the attributes of a parameter belong to
    the parameter.
    """
    return {
        ".".join(filter(None, (path, attribute, inside))): tensor
        for path, _, attribute, value in attachments(module)
        for inside, tensor in devices.named_tensors(value)
    }


def attachments(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield the attributes of modules that are objects or dicts with tensors in them.

    Yields:
        The path of a module, the module, the name of the attribute, and its value.
    """
    # Modules often share an object, such as a configuration, and searching it takes time.
    known: dict[int, bool] = {}
    for path, child in module.named_modules():
        for name, value in child.__dict__.items():
            if name in _MODULE_FIELDS or not (type(value) is dict or fields(value)):
                continue
            if id(value) not in known:
                known[id(value)] = devices.holds_tensors(value)
            if known[id(value)]:
                yield path, child, name, value


# Attributes that nn.Module itself has; they hold parameters and hooks, not the user's objects.
_MODULE_FIELDS = frozenset(nn.Module().__dict__)
