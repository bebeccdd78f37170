"""What measuring a placement's stages showed, round by round."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from placer.schema.base import SCHEMA_VERSION, Milliseconds, Name, Wire
from placer.schema.placement import Placement
from placer.schema.profile import Profile

Ended = Literal["settled", "repeated", "rounds"]


class StageTime(Wire):
    """One stage for one micro-batch: what the profile said, and what its passes took when they ran
    as a whole.

    Attributes:
        device: where it runs.
        layers: its layers, in execution order.
        predicted_forward_ms: by the profile of the round.
        predicted_backward_ms: both halves.
        forward_ms: measured, with the loss in the last stage.
        backward_ms: measured, both halves, with that of the loss in the last stage.
        weights_ms: the part of ``backward_ms`` that gradients of parameters take; None where it was
            not told apart.
        loss_forward_ms: the part of ``forward_ms`` that is the loss.
        loss_backward_ms: the part of ``backward_ms`` that is the loss.
        compiled: what ``torch.compile`` gained; empty where the stage was measured without it.
        not_compiled_because: why so, where it was asked for.
    """

    device: Name
    layers: Annotated[tuple[Name, ...], Field(min_length=1)]
    predicted_forward_ms: Milliseconds = 0.0
    predicted_backward_ms: Milliseconds = 0.0
    forward_ms: Milliseconds
    backward_ms: Milliseconds = 0.0
    weights_ms: Milliseconds | None = None
    loss_forward_ms: Milliseconds = 0.0
    loss_backward_ms: Milliseconds = 0.0
    compiled: str = ""
    not_compiled_because: str = ""

    @property
    def predicted_ms(self) -> float:
        """Forward and backward, by the profile."""
        return self.predicted_forward_ms + self.predicted_backward_ms

    @property
    def measured_ms(self) -> float:
        """Forward and backward, measured."""
        return self.forward_ms + self.backward_ms


class Round(Wire):
    """One placement, as it was predicted and as it was measured.

    Attributes:
        placement: the placement.
        stages: its stages, in the order in which they run.
        predicted_value: its objective by the profile that it was solved with.
        measured_value: its objective by the profile as these measurements correct it.
    """

    placement: Placement
    stages: tuple[StageTime, ...]
    predicted_value: Annotated[float, Field(ge=0)]
    measured_value: Annotated[float, Field(ge=0)]


class Refinement(Wire):
    """What ``placer.refine`` found.

    Attributes:
        placement: the best of those measured, with the loads and the objective that were measured.
        profile: the profile, corrected by the last measurements.
        rounds: one for each placement that was measured.
        ended: ``settled``: solving again moves no layer, or gains too little; ``repeated``: it
            leads back to a placement that was measured before; ``rounds``: as many as were allowed.
    """

    schema_version: Literal["1"] = SCHEMA_VERSION
    placement: Placement
    profile: Profile
    rounds: Annotated[tuple[Round, ...], Field(min_length=1)]
    ended: Ended

    def to_json(self) -> str:
        """The refinement as readable JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=1)
