"""Measurement of a received graph on this machine, on random values.

    Graph ──▶ LayerGraph (state and inputs on meta; each layer interprets its operations) ──▶
    measure ──▶ Profile

Only operators of ``allowed_ops`` are executed, and every argument is validated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer import schema
from placer.capture.export.mode_regions import Regions, enter_region, leave_region
from placer.capture.layers import Layer, LayerGraph, Value, tensor_bytes
from placer.capture.serialization import ENTER, LEAVE
from placer.devices import keep_random_state, resolve, type_name, unobserved
from placer.errors import InputError
from placer.optimizers import OptimizerState
from placer.profiler.links.cluster import measure, resolve_limits
from placer.profiler.links.links import links_to_measure
from placer.profiler.measure import measure_layers
from placer.profiler.profile_writer import fragmented_bytes, write
from placer.profiler.progress import progress_bar
from placer.profiler.remote.allowed_ops import find
from placer.schema.graph import (
    DTYPES,
    MEMORY_FORMATS,
    Graph,
    GraphLayer,
    GraphState,
    GraphValue,
    Operation,
    ProfileRequest,
)
from placer.utils.dtypes import is_differentiable


def replay(request: ProfileRequest) -> schema.Profile:
    """Measure the layers of a graph on this machine's devices.

    Args:
        request: the graph and the measurement options.

    Returns:
        The profile, as ``profile`` makes it of the model itself, but on random values.

    Raises:
        InputError: if the graph has a forbidden operator, or requests more devices than exist.
        ProfilingError: if a layer failed or did not fit; the message names it.
    """
    graph = rebuild(request.graph)
    found = resolve(request.devices)
    limits = resolve_limits(found, None)
    training = graph.training
    by_type: dict[str, torch.device] = {}
    for device in found:
        by_type.setdefault(type_name(device), device)
    optimizer = OptimizerState(request.optimizer if training else None)
    inputs = [graph.values[name].on_meta() for name in graph.inputs]
    steps = len({layer.signature for layer in graph.layers}) * len(by_type) + links_to_measure(
        found, None
    )
    with (
        unobserved(),
        keep_random_state(found),
        torch.inference_mode(False),
        progress_bar(False, steps) as step,
    ):
        measured = {
            kind: measure_layers(graph, inputs, device, training, request.repeats, step, optimizer)
            for kind, device in by_type.items()
        }
        cluster = measure(found, limits, step, None, fragmented_bytes([measured]))
    return write(graph, measured, training, optimizer, cluster, by_type)


def rebuild(graph: Graph) -> LayerGraph:
    """Return the layer graph that a Graph describes, with state and inputs on ``meta``.

    Raises:
        InputError: if an operator or argument is not allowed; the message names the layer.
    """
    state = {one.name: _state(one) for one in graph.state}
    return LayerGraph(
        layers=[_layer(layer) for layer in graph.layers],
        values={value.name: _value(value) for value in graph.values},
        inputs=graph.inputs,
        outputs=graph.outputs,
        colocated=graph.colocated,
        state=state,
        training=graph.training,
        batch_size=graph.batch_size,
        granularity=graph.granularity,
        constants=frozenset(one.name for one in graph.state if one.kind == "constant"),
        hash=graph.hash,
        model=graph.model,
    )


def _state(one: GraphState) -> Tensor:
    tensor = torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta")
    if one.memory_format.startswith("channels_last") and tensor.dim() == (
        5 if one.memory_format.endswith("3d") else 4
    ):
        tensor = tensor.to(memory_format=getattr(torch, one.memory_format))
    trained = one.requires_grad and is_differentiable(tensor)
    return nn.Parameter(tensor, trained) if one.kind == "parameter" else tensor


def _value(value: GraphValue) -> Value:
    dtype = None if value.dtype is None else getattr(torch, value.dtype)
    size = (
        0 if dtype is None else tensor_bytes(torch.empty(value.shape, dtype=dtype, device="meta"))
    )
    batch = 0 if value.batched else None
    return Value(value.name, value.shape, dtype, size, batch, value.differentiable, value.source)


def _layer(layer: GraphLayer) -> Layer:
    try:
        function = _Program(layer).run
    except InputError as error:
        raise InputError(f"layer {layer.name!r}: {error}") from error
    return Layer(
        name=layer.name,
        modules=layer.modules,
        module_type=layer.module,
        state=layer.state,
        mutated=layer.mutated,
        reads=layer.reads,
        writes=layer.writes,
        function=function,
        signature=layer.signature or layer.name,
        random=layer.random,
        # A client could claim another model's signature: its measurements never enter the cache.
        signature_is_complete=False,
    )


class _Program:
    """The validated operations of one layer.

    All operators are looked up and all arguments are checked before any operation runs.
    """

    def __init__(self, layer: GraphLayer) -> None:
        self._layer = layer
        known = {f"s{index}" for index in range(len(layer.state))} | {
            f"r{index}" for index in range(len(layer.reads))
        }
        self._steps: list[tuple[Callable[..., Any] | None, Operation]] = []
        for operation in layer.operations:
            self._steps.append((self._callable(operation), operation))
            for argument in (*operation.args, *operation.kwargs.values()):
                _check_refs(argument, known)
            known.add(operation.out)
        _check_refs([{"ref": name} for name in layer.results], known)
        self._last = self._last_uses()

    @staticmethod
    def _callable(operation: Operation) -> Callable[..., Any] | None:
        """Return the function that an operation calls; None at the border of a region."""
        if operation.op == ENTER:
            _region(operation)
            return None
        # pinned host memory, which no limit covers
        if operation.kwargs.get("pin_memory"):
            raise InputError(
                f"operator {operation.op[:100]!r} would pin memory, which a graph from elsewhere "
                "may not"
            )
        return None if operation.op == LEAVE else find(operation.op)

    def _last_uses(self) -> list[list[str]]:
        """Return for each operation the results with no later use, to be freed after it.

        Tensors are thus freed as early as in the model.
        """
        needed = set(self._layer.results)
        last: list[list[str]] = []
        for operation in reversed(self._layer.operations):
            used: set[str] = set()
            for argument in (*operation.args, *operation.kwargs.values()):
                _gather_refs(argument, used)
            used.add(operation.out)
            last.append(sorted(used - needed))
            needed |= used
        return last[::-1]

    def run(
        self, device: torch.device, state: Sequence[Tensor], reads: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Compute the layer's writes, see ``LayerFunction``."""
        known: dict[str, Any] = {f"s{index}": tensor for index, tensor in enumerate(state)}
        known |= {f"r{index}": read for index, read in enumerate(reads)}
        with Regions("device") as regions:
            for (call, operation), done in zip(self._steps, self._last, strict=True):
                if call is not None:
                    args = [_bound(argument, known, device) for argument in operation.args]
                    kwargs = {
                        name: _bound(argument, known, device)
                        for name, argument in operation.kwargs.items()
                    }
                    known[operation.out] = call(*args, **kwargs)
                    del args, kwargs
                elif operation.op == ENTER:
                    enter_region(regions, device, *_region(operation))
                else:
                    leave_region(regions)
                # free results after their last use, as the model would
                for name in done:
                    known.pop(name, None)
        return tuple(known[name] for name in self._layer.results)


def _region(operation: Operation) -> tuple[Any, ...]:
    """Return the region (grad mode or autocast) that an operation opens.

    Raises:
        InputError: if the arguments do not describe a region.
    """
    kind, *rest = operation.args or ("",)
    if kind == "grad" and len(rest) == 1 and isinstance(rest[0], bool):
        return ("grad", rest[0])
    if kind == "autocast" and len(rest) == 4:
        where, dtype, enabled, cache = rest
        fine = (
            where in ("cpu", "cuda", "device", "meta")
            and isinstance(enabled, bool)
            and cache in (None, True, False)
        )
        if fine and (
            dtype is None
            or dtype in ({"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "float32"})
        ):
            return ("autocast", "device", dtype and getattr(torch, dtype["dtype"]), enabled, cache)
    raise InputError(f"{str(operation.args)[:100]} is not a region that can be opened")


def _check_refs(argument: Any, known: set[str]) -> None:
    used: set[str] = set()
    _gather_refs(argument, used)
    for name in used - known:
        raise InputError(f"{name[:80]!r} is read before it is made")


def _gather_refs(argument: Any, found: set[str]) -> None:
    if isinstance(argument, list | tuple):
        for item in argument:
            _gather_refs(item, found)
    elif isinstance(argument, dict) and "ref" in argument:
        found.add(argument["ref"])


def _bound(argument: Any, known: dict[str, Any], device: torch.device) -> Any:
    """Return an argument in the form that the operator takes."""
    if isinstance(argument, list | tuple):
        return [_bound(item, known, device) for item in argument]
    if not isinstance(argument, dict):
        return argument
    # The schema has refused all other dictionaries.
    ((tag, content),) = argument.items()
    if tag == "ref":
        return known[content]
    if tag == "device":
        return device if content is True else torch.device("cpu")
    if tag == "float":
        return float(content)
    if tag == "complex":
        return complex(*content)
    if tag == "layout":
        return torch.strided
    names = MEMORY_FORMATS if tag == "memory_format" else DTYPES
    if content not in names:
        raise InputError(f"{tag} {content!r} is not known; give one of {', '.join(names)}")
    return getattr(torch, content)
