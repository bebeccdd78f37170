"""What is measured of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from placer.profiler.memory import LayerMemory
from placer.profiler.timing import LayerTime


@dataclass(frozen=True)
class Measurement:
    """What was measured of one layer on one type of device.

    Attributes:
        time: of its passes.
        memory: that they need.
        write_bytes: the sizes of what it writes: under autocast not those that the graph was
            captured with.
        optimizer_ms: of the optimizer's step on its parameters; None without an optimizer, or where
            the step failed.
    """

    time: LayerTime
    memory: LayerMemory
    write_bytes: tuple[int, ...] = ()
    optimizer_ms: float | None = None
