"""torch.export, as Placer uses it: one flat graph of ATen operations over the user's own
parameters.

    module, example inputs  ->  Exported(nodes with module stacks, structure of inputs and outputs)

Regions that export nests (``torch.no_grad()``, ``torch.autocast``) are laid flat again and every
node is told in which it stands, so that a layer border may pass through a region.
"""

from __future__ import annotations

import math
import operator
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

from placer import devices
from placer.capture.batch_dims.batch_layout import DEFAULT, Parameters, layout_of_inputs
from placer.capture.batch_dims.batch_symbols import Dims, batch_symbols
from placer.capture.export import checkpoints, nested_ops
from placer.capture.export.inlining import inline_regions
from placer.capture.export.module_names import CalledNames
from placer.capture.export.op_effects import has_effect
from placer.capture.export.subclass_weights import define_functions, refuse_weights
from placer.capture.export.trace_session import (
    GradientMode,
    HiddenGradientMode,
    OneDevice,
    Patience,
    custom_functions,
)
from placer.capture.export.tracing_environment import capture_device, example, traceable
from placer.capture.export.tracing_lock import alone
from placer.capture.fingerprint import differs_later
from placer.capture.grouping import storage_roots, written
from placer.capture.python_state import attribute_reads, host_rng
from placer.capture.python_state.global_variables import Variables, only_read
from placer.capture.python_state.module_hooks import refuse_hooks
from placer.capture.python_state.module_side_effects import (
    Counted,
    KeptError,
    put_back,
    read_before_written,
)
from placer.capture.python_state.mutable_inputs import Left, left_in, written_inputs
from placer.capture.python_state.plain_tensors import PlainTensors, plain_names
from placer.capture.pytrees import Structure, flatten, flatten_inputs, parts_of_inputs
from placer.errors import CaptureError

_LIBRARIES = tuple(
    str(place) + os.sep for place in (Path(torch.__file__).parent, Path(__file__).parents[2])
)
"""Where code that is not the model's own lies."""

_Sizes: TypeAlias = dict[int, Any] | None
"""The dimensions of a tensor whose sizes a graph leaves open."""

PREFIX = "module."
"""The user's model is the attribute ``module`` of what is exported."""


@dataclass
class Exported:
    """A captured model.

    Attributes:
        module: the graph; its ``get_attr`` targets are the user's names behind ``PREFIX``, or
            constants.
        inputs: structure of ``(args, kwargs)``.
        outputs: structure of the result.
        device: the device that the graph was captured on; other devices take its place when a layer
            runs.
        batch_symbols: those of the batch size; none where it is fixed.
        batch_size: of the example.
        checkpoints: the modules that ran under ``torch.utils.checkpoint``.
        attributes: the modules and other objects, and names, of the attributes whose values the
            graph holds.
        looked_at: the plain tensors whose values Python code asked for, so that the graph holds
            what followed.
        left: what forward leaves in what it is given; None where that is nothing new.
        is_closed: whether more sizes were to be open and could not be, or not in time.
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
    looked_at: tuple[Tensor, ...] = ()
    left: Left | None = None
    is_closed: bool = False
    stops_gradients: bool = False

    @property
    def placeholders(self) -> list[fx.Node]:
        """One for each tensor of the inputs."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    def other_sizes(self, tensors: Sequence[Any]) -> list[set[int]]:
        """For each input the dimensions that are not of one size, here and in these tensors or by
        the graph itself.
        """
        return [
            _other_sizes(node.meta["val"], tensor)
            for node, tensor in zip(self.placeholders, tensors, strict=True)
        ]

    def covers(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph holds for inputs of these shapes and dtypes."""
        for node, tensor in zip(self.placeholders, tensors, strict=True):
            example = node.meta["val"]
            if example.dtype != tensor.dtype or example.dim() != tensor.dim():
                return False
            for expected, given in zip(example.shape, tensor.shape, strict=True):
                # torch has free sizes begin at 2
                if expected != given if isinstance(expected, int) else given < 2:
                    return False
        guards = getattr(self.module, "_guards_fn", None)
        try:
            if guards is not None:
                guards(*tensors)
        except (AssertionError, RuntimeError):
            return False
        return True


def _other_sizes(example: Any, tensor: Any) -> set[int]:
    if not isinstance(tensor, Tensor) or example.dim() != tensor.dim():
        return set()
    pairs = enumerate(zip(example.shape, tensor.shape, strict=True))
    return {dim for dim, (known, size) in pairs if not isinstance(known, int) or known != size}


class _Flat(nn.Module):
    """Takes and returns flat tensors, so that no container of the user's has to be registered with
    torch.

    What it learns is in sets: torch.export puts lists and dicts of a module back as they were.
    """

    def __init__(
        self,
        module: nn.Module,
        plain: PlainTensors,
        inputs: Structure,
        outputs: list[tuple[Structure, Left | None]],
        copied: set[int],
        patience: float,
    ) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._plain, self._inputs, self._outputs, self._copied = plain, inputs, outputs, copied
        self._patience = patience
        # now: while it is traced others stand in for its weights
        self._defines_functions = define_functions(module)
        self.custom: set[str] = set()
        self.hidden: set[str] = set()
        self.kept: set[str] = set()
        self.counted: set[Counted] = set()
        self.replaced: set[str] = set()

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        given = [
            tensor.clone() if place in self._copied else tensor
            for place, tensor in enumerate(tensors)
        ]
        args, kwargs = self._inputs.unflatten(given)
        one_device = OneDevice(tensors[0].device if tensors else None)
        mode = GradientMode()
        hidden = HiddenGradientMode(mode, self.hidden) if self._defines_functions else nullcontext()
        with (
            put_back(self.module) as left,
            self._plain,
            Patience(self._patience),
            mode,
            hidden,
            one_device,
        ):
            result = self.module(*args, **kwargs)
            leaves, structure = flatten(result, anew=parts_of_inputs(args, kwargs))
            left.write_buffers()
        made, in_inputs = left_in((args, kwargs), given, self._inputs, self._copied)
        self._outputs.append((structure, in_inputs))
        self.kept.update(left.tensors)
        self.counted.update(left.counted)
        self.replaced.update(left.replaced)
        self.custom.update(custom_functions(leaves) or mode.custom)
        return (*leaves, *made)


@alone
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
        dims: for each tensor in them the batch dimension, or None if it has none; by convention,
            without options, if None.
        free: for each tensor in them, the dimensions whose size is to be left open where the model
            allows it, as that of the batch always is.
        patience: for how many seconds the model may be traced with these dimensions open; longer,
            and they are not.

    Raises:
        CaptureError: torch.export refuses the model, or it has hooks whose side effects a graph
            would not run.
    """
    refuse_hooks(module)
    refuse_weights(module)
    tensors, inputs = flatten_inputs(args, kwargs)
    if dims is None:
        dims = layout_of_inputs((args, kwargs), tensors, inputs, DEFAULT, Parameters()).dims
    first, *others = _open_sizes(tensors, dims, free)
    if not any(free) or not others:
        return _exported(module, args, kwargs, dims, [first, *others])
    try:
        return _exported(module, args, kwargs, dims, [first], patience)
    except CaptureError:
        # early or late: where a size is a number the model may do what it cannot where it is open
        return replace(_exported(module, args, kwargs, dims, others), is_closed=True)


def _exported(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: Dims,
    open_sizes: Sequence[Sequence[_Sizes]],
    patience: float = math.inf,
) -> Exported:
    """A capture that leaves open the first of these sizes that torch.export allows."""
    tensors, inputs = flatten_inputs(args, kwargs)
    device, before = capture_device(module, tensors), Variables(module).read()
    traced = _traced(module, device, inputs, tensors, open_sizes, patience)
    # it may have been another thread that drew
    if traced.drawn and threading.active_count() > 1:
        traced = _traced(module, device, inputs, tensors, open_sizes, patience, among_threads=True)
    graph_module, counted = traced.module, traced.counted
    if traced.drawn:
        raise CaptureError(
            f"forward {' and '.join(traced.drawn)}, and a graph would keep what came of it"
        )
    if counted and differs_later(module, args, kwargs, counted):
        names = ", ".join(sorted({repr(one.name) for one in counted}))
        raise CaptureError(
            f"forward sets {names} and does something else in later calls, which a graph would not"
        )
    _refuse_generators(graph_module)
    _refuse_shapes_from_values(graph_module.graph)
    inline_regions(graph_module)
    if nested_ops.has_bodies(graph_module):
        traced.notes.read_all()
    _free_strides(graph_module.graph)
    graph_module.graph.eliminate_dead_code(is_impure_node=has_effect)
    symbols = batch_symbols(graph_module.graph, dims)
    checkpointed, read = tuple(traced.checkpointed), (*traced.notes.only_read(), *only_read(before))
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
        checkpoints=checkpointed,
        attributes=read,
        looked_at=traced.looked_at,
        left=traced.left,
        stops_gradients=traced.stops_gradients,
    )


class _Traced(NamedTuple):
    """A graph as torch.export makes it, and what was seen meanwhile.

    Attributes:
        module: the graph.
        outputs: structure of the result.
        left: what forward leaves in its inputs.
        looked_at: the plain tensors whose values Python code asked for.
        counted: the attributes that it sets.
        stops_gradients: whether the class of a weight stops gradients that the graph would let
            through.
        drawn: the host's generators that were drawn from, in words.
        checkpointed: the modules that run under checkpoints.
        notes: the attributes that were read and written.
    """

    module: fx.GraphModule
    outputs: Structure
    left: Left | None
    looked_at: tuple[Tensor, ...]
    counted: set[Counted]
    stops_gradients: bool
    drawn: list[str]
    checkpointed: list[str]
    notes: attribute_reads.Notes


def _traced(
    module: nn.Module,
    device: torch.device,
    inputs: Structure,
    tensors: Sequence[Any],
    open_sizes: Sequence[Sequence[_Sizes]],
    patience: float,
    among_threads: bool = False,
) -> _Traced:
    with (
        traceable(module, device),
        checkpoints.noticed(module) as checkpointed,
        attribute_reads.noted(module) as notes,
    ):
        examples = tuple(_distinct(example(tensor, device) for tensor in tensors))
        with host_rng.given_back(among_threads) as drawn:
            found = _export(module, device, inputs, tensors, examples, open_sizes, patience)
    return _Traced(*found, drawn, checkpointed, notes)


def _distinct(examples: Iterable[Any]) -> Iterator[Any]:
    """Each tensor once: of one that is given twice a graph would be made that takes the second for
    the first.

    And none a view, as a part of a batch is: torch allows no writes to one that was made without
    gradients. Nor one made in inference mode, which autograd refuses.
    """
    seen: set[int] = set()
    for item in examples:
        again = isinstance(item, Tensor) and (
            id(item) in seen or item._is_view() or item.is_inference()
        )
        seen.add(id(item))
        if not again:
            yield item
        else:
            copy = item.detach().clone()
            # a transform of torch.func allows no such call
            yield copy.requires_grad_() if item.requires_grad else copy


def _export(
    module: nn.Module,
    device: torch.device,
    inputs: Structure,
    tensors: Sequence[Any],
    examples: tuple[Any, ...],
    open_sizes: Sequence[Sequence[_Sizes]],
    patience: float,
) -> tuple[fx.GraphModule, Structure, Left | None, tuple[Tensor, ...], set[Counted], bool]:
    failure: Exception | None = None
    copied: set[int] = set()
    ways = list(open_sizes)
    while ways:
        structures: list[tuple[Structure, Left | None]] = []
        plain = PlainTensors(device)
        flat = _Flat(module, plain, inputs, structures, copied, patience)
        called = CalledNames(flat)
        try:
            # torch.export gives each module a copy of a list that two of them share
            with put_back(module), called.watched():
                program = torch.export.export(
                    flat, examples, strict=False, dynamic_shapes=(tuple(ways[0]),)
                )
        except Exception as error:
            # whatever the model's own code may raise while it is traced
            _release_frames(error)
            failure = failure or error
            # where no fixed shape would help
            ways = [] if "data-dependent" in str(error).lower() else ways[1:]
            continue
        finally:
            plain.put_back()
        hidden = bool(flat.hidden)
        if hidden and module.training:
            flat.custom.update(flat.hidden)
        if flat.custom:
            raise CaptureError(
                f"{', '.join(sorted(flat.custom))}: a graph would lose the backward pass that it defines"
            )
        if plain.untracked:
            raise CaptureError(
                f"forward computes with a tensor of shape {min(plain.untracked)} that requires a gradient and is not a "
                "parameter of the model; a graph would lose its gradient: register it as an nn.Parameter"
            )
        if flat.kept:
            raise KeptError(
                f"forward keeps a tensor in {', '.join(sorted(flat.kept))}, which a graph would not leave there"
            )
        graph_module = program.module()
        called.rename(graph_module.graph)
        written_to = written_inputs(graph_module.graph)
        _refuse_shared(tensors, written_to)
        # once more, on copies, whose values are then results
        if not written_to <= copied:
            copied = written_to
            continue
        read_before_written(graph_module.graph, {f"{PREFIX}{name}" for name in flat.replaced})
        plain.replace_aliases(graph_module)
        changed = _one_node_a_tensor(graph_module, module)
        if changed.intersection(plain.looked_at):
            raise CaptureError(
                "forward asks for the values of a tensor that it writes to, and a graph would keep the first ones"
            )
        return graph_module, *structures[-1], tuple(plain.looked_at.values()), flat.counted, hidden
    assert failure is not None
    raise CaptureError(_reason(failure)) from failure


def _release_frames(error: BaseException) -> None:
    """Let go of the local variables of the frames in which tracing failed.

    Some of them are guards of torch, which set what the dispatcher does in this thread until they
    are destroyed. Left to Python's garbage collector, they set it back in the middle of any later
    operation.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def _refuse_shared(tensors: Sequence[Any], written_to: set[int]) -> None:
    """Raise a CaptureError if forward writes to an input whose memory another one shares: a graph
    has copies.
    """
    places = [_memory(tensor) for tensor in tensors]
    if any(places.count(places[place]) > 1 for place in written_to if places[place] is not None):
        raise CaptureError(
            "forward writes to an input whose memory another input shares, which would not see it"
        )


def _one_node_a_tensor(graph_module: fx.GraphModule, module: nn.Module) -> set[int]:
    """Let a tensor that the model knows by several names be one node, so that writes by one name
    are seen by all.

    Returns:
        The identities of the tensors that the graph writes to.

    Raises:
        CaptureError: forward writes to a tensor that shares memory with another one. On another
            device each would have a copy of its own, and the write to the one would not be seen in
            the other.
    """
    first: dict[int, fx.Node] = {}
    sharing: dict[int, set[fx.Node]] = {}
    values: dict[fx.Node, Tensor] = {}
    graph = graph_module.graph
    for node in list(graph.nodes):
        value = operator.attrgetter(node.target)(graph_module) if node.op == "get_attr" else None
        if not isinstance(value, Tensor):
            continue
        values[node] = value
        if first.setdefault(id(value), node) is not node:
            node.replace_all_uses_with(first[id(value)])
            graph.erase_node(node)
        elif (memory := _memory(value)) is not None:
            sharing.setdefault(memory, set()).add(node)
    operations = [node for node in graph.nodes if node.op == "call_function"]
    roots = storage_roots(operations)
    changed = {
        root
        for node in operations
        for target in written(node)
        for root in roots.get(target, {target})
    }
    for nodes in sharing.values():
        if len(nodes) > 1 and not changed.isdisjoint(nodes):
            plain = plain_names(module)
            names = sorted(
                plain.get(id(values[node]), str(node.target).removeprefix(PREFIX)) for node in nodes
            )
            raise CaptureError(
                f"forward writes to memory that {', '.join(map(repr, names))} share; the copies of these on other "
                "devices would not see it"
            )
    return {id(values[node]) for node in changed if node in values}


def _memory(tensor: Any) -> int | None:
    """What tells the memory of a tensor from others'; None of what has none of its own: a sparse
    one, or no tensor.
    """
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return None
    return int(devices.unwrapped(tensor).untyped_storage()._cdata)


def _refuse_shapes_from_values(graph: fx.Graph) -> None:
    """Raise a CaptureError if a result is as large as the values of tensors say: nothing could be
    laid out before.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt) and not size.node.has_hint():
                raise CaptureError(
                    f"the shape that {node.target} gives depends on values of tensors"
                )


def _refuse_generators(module: fx.GraphModule) -> None:
    """Raise a CaptureError if random numbers come from a generator of the model's own: a graph
    would not seed it.
    """
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(
            operator.attrgetter(node.target)(module), torch.Generator
        ):
            raise CaptureError(
                "forward draws from a torch.Generator of its own, which a graph would not seed"
            )


def _open_sizes(
    tensors: Sequence[Any], dims: Dims, free: Sequence[Collection[int]]
) -> list[list[_Sizes]]:
    """Which sizes a graph is to leave open, for each tensor; then what to try where the model
    allows no such graph.
    """
    each = zip(tensors, dims, strict=True)
    batched = [
        set[int]() if dim is None or tensor.shape[dim] < 2 else {dim} for tensor, dim in each
    ]
    ways = [batched, [set[int]() for _ in tensors]]
    if free:
        ways.insert(0, [{*dims, *more} for dims, more in zip(batched, free, strict=True)])
    different = [way for number, way in enumerate(ways) if way not in ways[:number]]
    return [
        [dict.fromkeys(sorted(dims), torch.export.Dim.AUTO) or None for dims in way]
        for way in different
    ]


def _reason(error: Exception) -> str:
    """The first line of what torch.export says, and the line of the model's code that it says it
    of.
    """
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


def _free_strides(graph: fx.Graph) -> None:
    """Let views become reshapes: an operation may lay its result out otherwise on the device where
    it will run.

    Where the strides are those of the capture, a reshape is the view.
    """
    for node in graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
