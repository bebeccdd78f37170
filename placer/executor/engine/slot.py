"""Static memory for one micro-batch in a stage, and the passes that work in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from placer.devices import Mark
from placer.schedule import Phase


@dataclass(eq=False)
class Slot:
    """Room for one micro-batch in a stage.

    A recorded pass reads and writes the same memory at every replay. So the tensors of a slot stay
    where they are, and each micro-batch is copied into them. An input that nobody sends keeps its
    contents from one micro-batch to the next, as a key/value cache does.

    Attributes:
        inputs: what the stage reads, by name: static tensors, or numbers.
        outputs: what the latest forward pass made, by name.
        passes: runs or replays each pass.
        arrived: marks behind the copies into the slot that its next pass has to wait for.
        made: mark behind the latest pass.
        free: marks after which the inputs may be overwritten.
    """

    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    passes: dict[Phase, Callable[[], None]] = field(default_factory=dict)
    arrived: list[Mark] = field(default_factory=list)
    made: Mark = None
    free: list[Mark] = field(default_factory=list)
