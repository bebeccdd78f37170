"""The rounds of a refinement."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from placer.schema.base import SCHEMA_VERSION, Milliseconds, Name, Wire
from placer.schema.placement import Placement
from placer.schema.profile import Profile

StopReason = Literal["converged", "repeated", "max-rounds"]


class StageTime(Wire):
    """Predicted and measured times of one stage for one micro-batch.

    Attributes:
        device: where it runs.
        layers: its layers, in execution order.
        predicted_forward_ms: by the profile of the round.
        predicted_backward_ms: by the profile of the round, the whole backward pass.
        forward_ms: measured; the last stage includes the loss.
        backward_ms: measured, the whole backward pass; the last stage includes the loss.
        weight_grad_ms: the part of ``backward_ms`` for gradients of parameters; None if not
            measured separately.
        loss_forward_ms: the part of ``forward_ms`` for the loss.
        loss_backward_ms: the part of ``backward_ms`` for the loss.
        compiled: the gain of ``torch.compile``; empty if the stage was not compiled.
        not_compiled_because: why a requested compilation failed.
    """

    device: Name
    layers: Annotated[tuple[Name, ...], Field(min_length=1)]
    # prediction, then measurement
    predicted_forward_ms: Milliseconds = 0.0
    predicted_backward_ms: Milliseconds = 0.0
    forward_ms: Milliseconds
    backward_ms: Milliseconds = 0.0
    weight_grad_ms: Milliseconds | None = None
    loss_forward_ms: Milliseconds = 0.0
    loss_backward_ms: Milliseconds = 0.0
    compiled: str = ""
    not_compiled_because: str = ""

    @property
    def predicted_ms(self) -> float:
        """Return the predicted time of both passes."""
        return self.predicted_forward_ms + self.predicted_backward_ms

    @property
    def measured_ms(self) -> float:
        """Return the measured time of both passes."""
        return self.forward_ms + self.backward_ms


class Round(Wire):
    """One placement, predicted and measured.

    Attributes:
        placement: the placement.
        stages: its stages, in execution order.
        predicted_value: its objective by the profile that it was solved with.
        measured_value: its objective by the profile after correction.
    """

    placement: Placement
    stages: tuple[StageTime, ...]
    predicted_value: Annotated[float, Field(ge=0)]
    measured_value: Annotated[float, Field(ge=0)]


class Refinement(Wire):
    """The result of ``placer.refine``.

    Attributes:
        placement: the best measured placement, with measured loads and objective.
        profile: the profile, corrected by the last measurements.
        rounds: one for each measured placement.
        stop_reason: ``converged``: solving again moves no layer or gains too little; ``repeated``:
            it returns to a measured placement; ``max-rounds``: the maximum number of rounds was
            reached.
    """

    schema_version: Literal["3"] = SCHEMA_VERSION
    placement: Placement
    profile: Profile
    rounds: Annotated[tuple[Round, ...], Field(min_length=1)]
    stop_reason: StopReason
