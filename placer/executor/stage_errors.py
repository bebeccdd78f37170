"""Errors of stages, with their segment, device, layer and micro-batch."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from placer.capture import input_forms
from placer.capture.export import checkpoints
from placer.errors import PlacerError, StageError


class StageMemoryError(StageError, torch.OutOfMemoryError):
    """A lack of device memory while a pipeline ran a layer; also a torch.OutOfMemoryError."""


@dataclass(frozen=True)
class Place:
    """A pass of a micro-batch through a segment.

    Attributes:
        micro_batch: its number, from 0.
        phase: which pass.
        segment: its number in the pipeline, from 0.
        segments: number of segments; 0 if the model runs through hooks.
        device: of the segment.
        layer: the layer that ran; None if unknown.
        unit: the numbered unit; streams number whole batches.
    """

    micro_batch: int
    phase: str
    segment: int
    segments: int
    device: torch.device
    layer: str | None
    unit: str = "micro-batch"

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer!r}"
        segment = f"of segment {self.segment} of {self.segments} " if self.segments else ""
        return f"the {self.phase} pass {segment}on {self.device}{layer}"


class Trail:
    """A record of the layer that runs, forward or backward.

    Args:
        backwards: whether to record backward passes, by hooks on the layers' results.

    Attributes:
        layer: the name of the layer that began last; None before the first.
    """

    def __init__(self, backwards: bool = False) -> None:
        self.layer: str | None = None
        self._backwards = backwards

    def enter(self, layer: str) -> None:
        """Record the start of a layer's forward pass."""
        self.layer = layer

    def leave(self, layer: str, made: Sequence[Any]) -> None:
        """Record the end of a layer's forward pass.

        The gradient of its results marks the start of its backward pass.
        """
        if not self._backwards:
            return
        for value in made:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(self._back, layer))  # type: ignore[no-untyped-call]

    def _back(self, layer: str, gradient: Tensor) -> None:
        self.layer = layer


def explain(error: BaseException, place: Place) -> BaseException:
    """Return the error to raise: a StageError with the location, or the same with a note.

    Args:
        error: the error of a pass. Interrupts and Placer's own errors are kept.
        place: which pass.
    """
    if checkpoints.is_recompute_signal(error):
        return error
    if not isinstance(error, Exception) or isinstance(error, PlacerError):
        error.add_note(f"while {place.unit} {place.micro_batch} was in {place}")
        return error
    kind, help = StageError, input_forms.input_advice(error)
    if isinstance(error, torch.OutOfMemoryError):
        kind = StageMemoryError
        help = "; place fewer layers there, or cut the batch into more micro-batches"
    text = (
        f"{place.unit} {place.micro_batch} failed in {place}: {type(error).__name__}: {error}{help}"
    )
    found = kind(text, str(place.device), place.layer, place.micro_batch)
    found.__cause__ = error
    return found


def raise_explained(error: BaseException, place: Place) -> NoReturn:
    """Raise the error that names its pass; see ``explain``."""
    found = explain(error, place)
    try:
        raise found
    finally:
        # break the cycle between the errors' traceback and this frame, which would keep all tensors
        # of the pass alive
        del found, error


@contextmanager
def nothing_held() -> Iterator[None]:
    """Release the local variables of failed calls after an out-of-memory error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        clear_frames(error)
        raise


def clear_frames(error: BaseException | None) -> None:
    """Clear the local variables of the finished calls in an error's traceback.

    Args:
        error: its causes are included; None does nothing.
    """
    while error is not None:
        for call, _ in traceback.walk_tb(error.__traceback__):
            frame: FrameType | None = call
            # a frame that still runs cannot be cleared, nor can its callers
            with suppress(RuntimeError):
                while frame is not None:
                    frame.clear()
                    frame = frame.f_back
        error = error.__cause__ or error.__context__


def failed_module(error: BaseException, root: nn.Module) -> str | None:
    """Return the path of the innermost module whose code raised an error; None without one.

    The frame that caught the error is skipped. Up to Python 3.12, reading a frame's variables keeps
    them in the frame; there, the error itself is one, and its own traceback would keep it alive.
    """
    names = {id(module): name for name, module in root.named_modules() if name}
    found, trace = None, error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
