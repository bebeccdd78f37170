"""The layer graph: layers in execution order, and the values that pass between them.

    inputs ──▶ layer ──▶ value ──▶ layer ──▶ ... ──▶ outputs
                 │
               state (the user's own parameters and buffers, by their names in the model)

Profiler and executor both stand on it: a layer is a function of a device, its state and the values
that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer import devices
from placer.capture.pytrees import Structure
from placer.utils.python_objects import fields

LayerFunction = Callable[[torch.device, Sequence[Tensor], Sequence[Any]], tuple[Any, ...]]
"""``function(device, state, reads) -> writes``; differentiable, no moves between devices inside."""


@dataclass(frozen=True)
class Value:
    """What crosses the border of a layer: a tensor, or a number that the model computed from a
    shape.

    Attributes:
        name: unique in its graph.
        shape: at the example's batch size; () for a number.
        dtype: None for a number.
        bytes: at the example's batch size; 0 for a number.
        batch_dim: the dimension that is the batch; None where it has none.
        requires_grad: whether a gradient flows back through it in training.
        source: the layer that makes it; None for an input of the model.
        from_values: whether it is a number that was taken from a tensor, so that it is another one
            for other values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    bytes: int
    batch_dim: int | None
    requires_grad: bool
    source: str | None
    from_values: bool = False


@dataclass(frozen=True)
class Layer:
    """The unit that is placed.

    Attributes:
        name: the module path, with ``@1``, ``@2`` for later calls of the same module.
        modules: the module paths that it covers: one, or several where a cycle was merged.
        module_type: the class of the module, for people.
        state: names of the parameters and buffers that it uses, in the order of ``function``'s
            ``state``.
        mutated: those of ``state`` that it changes in place.
        statistics: those of them that are a normalisation's running statistics and their counters,
            and nothing else here: it changes them and does not read them.
        reads: names of the values that it reads, in the order of ``function``'s ``reads``.
        writes: names of the values that it makes, in the order of ``function``'s result.
        function: computes ``writes`` from ``state`` and ``reads`` on one device.
        signature: equal for two layers that do the same operations on the same shapes, dtypes and
            state shapes.
        random: whether it draws random numbers.
        told_by_signature: whether its signature says all that it does, so that what was measured of
            one such layer holds for every other, also in another run; not where modules, custom
            operators or nested graphs run.
        program: what ``function`` runs, as a graph of device, regions, state and reads; None where
            it calls modules.
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
    told_by_signature: bool = True
    program: fx.Graph | None = None
    statistics: tuple[str, ...] = ()


@dataclass
class LayerGraph:
    """The layers of a model, in execution order.

    Attributes:
        layers: in execution order: a value is made before it is read.
        values: by name.
        inputs: names of the values that the model is given, in the order of its flattened tensors.
        outputs: names of the values that the model returns, in the order of its flattened tensors.
        colocated: groups of layers that share a parameter, or another tensor that one of them
            changes.
        state: the user's parameters and buffers by name, and the plain tensors that the graph
            reads.
        constants: the names in ``state`` of plain tensors: attributes that are not registered,
            variables, items of lists. They stay where they are, and layers on other devices read
            copies.
        training: whether the model was captured in training mode.
        batch_size: of the example.
        granularity: how the layers were cut.
        captured: False where the model runs through hooks.
        not_captured_because: the reason then.
        hash: the same for the same operations, shapes and dtypes.
        result: how the model returns ``outputs``; None where that is not known, in a graph that was
            not captured here.
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
    def passes_numbers_on(self) -> bool:
        """Whether a layer reads a number that another one took from a tensor."""
        return any(value.from_values for value in self.values.values())

    def __getitem__(self, name: str) -> Layer:
        """The layer of that name."""
        return self._by_name[name]

    def readers(self) -> dict[str, list[str]]:
        """For each value, the layers that read it, in execution order."""
        readers: dict[str, list[str]] = {name: [] for name in self.values}
        for layer in self.layers:
            for name in dict.fromkeys(layer.reads):
                readers[name].append(layer.name)
        return readers


def tensor_bytes(tensor: Tensor, counted: set[Any] | None = None) -> int:
    """Return the bytes that are stored for a tensor: those of what it wraps and of what is attached
    to it included.

    Args:
        tensor: any tensor.
        counted: the memory that was counted before, which is not counted again; what is counted now
            is added.
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
    """The parameters and buffers of a module by name, persistent or not, a shared one under its
    first name.
    """
    state: dict[str, Tensor] = dict(module.named_parameters())
    state.update(module.named_buffers())
    return state


def attached_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in objects and dicts that modules have as attributes, by name.

    Libraries keep the state of quantised weights there. Tensors that are attributes themselves, or
    items of a list, are constants of a graph; those in attributes of parameters belong to these.
    """
    return {
        ".".join(filter(None, (path, attribute, inside))): tensor
        for path, _, attribute, value in attachments(module)
        for inside, tensor in devices.named_tensors(value)
    }


def attachments(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield the objects and dicts with tensors in them that modules have as attributes.

    Yields:
        The path of a module, the module, the name of the attribute, and its value.
    """
    # modules often share an object, such as a configuration
    known: dict[int, bool] = {}
    for path, child in module.named_modules():
        for name, value in child.__dict__.items():
            if name in _OF_EVERY_MODULE or not (type(value) is dict or fields(value)):
                continue
            if id(value) not in known:
                known[id(value)] = devices.holds_tensors(value)
            if known[id(value)]:
                yield path, child, name, value


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
