"""What a step takes of the memory of each GPU, beside what its placement predicted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from placer import Placement

from .sample import release


class Meter:
    """Counts what torch takes of GPUs from now on, beyond what it holds now; stand-ins are not counted.

    What is reserved counts, not what is allocated: a CUDA graph keeps the memory that it works in also while no tensor
    is there.

    Args:
        places: the devices.
    """

    def __init__(self, places: Sequence[torch.device]) -> None:
        release()
        self._before = {str(place): torch.cuda.memory_reserved(place) for place in places if place.type == "cuda"}
        for place in self._before:
            torch.cuda.reset_peak_memory_stats(place)

    def forget_peak(self) -> None:
        """Let the peak be that of what comes after this."""
        release()
        for place in self._before:
            torch.cuda.reset_peak_memory_stats(place)

    def against(self, placement: Placement) -> dict[str, list[float]]:
        """The peak of each device that the placement uses, and what it predicted, in bytes."""
        loads = [load for load in placement.devices if load.device in self._before and load.memory.total_bytes]
        peaks = [torch.cuda.max_memory_reserved(load.device) - self._before[load.device] for load in loads]
        return {
            "peak_bytes": [float(peak) for peak in peaks],
            "predicted_bytes": [float(load.memory.total_bytes) for load in loads],
        }
