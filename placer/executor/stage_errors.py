"""What failed and where: the error of a stage names its segment, device, layer and micro-batch."""

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
    """A device ran out of memory while a pipeline ran a layer; also what torch raises then."""


@dataclass(frozen=True)
class Place:
    """A pass of a micro-batch through a segment.

    Attributes:
        micro_batch: its number, from 0.
        phase: which pass.
        segment: its number in the pipeline, from 0.
        segments: how many there are; 0 where the model runs through hooks.
        device: of the segment.
        layer: the one that ran; None where it is not known.
        unit: what is numbered: in a stream, whole batches are.
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
    """Which layer runs, forwards or backwards.

    Args:
        backwards: whether to look at backward passes too, by hooks on what the layers make.

    Attributes:
        layer: the name of the one that began last; None before the first.
    """

    def __init__(self, backwards: bool = False) -> None:
        self.layer: str | None = None
        self._backwards = backwards

    def enter(self, layer: str) -> None:
        """A layer's forward pass begins."""
        self.layer = layer

    def leave(self, layer: str, made: Sequence[Any]) -> None:
        """A layer's forward pass is over; the gradient of what it made is where its backward pass
        begins.
        """
        if not self._backwards:
            return
        for value in made:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(self._back, layer))  # type: ignore[no-untyped-call]

    def _back(self, layer: str, gradient: Tensor) -> None:
        self.layer = layer


def explain(error: BaseException, place: Place) -> BaseException:
    """What to raise for an error: one that says where it happened, or the same with a note of it.

    Args:
        error: what a pass raised. Interrupts and Placer's own errors stay what they are.
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
    """Raise for an error what says in which pass it happened; see ``explain``."""
    found = explain(error, place)
    try:
        raise found
    finally:
        # they hold this call, which would hold them, and with them all that the pass had made
        del found, error


@contextmanager
def nothing_held() -> Iterator[None]:
    """Let an error for want of memory hold none: what the calls that it passed through had made is
    let go of.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        clear_frames(error)
        raise


def clear_frames(error: BaseException | None) -> None:
    """Forget the local variables of the calls that an error passed through, and of their callers,
    that are over.

    Args:
        error: its causes are included; None does nothing.
    """
    while error is not None:
        for call, _ in traceback.walk_tb(error.__traceback__):
            frame: FrameType | None = call
            # of a call that is not over, and so are its callers not
            with suppress(RuntimeError):
                while frame is not None:
                    frame.clear()
                    frame = frame.f_back
        error = error.__cause__ or error.__context__


def failed_module(error: BaseException, root: nn.Module) -> str | None:
    """Return the path of the innermost module of a model in whose code an error was raised; None if
    in none.

    The call that caught the error is not looked at. Up to Python 3.12 a look at the variables of a
    call is kept with
    it: there the error itself is one, and would be kept by its own traceback.
    """
    names = {id(module): name for name, module in root.named_modules() if name}
    found, trace = None, error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
