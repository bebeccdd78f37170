"""The measured and the predicted memory of a step on each GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from placer import Placement

from .sample import release


class Meter:
    """The GPU memory that torch takes from now on; stand-ins are not measured.

    Reserved memory counts instead of allocated memory, because a CUDA graph keeps its working
    memory while no tensor is alive. In segments that existed before, newly allocated bytes count: a
    few earlier tensors may hold a segment of gigabytes, in which weights and gradients then lie.

    Args:
        places: the devices.
    """

    def __init__(self, places: Sequence[torch.device]) -> None:
        release()
        self._before = {str(place): _pieces(place) for place in places if place.type == "cuda"}
        for place in self._before:
            torch.cuda.reset_peak_memory_stats(place)

    def forget_peak(self) -> None:
        """Forget the peak so far."""
        release()
        for place in self._before:
            torch.cuda.reset_peak_memory_stats(place)

    def against(self, placement: Placement) -> dict[str, list[float]]:
        """Return the measured and the predicted peak of each device in bytes."""
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
    """Return size and allocated bytes of each memory segment of torch's allocator, by address."""
    return {
        piece["address"]: (piece["total_size"], piece["allocated_size"])
        for piece in torch.cuda.memory_snapshot()
        if piece["device"] == (place.index or 0)
    }
