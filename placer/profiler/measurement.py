"""The measurement of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from placer.profiler.memory import LayerMemory
from placer.profiler.timing import LayerTime


@dataclass(frozen=True)
class Measurement:
    """Time and memory of one layer on one type of device.

    Attributes:
        time: the times of its passes.
        memory: the memory of its passes.
        write_bytes: bytes of each write; under autocast they differ from the captured sizes.
        optimizer_ms: step time of the optimizer on its parameters, in ms; None without an
            optimizer, or if the step failed.
    """

    time: LayerTime
    memory: LayerMemory
    write_bytes: tuple[int, ...] = ()
    optimizer_ms: float | None = None
