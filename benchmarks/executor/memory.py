"""What a step takes of the memory of each GPU, beside what its placement predicted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from placer import Placement

from .sample import release


class Meter:
    """Counts what torch takes of GPUs from now on, beyond what it holds now; stand-ins are not
    counted.

    What is reserved counts, not what is allocated: a CUDA graph keeps the memory that it works in
    also while no tensor is there. Of pieces that were there before, what is filled of them since
    counts: a few tensors of earlier work may hold gigabytes, in which a model's weights and
    gradients then lie.

    Args:
        places: the devices.
    """

    def __init__(self, places: Sequence[torch.device]) -> None:
        release()
        self._before = {str(place): _pieces(place) for place in places if place.type == "cuda"}
        for place in self._before:
            torch.cuda.reset_peak_memory_stats(place)

    def forget_peak(self) -> None:
        """Let the peak be that of what comes after this."""
        release()
        for place in self._before:
            torch.cuda.reset_peak_memory_stats(place)

    def against(self, placement: Placement) -> dict[str, list[float]]:
        """The peak of each device that the placement uses, and what it predicted, in bytes."""
        loads = [
            load
            for load in placement.devices
            if load.device in self._before and load.memory.total_bytes
        ]
        peaks = [self._taken(load.device) for load in loads]
        return {
            "peak_bytes": [float(peak) for peak in peaks],
            "predicted_bytes": [float(load.memory.total_bytes) for load in loads],
        }

    def _taken(self, device: str) -> int:
        before, now = self._before[device], _pieces(torch.device(device))
        taken = sum(
            size - before[place][0] if place in before else size for place, (size, _) in now.items()
        )
        filled = sum(
            max(0, full - before[place][1]) for place, (_, full) in now.items() if place in before
        )
        given_back = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
        return int(taken + filled + given_back)


def _pieces(place: torch.device) -> dict[int, tuple[int, int]]:
    """Of each piece of memory that torch's allocator has, by its address: its size, and how much of
    it is allocated.
    """
    return {
        piece["address"]: (piece["total_size"], piece["allocated_size"])
        for piece in torch.cuda.memory_snapshot()
        if piece["device"] == (place.index or 0)
    }
