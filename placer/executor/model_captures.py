"""The captures of one model: one for each mode and each shape that an earlier one does not cover,
made when needed.
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
from placer.capture.layers import LayerGraph
from placer.capture.python_state.module_hooks import refuse_hooks
from placer.capture.python_state.module_side_effects import KeptError
from placer.capture.pytrees import Structure
from placer.errors import CaptureError
from placer.executor.capture_delay import Waiting
from placer.executor.state.model_fingerprint import Attributes, Census
from placer.schema import BatchOptions
from placer.utils.user_warnings import warn

_FEW_CALLS = 10
_OFTEN = 3
_KNOWN_SHAPES = 1000
_KEPT_CAPTURES = 200
# How many times as long as the first capture one with open sizes may take; the first is taken to
# last a second.
_PATIENCE = 5.0
# So many calls in a row may each have the model captured.
_IN_VAIN = 4
# What a capture takes for each module, as long as none was made.
_CAPTURE_S = 0.008


@dataclass(eq=False)
class Capture:
    """One capture, how long it took, and the layer graphs that were cut from it, by granularity."""

    exported: Exported
    seconds: float = 0.0
    graphs: dict[Hashable, LayerGraph] = field(default_factory=dict)


@dataclass
class Program:
    """What is known of a model's graph so far.

    Attributes:
        module: the user's model.
        compare: given a new capture and inputs that it holds for, tells in what the graph differs
            from the model; an empty string if it does not.
        refused: why torch.export refused it, or in what the graph differs, by mode; those modes run
            through hooks.
    """

    module: nn.Module
    compare: Callable[[Capture, Part], str] = lambda capture, part: ""
    refused: dict[Hashable, str] = field(default_factory=dict)
    _captures: dict[Hashable, list[Capture]] = field(default_factory=dict)
    _seen: dict[Hashable, Capture] = field(default_factory=dict)
    _census: Census | None = None
    _attributes: Attributes = field(default_factory=Attributes)
    _looks: int = 0
    _changes: int = 0
    _modes: dict[Hashable, int] = field(default_factory=dict)
    # whether a mode's second look is still to come
    _second: dict[Hashable, bool] = field(default_factory=dict)
    _whole: dict[Hashable, frozenset[int]] = field(default_factory=dict)
    _layouts: dict[Hashable, BatchLayout] = field(default_factory=dict)
    _made: int = 0
    _in_vain: int = 0
    _passed_s: dict[Hashable, float] = field(default_factory=dict)
    _passing: Hashable = None
    _waiting: Waiting = field(default_factory=Waiting)
    _capture_s: float = 0.0
    _has_told: bool = False

    def mode(self) -> Hashable:
        """What the graph depends on beside shapes: which modules train, which have hooks, and the
        caller's autocast.
        """
        return self._mode_in(self._look())

    def _mode_in(self, census: Census) -> Hashable:
        # A number in its place: it would be hashed for every micro-batch, hundreds of modules long.
        return autocast.current_dtypes(), self._modes.setdefault(census.modes, len(self._modes))

    def state(self) -> list[Tensor]:
        """The model's parameters and buffers, as of the last look, or of one now if there was none."""
        return (self._census or self._look()).state

    def captures(
        self, parts: Sequence[Part], needed: bool = True, waits: bool = False
    ) -> list[Capture] | None:
        """Return the captures that cover the micro-batches of one call, for which the model is
        looked at once.

        Args:
            parts: the inputs of each micro-batch.
            needed: whether to capture in any case; else not if call after call would need a capture
                of its own.
            waits: whether to capture only when calls of the kind have spent as long on hooks as
                that takes.

        Returns:
            The capture of each, or None if the model must, or had better, run through hooks.
        """
        mode, before = self.mode(), self._made
        found = []
        for part in parts:
            capture = self._capture(mode, part, needed, waits)
            if capture is None:
                return None
            found.append(capture)
        self._in_vain = self._in_vain + 1 if self._made > before else 0
        return found

    def stops_gradients(self, captures: Sequence[Capture], parts: Sequence[Part]) -> bool:
        """Return whether the model stops gradients of a call that its captures would let through.

        Args:
            captures: of the micro-batches.
            parts: the inputs of each.
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
        """Return where the samples of a call's inputs lie, as far as sizes and options tell.

        Args:
            call: positional and keyword arguments.
            tensors: the flattened inputs.
            inputs: their structure.
            options: what was declared.
        """
        key = (
            inputs.key,
            shapes(tensors),
            None if options is DEFAULT_OPTIONS else options.model_dump_json(),
        )
        if key not in self._layouts:
            if len(self._layouts) >= _KNOWN_SHAPES:
                self._layouts.clear()
            self._layouts[key] = call_layout(call, tensors, inputs, options, self.parameters)
        return self._layouts[key]

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters of the model's forward method."""
        return Parameters.from_module(self.module)

    def narrowed(
        self, layout: BatchLayout, tensors: Sequence[Any], inputs: Structure, needed: bool = True
    ) -> BatchLayout:
        """Return a layout without tensors that are no part of the batch, though as long: a mask, or
        a table.

        A capture of the whole call tells. Without one, sizes alone do.

        Args:
            layout: of a call that is to be cut.
            tensors: the flattened inputs.
            inputs: their structure.
            needed: as for ``captures``.
        """
        if len(layout.undeclared()) < 2 or layout.lists:
            return layout
        key = (inputs.key, shapes(tensors), layout)
        if key not in self._whole:
            # inside it, constants could not be trained with later
            with torch.inference_mode(False):
                found = self.captures([Part(list(tensors), inputs, layout.dims)], needed)
            if found is None:
                return layout
            if len(self._whole) >= _KNOWN_SHAPES:
                self._whole.clear()
            self._whole[key] = inputs_of_other_lengths(found[0].exported.module.graph, layout.dims)
        return layout.without(self._whole[key].intersection(layout.undeclared()))

    def captures_before(self, parts: Sequence[Part]) -> list[Capture] | None:
        """Return what ``captures`` returns if the model is as it was at the last look; None if it
        would capture.

        Args:
            parts: the inputs of each micro-batch.
        """
        if self._census is None or not self._census.is_quick:
            return None
        mode = self._mode_in(self._census)
        found = [self._seen.get(_key(mode, part)) for part in parts]
        return None if None in found else found  # type: ignore[return-value]

    def is_unchanged(self) -> bool:
        """Whether the model is as it was at the last look; if so, this was one more."""
        if self._census is None or not (self._census.holds() and self._attributes.hold()):
            return False
        self._looks += 1
        self._in_vain = 0
        return True

    def holds(self, capture: Capture) -> bool:
        """Whether a capture is still of the model as it is."""
        return any(capture in known for known in self._captures.values())

    def _capture(self, mode: Hashable, part: Part, needed: bool, waits: bool) -> Capture | None:
        key, (tensors, inputs, dims) = _key(mode, part), part
        if key not in self._seen:
            if sum(map(len, self._captures.values())) >= _KEPT_CAPTURES:
                self._captures.clear()
                self._seen.clear()
            known = self._captures.setdefault((mode, inputs.key, dims), [])
            fitting = next((capture for capture in known if capture.exported.covers(tensors)), None)
            if fitting is None:
                if mode in self.refused and not self._second.get(mode):
                    return None
                kind = mode, inputs.key, _kinds(tensors)
                if not needed and (
                    self._had_better_pass(key) or (waits and self._waits(kind, tensors))
                ):
                    return None
                try:
                    refuse_hooks(self.module)
                    fitting = self._anew(known, part, self._waiting.free(kind, tensors))
                    if difference := self.compare(fitting, part):
                        raise CaptureError(difference)
                except CaptureError as error:
                    self._second[mode] = isinstance(error, KeptError) and mode not in self._second
                    self.refused[mode] = str(error)
                    return None
                self.refused.pop(mode, None)
                known.append(fitting)
                self._attributes.add(fitting.exported.attributes, fitting.exported.values_read)
            # a cache that grows by a token a call has a shape for each
            if len(self._seen) >= _KNOWN_SHAPES:
                self._seen.clear()
            self._seen[key] = fitting
        return self._seen[key]

    def _anew(self, known: Sequence[Capture], part: Part, more: Sequence[set[int]]) -> Capture:
        begun = time.monotonic()
        patience = _PATIENCE * max([1.0, *(capture.seconds for capture in known[:1])])
        args, kwargs = part.inputs.unflatten(part.tensors)
        exported = export(
            self.module, args, kwargs, part.dims, _free(known, part.tensors, more), patience
        )
        self._made += 1
        self._capture_s = time.monotonic() - begun
        return Capture(exported, self._capture_s)

    def _waits(self, kind: Hashable, tensors: Sequence[Any]) -> bool:
        capture_s = self._capture_s or _CAPTURE_S * sum(1 for _ in self.module.modules())
        return self._waiting.waits(kind, tensors, capture_s)

    def _had_better_pass(self, key: Hashable) -> bool:
        """Whether a call goes through hooks, as the last ones needed a capture each: a counter is
        given along, say.

        It is captured when its like has spent as long there as a capture takes.
        """
        if self._in_vain < _IN_VAIN or self._passed_s.get(key, 0.0) > self._capture_s:
            return False
        if len(self._passed_s) >= _KNOWN_SHAPES:
            self._passed_s.clear()
        self._passing = key
        if not self._has_told:
            warn(
                f"the last {_IN_VAIN} calls each had the model captured anew, as numbers or lists "
                "in their inputs were others, or shapes that a graph cannot leave open: now such "
                "calls run through hooks, micro-batches one after another, and are captured where "
                "the like comes often"
            )
            self._has_told = True
        return True

    def note_passed(self, seconds: float) -> None:
        """A call went through hooks, which took so long."""
        self._waiting.note(seconds)
        if self._passing is not None:
            self._passed_s[self._passing] = self._passed_s.get(self._passing, 0.0) + seconds
            self._passing = None

    def _look(self) -> Census:
        """The model as it is now; what is known of one with another module, parameter, buffer or
        constant is not.
        """
        before = self._census
        if before is None or not before.holds():
            self._census = Census(self.module)
            if before is not None and not before.describes(self._census):
                self._forget()
        if not self._attributes.hold():
            self._tell_of_changes()
            self._forget()
        self._looks += 1
        assert self._census is not None
        return self._census

    def accept_changes(self) -> None:
        """Forget all captures if attributes have changed, without a warning: the flow itself moved
        what they hold.
        """
        if not self._attributes.hold():
            self._forget()

    def _forget(self) -> None:
        self._captures.clear()
        self._seen.clear()
        self.refused.clear()
        self._second.clear()
        self._passed_s.clear()
        self._waiting.forget()
        self._whole.clear()
        self._layouts.clear()
        self.__dict__.pop("parameters", None)
        self._in_vain = 0  # it was the model that changed, not what it is given
        self._attributes = Attributes()

    def _tell_of_changes(self) -> None:
        """A model whose attributes change between all calls is right, and slow: warn of it once."""
        self._changes = self._changes + 1 if self._looks < _FEW_CALLS else 1
        self._looks = 0
        if self._changes == _OFTEN:
            names = ", ".join(map(repr, dict.fromkeys(self._attributes.changed())))
            warn(
                f"{names}: forward reads what changes between calls, and every change has the "
                "model captured anew, which takes long; give it to forward as a tensor, or change "
                "it less often"
            )

    def doubt_refusal(self) -> None:
        """The model itself failed on what was given: that torch.export failed on it too says
        nothing of the mode.
        """
        self.refused.pop(self.mode(), None)

    def graph(self, capture: Capture, granularity: Granularity) -> LayerGraph:
        """The capture, cut into layers; which values gradients flow through depends on what is
        frozen now.
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
    """For each input, the dimensions that were of several sizes so far: who gives two lengths will
    give more.
    """
    if any(capture.exported.has_fixed_sizes for capture in known):
        return [set() for _ in tensors]
    free = list(map(set, more))
    for capture in known:
        for dims, others in zip(free, capture.exported.varying_dims(tensors), strict=True):
            dims |= others
    return free


def _kinds(tensors: Sequence[Any]) -> Hashable:
    """What tells inputs apart but their sizes."""
    return tuple(
        (tensor.dim(), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor)
        for tensor in tensors
    )


def _key(mode: Hashable, part: Part) -> Hashable:
    return mode, part.inputs.key, part.dims, shapes(part.tensors)


def shapes(tensors: Sequence[Any]) -> Hashable:
    """What tells captures and recordings of one model and mode apart."""
    return tuple(
        (tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else tensor for tensor in tensors
    )
