"""The captures of one model, created on demand for each mode and uncovered shape.

A capture is delayed: calls use hooks until they have cost as much time as a capture would. So a few
calls need no capture, and many calls take at most twice the necessary time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from placer.capture import autocast
from placer.capture.batch_dims.batch_layout import BatchLayout, Parameters, Part
from placer.capture.batch_dims.batch_symbols import inputs_of_other_lengths
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS, call_layout
from placer.capture.capture import layer_graph
from placer.capture.export.export import Exported, export
from placer.capture.granularity import Granularity
from placer.capture.input_forms import refuse_nested
from placer.capture.layers import LayerGraph
from placer.capture.python_state.module_hooks import refuse_hooks
from placer.capture.python_state.module_side_effects import KeptError
from placer.capture.pytrees import Structure
from placer.errors import CaptureError
from placer.executor.state.model_fingerprint import Attributes, Census
from placer.schema import BatchOptions
from placer.utils.bounded_dict import BoundedDict
from placer.utils.user_warnings import warn

_FEW_CALLS = 10
_OFTEN = 3
_KEPT_CAPTURES = 200
# Maximum time of a capture with symbolic sizes, in multiples of the first capture's time, which
# counts as at least one second.
_PATIENCE = 5.0
# Consecutive calls that may each capture the model.
_IN_VAIN = 4
# Estimated capture time per module in seconds, before the first capture.
_CAPTURE_S = 0.008


@dataclass(eq=False)
class Capture:
    """A capture, its duration, and the layer graphs derived from it by granularity."""

    exported: Exported
    seconds: float = 0.0
    graphs: dict[Hashable, LayerGraph] = field(default_factory=dict)


@dataclass
class _Calls:
    """Calls of one kind: first shapes, dimensions that varied, and the total time in seconds."""

    first: list[torch.Size | None]
    free: list[set[int]]
    seconds: float = 0.0

    def look(self, tensors: Sequence[Any]) -> None:
        """Record the sizes of another call."""
        for shape, dims, tensor in zip(self.first, self.free, tensors, strict=True):
            if shape is not None:
                dims |= {
                    dim
                    for dim, (was, now) in enumerate(zip(shape, tensor.shape, strict=True))
                    if was != now
                }


@dataclass
class Waiting:
    """The calls of one model that wait for a capture.

    A kind comprises all calls that differ only in tensor sizes. Where each call would need a
    capture of its own, it comprises calls of equal sizes.
    """

    _kinds: BoundedDict[Hashable, _Calls] = field(default_factory=BoundedDict)
    _now: _Calls | None = None

    def waits(self, kind: Hashable, tensors: Sequence[Any], capture_s: float) -> bool:
        """Return whether a call should use hooks.

        Args:
            kind: of the call.
            tensors: the flattened inputs; their numbers of dimensions are equal in all calls of a
                kind.
            capture_s: the time of a capture in seconds.
        """
        if kind not in self._kinds:
            shapes = [tensor.shape if isinstance(tensor, Tensor) else None for tensor in tensors]
            self._kinds[kind] = _Calls(shapes, [set() for _ in tensors])
        calls = self._kinds[kind]
        calls.look(tensors)
        self._now = calls if calls.seconds < capture_s else None
        if self._now is None:
            # if the capture does not cover later calls, they wait again
            calls.seconds = 0.0
        return self._now is not None

    def note(self, seconds: float) -> None:
        """Record the time of a call through hooks."""
        if self._now is not None:
            self._now.seconds += seconds
            self._now = None

    def free(self, kind: Hashable, tensors: Sequence[Any]) -> list[set[int]]:
        """Return for each input the dimensions that had several sizes."""
        calls = self._kinds.get(kind)
        return [set() for _ in tensors] if calls is None else calls.free

    def forget(self) -> None:
        """Discard all records, since the model has changed."""
        self._kinds.clear()
        self._now = None


@dataclass
class ModelCaptures:
    """The captures and refusals of one model.

    Attributes:
        module: the user's model.
        compare: a function from a new capture and its inputs to the first difference between graph
            and model; empty without one.
        refused: by mode, why torch.export refused it or how the graph differs; these modes use
            hooks.
        times_forgotten: how often all captures were discarded.
        waiting: the calls that use hooks instead of a capture of their own.
    """

    module: nn.Module
    compare: Callable[[Capture, Part], str] = lambda capture, part: ""
    refused: dict[Hashable, str] = field(default_factory=dict)
    times_forgotten: int = 0
    waiting: Waiting = field(default_factory=Waiting)
    _captures: dict[Hashable, list[Capture]] = field(default_factory=dict)
    # A key-value cache that grows with every call has a new shape each time.
    _seen: BoundedDict[Hashable, Capture] = field(default_factory=BoundedDict)
    _census: Census | None = None
    _attributes: Attributes = field(default_factory=Attributes)
    _looks: int = 0
    _changes: int = 0
    _modes: dict[Hashable, int] = field(default_factory=dict)
    # whether a refused mode may be captured a second time
    _second: dict[Hashable, bool] = field(default_factory=dict)
    _whole: BoundedDict[Hashable, frozenset[int]] = field(default_factory=BoundedDict)
    _layouts: BoundedDict[Hashable, BatchLayout] = field(default_factory=BoundedDict)
    _made: int = 0
    _in_vain: int = 0
    _capture_s: float = 0.0
    _has_warned: bool = False

    def mode(self) -> Hashable:
        """Return the conditions of a graph besides shapes.

        These are the modules in training mode, hooks, and the caller's autocast state.
        """
        return self._mode_in(self._look())

    def _mode_in(self, census: Census) -> Hashable:
        # a number instead of the modes of hundreds of modules, which would be hashed per
        # micro-batch
        return autocast.current_dtypes(), self._modes.setdefault(census.modes, len(self._modes))

    def state(self) -> list[Tensor]:
        """Return the model's parameters and buffers as of the last inspection."""
        return (self._census or self._look()).state

    def captures(
        self,
        parts: Sequence[Part],
        needed: bool = True,
        waits: bool = False,
        known_only: bool = False,
    ) -> list[Capture] | None:
        """Return the captures that cover a call's micro-batches, after one inspection of the model.

        Args:
            parts: the inputs of each micro-batch.
            needed: whether to capture in any case; otherwise not if consecutive calls would each
                need their own capture.
            waits: whether to delay a capture until calls of the kind have spent as much time on
                hooks.
            known_only: whether to make no capture unless it is needed.

        Returns:
            The capture of each micro-batch; None if the model should run through hooks.
        """
        mode, before = self.mode(), self._made
        found = []
        for part in parts:
            capture = self._capture(mode, part, needed, waits, known_only)
            if capture is None:
                return None
            found.append(capture)
        self._in_vain = self._in_vain + 1 if self._made > before else 0
        return found

    def stops_gradients(self, captures: Sequence[Capture], parts: Sequence[Part]) -> bool:
        """Return whether the model stops gradients that its captures would let through.

        Args:
            captures: of the micro-batches.
            parts: the inputs of each micro-batch.
        """
        if not (
            torch.is_grad_enabled()
            and any(capture.exported.stops_gradients for capture in captures)
        ):
            return False
        given = (tensor for part in parts for tensor in part.tensors if isinstance(tensor, Tensor))
        return any(item.requires_grad for item in (*self.module.parameters(), *given))

    def layout(
        self, call: Any, tensors: Sequence[Any], inputs: Structure, options: BatchOptions
    ) -> BatchLayout:
        """Return the batch dimensions of a call's inputs, from sizes and options.

        Args:
            call: positional and keyword arguments.
            tensors: the flattened inputs.
            inputs: their structure.
            options: the declared batch layout.

        Raises:
            InputError: an input is a nested tensor without sizes.
        """
        refuse_nested(tensors)
        key = (
            inputs.key,
            shapes(tensors),
            None if options is DEFAULT_OPTIONS else options.model_dump_json(),
        )
        if key not in self._layouts:
            self._layouts[key] = call_layout(call, tensors, inputs, options, self.parameters)
        return self._layouts[key]

    @cached_property
    def parameters(self) -> Parameters:
        """Return the signature of the model's forward method."""
        return Parameters.from_module(self.module)

    def narrowed(
        self, layout: BatchLayout, tensors: Sequence[Any], inputs: Structure, needed: bool = True
    ) -> BatchLayout:
        """Return the layout without tensors that only happen to have the batch's size.

        A mask or a table, for example. A capture of the whole call shows which ones; without a
        capture, the layout stays.

        Args:
            layout: of the call.
            tensors: the flattened inputs.
            inputs: their structure.
            needed: as for ``captures``.
        """
        if len(layout.undeclared()) < 2 or layout.lists:
            return layout
        key = (inputs.key, shapes(tensors), layout)
        if key not in self._whole:
            # constants created in inference mode could not be used in training later
            with torch.inference_mode(False):
                found = self.captures([Part(list(tensors), inputs, layout.dims)], needed)
            if found is None:
                return layout
            self._whole[key] = inputs_of_other_lengths(found[0].exported.module.graph, layout.dims)
        return layout.without(self._whole[key].intersection(layout.undeclared()))

    def captures_before(self, parts: Sequence[Part]) -> list[Capture] | None:
        """Return the result of ``captures`` if it needs no new inspection or capture; else None.

        Args:
            parts: the inputs of each micro-batch.
        """
        if self._census is None or not self._census.is_quick:
            return None
        mode = self._mode_in(self._census)
        found = [self._seen.get(_key(mode, part)) for part in parts]
        return None if None in found else found  # type: ignore[return-value]

    def is_unchanged(self) -> bool:
        """Return whether the model is unchanged since its last inspection, and count this one."""
        if self._census is None or not (self._census.holds() and self._attributes.hold()):
            return False
        self._looks += 1
        self._in_vain = 0
        return True

    def holds(self, capture: Capture) -> bool:
        """Return whether a capture still describes the model."""
        return any(capture in known for known in self._captures.values())

    def _capture(
        self, mode: Hashable, part: Part, needed: bool, waits: bool, known_only: bool
    ) -> Capture | None:
        key, (tensors, inputs, dims) = _key(mode, part), part
        if key not in self._seen:
            if sum(map(len, self._captures.values())) >= _KEPT_CAPTURES:
                self._captures.clear()
                self._seen.clear()
                self.times_forgotten += 1
            known = self._captures.setdefault((mode, inputs.key, dims), [])
            fitting = next((capture for capture in known if capture.exported.covers(tensors)), None)
            if fitting is None:
                if mode in self.refused and not self._second.get(mode):
                    return None
                kind = mode, inputs.key, _kinds(tensors)
                if not needed and (
                    known_only
                    or self._had_better_pass(key, tensors)
                    or (waits and self._waits(kind, tensors))
                ):
                    return None
                fitting = self._verified_capture(mode, kind, part, known)
                if fitting is None:
                    return None
            self._seen[key] = fitting
        return self._seen[key]

    def _verified_capture(
        self, mode: Hashable, kind: Hashable, part: Part, known: list[Capture]
    ) -> Capture | None:
        """Return a new capture, added to ``known``; None if the model or the result refuses it."""
        try:
            refuse_hooks(self.module)
            capture = self._new_capture(known, part, self.waiting.free(kind, part.tensors))
            if difference := self.compare(capture, part):
                raise CaptureError(difference)
        except CaptureError as error:
            self._second[mode] = isinstance(error, KeptError) and mode not in self._second
            self.refused[mode] = str(error)
            return None
        self.refused.pop(mode, None)
        known.append(capture)
        self._attributes.add(capture.exported.attributes, capture.exported.values_read)
        return capture

    def _new_capture(
        self, known: Sequence[Capture], part: Part, more: Sequence[set[int]]
    ) -> Capture:
        started = time.monotonic()
        patience = _PATIENCE * max([1.0, *(capture.seconds for capture in known[:1])])
        args, kwargs = part.inputs.unflatten(part.tensors)
        exported = export(
            self.module, args, kwargs, part.dims, _free(known, part.tensors, more), patience
        )
        self._made += 1
        self._capture_s = time.monotonic() - started
        return Capture(exported, self._capture_s)

    def _waits(self, kind: Hashable, tensors: Sequence[Any]) -> bool:
        capture_s = self._capture_s or _CAPTURE_S * sum(1 for _ in self.module.modules())
        return self.waiting.waits(kind, tensors, capture_s)

    def _had_better_pass(self, key: Hashable, tensors: Sequence[Any]) -> bool:
        """Return whether a call uses hooks because recent calls each needed a capture.

        For example, if a counter is passed as a number. Such a call is captured once calls like it
        have spent as much time on hooks as a capture takes.
        """
        if self._in_vain < _IN_VAIN or not self.waiting.waits(key, tensors, self._capture_s):
            return False
        if not self._has_warned:
            warn(
                f"each of the last {_IN_VAIN} calls captured the model again, because numbers or "
                "lists in the inputs had changed, or shapes that a graph cannot leave open: such "
                "calls now run through hooks, micro-batches one after another, and are captured "
                "only if similar calls come often"
            )
            self._has_warned = True
        return True

    def _look(self) -> Census:
        """Return the model's current census.

        If modules, parameters, buffers or constants were replaced, discard all captures.
        """
        before = self._census
        if before is None or not before.holds():
            self._census = Census(self.module)
            if before is not None and not before.describes(self._census):
                self.forget()
        if not self._attributes.hold():
            self._tell_of_changes()
            self.forget()
        self._looks += 1
        assert self._census is not None
        return self._census

    def accept_changes(self) -> None:
        """Discard all captures without a warning if attributes changed: the flow moved them."""
        if not self._attributes.hold():
            self.forget()

    def forget(self) -> None:
        """Discard all captures and refusals, since the model has changed."""
        self.times_forgotten += 1
        self._captures.clear()
        self._seen.clear()
        self.refused.clear()
        self._second.clear()
        self.waiting.forget()
        self._whole.clear()
        self._layouts.clear()
        self.__dict__.pop("parameters", None)
        self._in_vain = 0  # the model changed, not its inputs
        self._attributes = Attributes()

    def _tell_of_changes(self) -> None:
        """Warn once of a model whose attributes change between all calls, which is slow."""
        self._changes = self._changes + 1 if self._looks < _FEW_CALLS else 1
        self._looks = 0
        if self._changes == _OFTEN:
            names = ", ".join(map(repr, dict.fromkeys(self._attributes.changed())))
            warn(
                f"{names}: forward reads this value, which changes between calls, and every "
                "change captures the model again, which takes long; pass the value to forward as "
                "a tensor, or change it less often"
            )

    def doubt_refusal(self) -> None:
        """Forget the refusal of the current mode, since the model itself failed on the inputs."""
        self.refused.pop(self.mode(), None)

    def graph(self, capture: Capture, granularity: Granularity) -> LayerGraph:
        """Return the capture's layer graph.

        Which values gradients flow through depends on the currently frozen parameters.
        """
        frozen = tuple(parameter.requires_grad for parameter in self.module.parameters())
        key: Hashable = (
            granularity if isinstance(granularity, Hashable) else tuple(granularity),
            frozen,
        )
        if key not in capture.graphs:
            capture.graphs[key] = layer_graph(capture.exported, self.module, granularity)
        return capture.graphs[key]


def _free(
    known: Sequence[Capture], tensors: Sequence[Any], more: Sequence[set[int]]
) -> list[set[int]]:
    """Return for each input the dimensions that had several sizes so far.

    Two sizes make further sizes likely.
    """
    if any(capture.exported.has_fixed_sizes for capture in known):
        return [set() for _ in tensors]
    free = list(map(set, more))
    for capture in known:
        for dims, others in zip(free, capture.exported.varying_dims(tensors), strict=True):
            dims |= others
    return free


def _kinds(tensors: Sequence[Any]) -> Hashable:
    """Return the distinguishing features of inputs except their sizes."""
    return tuple(
        (tensor.dim(), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor)
        for tensor in tensors
    )


def _key(mode: Hashable, part: Part) -> Hashable:
    return mode, part.inputs.key, part.dims, shapes(part.tensors)


def shapes(tensors: Sequence[Any]) -> Hashable:
    """Return the key that distinguishes captures and recordings of one model and mode."""
    return tuple(
        (tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else tensor for tensor in tensors
    )
