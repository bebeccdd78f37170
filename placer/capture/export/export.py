"""The capture by torch.export: one flat graph of ATen operations over the user's own parameters.

    module, example inputs
       1. refuse what export would lose: hooks, tensors attached to weights   (export)
       2. trace with example inputs, and watch the code             (_run_export, _FlatModel)
       3. refuse what a graph would not repeat: random numbers ...  (_capture)
       4. inline torch.no_grad() and torch.autocast; free strides   (_capture)
    ->  Exported(graph whose nodes know their modules and regions, structure of inputs and results)

Each node notes the regions around it, so that a layer border may lie inside a region.
"""

from __future__ import annotations

import math
import os
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn

from placer.capture.batch_dims.batch_layout import Parameters
from placer.capture.batch_dims.batch_symbols import Dims, batch_symbols
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS, call_layout
from placer.capture.export import checkpoints, nested_ops
from placer.capture.export.inlining import inline_regions
from placer.capture.export.module_names import CalledNames
from placer.capture.export.op_effects import has_effect
from placer.capture.export.subclass_weights import refuse_weights, weights_override_functions
from placer.capture.export.traced_graph import (
    PREFIX,
    merge_tied_nodes,
    refuse_generators,
    refuse_shapes_from_values,
    refuse_shared_inputs,
    views_to_reshapes,
)
from placer.capture.export.tracing_environment import (
    GradientMode,
    HiddenGradientMode,
    OneDevice,
    TraceTimeout,
    capture_device,
    custom_functions,
    trace_input,
    tracing_environment,
    with_tracing_lock,
)
from placer.capture.fingerprint import differs_later
from placer.capture.python_state import attribute_reads, host_rng
from placer.capture.python_state.global_variables import Variables, unchanged_places
from placer.capture.python_state.module_hooks import refuse_hooks
from placer.capture.python_state.module_side_effects import (
    KeptError,
    SetAttribute,
    read_before_written,
    restored_modules,
)
from placer.capture.python_state.mutable_inputs import InputChanges, input_changes, written_inputs
from placer.capture.python_state.plain_tensors import PlainTensors
from placer.capture.pytrees import (
    Structure,
    flatten,
    flatten_inputs,
    lazy_part,
    parts_of_inputs,
)
from placer.errors import CaptureError

_LIBRARIES = tuple(
    str(place) + os.sep for place in (Path(torch.__file__).parent, Path(__file__).parents[2])
)
"""Folders of code that is not the model's own: torch and Placer."""

_OpenSizes: TypeAlias = dict[int, Any] | None
"""The sizes of a tensor that a graph leaves open: dimension to torch.export.Dim; None for none."""


@dataclass
class Exported:
    """A captured model.

    Attributes:
        module: the graph; its ``get_attr`` targets are the user's names behind ``PREFIX``, or
            constants.
        inputs: structure of ``(args, kwargs)``.
        outputs: structure of the result.
        device: the device of the capture; the device of a layer replaces it when the layer runs.
        batch_symbols: symbols of the batch size; empty if it is fixed.
        batch_size: number of samples in the example.
        checkpoints: paths of the modules that ran under ``torch.utils.checkpoint``.
        attributes: the holders (modules and other objects) and names of attributes whose values are
            constants of the graph.
        values_read: the plain tensors whose values Python code read; they are constants, too.
        input_changes: what forward leaves in its inputs; None if it leaves nothing new.
        has_fixed_sizes: whether the additional sizes could not be left open in the time limit.
        stops_gradients: whether the class of a weight stops gradients that the graph would let
            through.
    """

    module: fx.GraphModule
    inputs: Structure
    outputs: Structure
    device: torch.device
    batch_symbols: frozenset[Any]
    batch_size: int
    checkpoints: tuple[str, ...] = ()
    attributes: tuple[tuple[Any, str], ...] = ()
    values_read: tuple[Tensor, ...] = ()
    input_changes: InputChanges | None = None
    has_fixed_sizes: bool = False
    stops_gradients: bool = False

    @property
    def placeholders(self) -> list[fx.Node]:
        """Return the input nodes, one for each tensor of the inputs."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    def varying_dims(self, tensors: Sequence[Any]) -> list[set[int]]:
        """Return for each input the dimensions whose size varies.

        A size varies if the graph leaves it open or if these tensors have another size than the
        example.

        Args:
            tensors: one for each input.
        """
        return [
            _varying_dims(node.meta["val"], tensor)
            for node, tensor in zip(self.placeholders, tensors, strict=True)
        ]

    def covers(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the graph is valid for inputs of these shapes and dtypes.

        Args:
            tensors: one for each input.
        """
        for node, tensor in zip(self.placeholders, tensors, strict=True):
            example = node.meta["val"]
            if example.dtype != tensor.dtype or example.dim() != tensor.dim():
                return False
            for expected, given in zip(example.shape, tensor.shape, strict=True):
                # torch.export specialises the sizes 0 and 1, so an open size begins at 2
                if expected != given if isinstance(expected, int) else given < 2:
                    return False
        # Conditions on open sizes that torch found while it traced, such as "divisible by 4".
        guards = getattr(self.module, "_guards_fn", None)
        try:
            if guards is not None:
                guards(*tensors)
        except (AssertionError, RuntimeError):
            return False
        return True


def _varying_dims(example: Any, tensor: Any) -> set[int]:
    if not isinstance(tensor, Tensor) or example.dim() != tensor.dim():
        return set()
    pairs = enumerate(zip(example.shape, tensor.shape, strict=True))
    return {dim for dim, (known, size) in pairs if not isinstance(known, int) or known != size}


class _FlatModel(nn.Module):
    """The model with flat tensors as inputs and results.

    So torch.export need not know the user's containers. What is learned while tracing goes into
    sets, because torch.export restores the lists and dicts of a module afterwards.

    Args:
        module: the user's model.
        plain: records the use of plain tensors.
        inputs: structure of ``(args, kwargs)``.
        outputs: receives the structure of each traced result, and what forward left in its inputs.
        copied: positions of inputs that forward writes to, which are cloned first.
        patience: maximum seconds for the trace.

    Attributes:
        custom: descriptions of code whose backward pass the graph would lose.
        hidden: descriptions of gradient modes inside the class of a weight.
        kept: descriptions of attributes that keep a tensor of the pass.
        set_attributes: attributes that forward sets.
        replaced: names of buffers that forward replaces.
    """

    def __init__(
        self,
        module: nn.Module,
        plain: PlainTensors,
        inputs: Structure,
        outputs: list[tuple[Structure, InputChanges | None]],
        copied: set[int],
        patience: float,
    ) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._plain, self._inputs, self._outputs, self._copied = plain, inputs, outputs, copied
        self._patience = patience
        # Decided now: during the trace, plain tensors replace the weights.
        self._overrides_functions = weights_override_functions(module)
        self.custom: set[str] = set()
        self.hidden: set[str] = set()
        self.kept: set[str] = set()
        self.set_attributes: set[SetAttribute] = set()
        self.replaced: set[str] = set()

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        # Writes to a clone become a result; writes to the traced input itself would be lost.
        given = [
            tensor.clone() if place in self._copied else tensor
            for place, tensor in enumerate(tensors)
        ]
        args, kwargs = self._inputs.unflatten(given)
        one_device = OneDevice(tensors[0].device if tensors else None)
        gradients = GradientMode()
        hidden = (
            HiddenGradientMode(gradients, self.hidden)
            if self._overrides_functions
            else nullcontext()
        )
        with (
            restored_modules(self.module) as effects,
            self._plain,
            TraceTimeout(self._patience),
            gradients,
            hidden,
            one_device,
        ):
            # Inside the modes; they see nothing of the bookkeeping below.
            result = self.module(*args, **kwargs)
            if lazy := lazy_part(result):
                raise CaptureError(f"forward returns a {lazy}, whose code runs after it")
            leaves, structure = flatten(result, copied=parts_of_inputs(args, kwargs))
            effects.write_buffers()
        made, changes = input_changes((args, kwargs), given, self._inputs, self._copied)
        # Last one wins: torch.export may call forward more than once.
        self._outputs.append((structure, changes))
        self.kept.update(effects.tensors)
        self.set_attributes.update(effects.set_attributes)
        self.replaced.update(effects.replaced)
        self.custom.update(custom_functions(leaves) or gradients.custom)
        # The tensors that forward left in its inputs follow the results.
        return (*leaves, *made)


@with_tracing_lock
def export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: Dims | None = None,
    free: Sequence[Collection[int]] = (),
    patience: float = math.inf,
) -> Exported:
    """Capture the module in its present mode (train or eval).

    Args:
        module: any module, its state on any devices.
        args: example positional arguments.
        kwargs: example keyword arguments.
        dims: for each tensor in them the batch dimension, or None without one. By default dimension
            0, by the convention for models without options.
        free: for each tensor in them, additional dimensions whose size to leave open if the model
            allows it.
        patience: maximum seconds to trace with the additional dimensions open; afterwards they are
            fixed.

    Returns:
        The captured model.

    Raises:
        CaptureError: torch.export refuses the model, or a graph would lose an effect of its code.
    """
    refuse_hooks(module)
    refuse_weights(module)
    tensors, inputs = flatten_inputs(args, kwargs)
    if dims is None:
        dims = call_layout((args, kwargs), tensors, inputs, DEFAULT_OPTIONS, Parameters()).dims
    first, *others = _sizes_to_try(tensors, dims, free)
    if not any(free) or not others:
        return _capture(module, args, kwargs, dims, [first, *others])
    try:
        return _capture(module, args, kwargs, dims, [first], patience)
    except CaptureError:
        # Whether the error came early or late: code may fail with an open size and work with a
        # number.
        return replace(_capture(module, args, kwargs, dims, others), has_fixed_sizes=True)


def _capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: Dims,
    open_sizes: Sequence[Sequence[_OpenSizes]],
    patience: float = math.inf,
) -> Exported:
    """Capture with the first of these sets of open sizes that torch.export allows."""
    tensors, inputs = flatten_inputs(args, kwargs)
    device, before = capture_device(module, tensors), Variables(module).read()
    traced = _trace(module, device, inputs, tensors, open_sizes, patience)
    # Another thread may have drawn the numbers: trace again and watch this thread alone.
    if traced.drawn and threading.active_count() > 1:
        traced = _trace(module, device, inputs, tensors, open_sizes, patience, among_threads=True)
    # What the trace saw and a graph would not repeat.
    graph_module, attributes_set = traced.module, traced.set_attributes
    if traced.drawn:
        raise CaptureError(
            f"forward {' and '.join(traced.drawn)}, and a graph would repeat the outcome"
        )
    if attributes_set and differs_later(module, args, kwargs, attributes_set):
        names = ", ".join(sorted({repr(one.name) for one in attributes_set}))
        raise CaptureError(
            f"forward sets {names} and behaves differently in later calls, which a graph would not"
        )
    # What the graph itself contains and a layer could not run.
    refuse_generators(graph_module)
    refuse_shapes_from_values(graph_module.graph)
    inline_regions(graph_module)
    # Code inside a nested graph reads attributes unseen, so all of them count as read.
    if nested_ops.has_nested_graphs(graph_module):
        traced.notes.count_all_as_read()
    views_to_reshapes(graph_module.graph)
    graph_module.graph.eliminate_dead_code(is_impure_node=has_effect)
    symbols = batch_symbols(graph_module.graph, dims)
    # Without a batch dimension anywhere, the example counts as one sample.
    batch = next(
        (int(one.shape[dim]) for one, dim in zip(tensors, dims, strict=True) if dim is not None), 1
    )
    return Exported(
        module=graph_module,
        inputs=inputs,
        outputs=traced.outputs,
        device=device,
        batch_symbols=symbols,
        batch_size=batch,
        checkpoints=tuple(traced.checkpointed),
        attributes=(*traced.notes.only_read(), *unchanged_places(before)),
        values_read=traced.values_read,
        input_changes=traced.input_changes,
        stops_gradients=traced.stops_gradients,
    )


class _Trace(NamedTuple):
    """A graph as torch.export produces it, and what was observed during the trace.

    Attributes:
        module: the graph.
        outputs: structure of the result.
        input_changes: what forward leaves in its inputs.
        values_read: the plain tensors whose values Python code read.
        set_attributes: the attributes that forward sets.
        stops_gradients: whether the class of a weight stops gradients that the graph would let
            through.
        drawn: descriptions of the host's generators that the code drew from.
        checkpointed: paths of the modules that run under checkpoints.
        notes: the attributes that were read and written.
    """

    module: fx.GraphModule
    outputs: Structure
    input_changes: InputChanges | None
    values_read: tuple[Tensor, ...]
    set_attributes: set[SetAttribute]
    stops_gradients: bool
    drawn: list[str]
    checkpointed: list[str]
    notes: attribute_reads.AttributeUse


def _trace(
    module: nn.Module,
    device: torch.device,
    inputs: Structure,
    tensors: Sequence[Any],
    open_sizes: Sequence[Sequence[_OpenSizes]],
    patience: float,
    among_threads: bool = False,
) -> _Trace:
    with (
        tracing_environment(module, device),
        checkpoints.recorded_checkpoints(module) as checkpointed,
        attribute_reads.recorded_attributes(module) as notes,
    ):
        examples = tuple(_distinct_inputs(trace_input(tensor, device) for tensor in tensors))
        with host_rng.restored_generators(among_threads) as drawn:
            found = _run_export(module, device, inputs, tensors, examples, open_sizes, patience)
    return _Trace(*found, drawn, checkpointed, notes)


def _distinct_inputs(examples: Iterable[Any]) -> Iterator[Any]:
    """Yield each tensor once, and no views or inference tensors.

    torch.export would take two inputs that are the same tensor for one input. torch refuses writes
    to a view that was made without gradients, such as a slice of a batch. Autograd refuses tensors
    of inference mode.
    """
    seen: set[int] = set()
    for item in examples:
        needs_copy = isinstance(item, Tensor) and (
            id(item) in seen or item._is_view() or item.is_inference()
        )
        seen.add(id(item))
        if not needs_copy:
            yield item
        else:
            copy = item.detach().clone()
            # Only for True: a transform of torch.func does not allow the call with False.
            yield copy.requires_grad_() if item.requires_grad else copy


def _run_export(
    module: nn.Module,
    device: torch.device,
    inputs: Structure,
    tensors: Sequence[Any],
    examples: tuple[Any, ...],
    open_sizes: Sequence[Sequence[_OpenSizes]],
    patience: float,
) -> tuple[
    fx.GraphModule, Structure, InputChanges | None, tuple[Tensor, ...], set[SetAttribute], bool
]:
    """Trace the model until torch.export succeeds.

    Each pass of the loop is one trace. It is repeated with fewer open sizes if torch.export fails,
    and with copies of the inputs that forward writes to.
    """
    failure: Exception | None = None
    copied: set[int] = set()
    to_try = list(open_sizes)
    while to_try:
        structures: list[tuple[Structure, InputChanges | None]] = []
        plain = PlainTensors(device)
        flat = _FlatModel(module, plain, inputs, structures, copied, patience)
        called = CalledNames(flat)
        try:
            # torch.export gives each of two modules that share a list its own copy; put that back
            # too.
            with restored_modules(module), called.watched():
                program = torch.export.export(
                    flat, examples, strict=False, dynamic_shapes=(tuple(to_try[0]),)
                )
        except Exception as error:
            # The model's code may raise anything while it is traced.
            _clear_frames(error)
            # The first error concerns the wanted sizes, so it is the one to report.
            failure = failure or error
            # The model asks for a tensor's value, so fixed sizes would not help.
            to_try = [] if "data-dependent" in str(error).lower() else to_try[1:]
            continue
        finally:
            plain.restore()
        _refuse_lost_effects(flat, plain)
        graph_module = program.module()
        called.rename(graph_module.graph)
        written_to = written_inputs(graph_module.graph)
        refuse_shared_inputs(tensors, written_to)
        # Trace again on copies, so that the written values are results.
        if not written_to <= copied:
            copied = written_to
            continue
        read_before_written(graph_module.graph, {f"{PREFIX}{name}" for name in flat.replaced})
        plain.replace_aliases(graph_module)
        changed = merge_tied_nodes(graph_module, module)
        if changed.intersection(plain.values_read):
            raise CaptureError(
                "forward reads the values of a tensor that it also writes to, and a graph would "
                "keep the first values"
            )
        return (
            graph_module,
            *structures[-1],
            tuple(plain.values_read.values()),
            flat.set_attributes,
            bool(flat.hidden),
        )
    assert failure is not None
    raise CaptureError(_failure_reason(failure)) from failure


def _refuse_lost_effects(flat: _FlatModel, plain: PlainTensors) -> None:
    """Raise a CaptureError if the traced code has effects that the graph lacks."""
    # In evaluation mode, the caller checks ``stops_gradients`` if it wants gradients.
    custom = flat.custom | (flat.hidden if flat.training else set())
    if custom:
        raise CaptureError(f"{', '.join(sorted(custom))}: a graph would lose its backward pass")
    if plain.untracked:
        raise CaptureError(
            f"forward computes with a tensor of shape {min(plain.untracked)} that requires a "
            "gradient and is not a parameter of the model; a graph would lose its gradient: "
            "register it as an nn.Parameter"
        )
    if flat.kept:
        raise KeptError(
            f"forward keeps a tensor in {', '.join(sorted(flat.kept))}, where a graph would "
            "not leave it"
        )


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables of the frames in which tracing failed.

    Some of them are guards of torch that change the dispatcher's state in this thread until they
    are destroyed. Python's garbage collector would destroy them in the middle of a later operation.
    """
    # An exception's cause and context hold frames too.
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def _sizes_to_try(
    tensors: Sequence[Any], dims: Dims, free: Sequence[Collection[int]]
) -> list[list[_OpenSizes]]:
    """Return which sizes to leave open for each tensor: the wish first, then the alternatives.

    1. the batch and the additional dimensions     (only if ``free`` is given)
    2. the batch
    3. nothing: a graph for this batch size only
    """
    each = zip(tensors, dims, strict=True)
    # torch.export makes sizes 0 and 1 constants, so such a dimension cannot be left open.
    batched = [
        set[int]() if dim is None or tensor.shape[dim] < 2 else {dim} for tensor, dim in each
    ]
    ways = [batched, [set[int]() for _ in tensors]]
    if free:
        ways.insert(0, [{*dims, *more} for dims, more in zip(batched, free, strict=True)])
    different = [way for number, way in enumerate(ways) if way not in ways[:number]]
    # With AUTO, a size that the model itself fixes becomes a constant instead of an error.
    return [
        [dict.fromkeys(sorted(dims), torch.export.Dim.AUTO) or None for dims in way]
        for way in different
    ]


def _failure_reason(error: Exception) -> str:
    """Return the first line of torch.export's message and the model's line that it concerns."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_LIBRARIES)
    ]
    at = f" (at {own[-1].filename}:{own[-1].lineno}: {own[-1].line})" if own else ""
    return (
        f"torch.export: {type(error).__name__}: {lines[0] if lines else ''}"[: 1000 - len(at)] + at
    )
