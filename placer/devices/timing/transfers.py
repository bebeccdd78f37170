"""Timing of copies between memories: alone, concurrently, and during computation."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.devices import tensor_moves
from placer.devices.lanes import Lane, Mark
from placer.devices.names import synchronise
from placer.devices.recording import recorder

# about 2 ms: enough time to fill the queues before the first copy begins
_ASLEEP_CYCLES = 4_000_000
_SIDE = 4096  # edge length of the matrices that keep a device busy
_MOST_PRODUCTS = 2_000


@dataclass(frozen=True)
class Shipment:
    """A copy to be timed.

    Attributes:
        sent: the source tensor.
        received: the target tensor.
        source: the device of ``sent``; ``HOST`` for the host's memory.
        target: the device of ``received``.
    """

    sent: Tensor
    received: Tensor
    source: torch.device
    target: torch.device

    def go(self) -> None:
        """Copy without waiting for a GPU."""
        tensor_moves.write(self.sent, self.received, self.source, self.target)


def copy_s(
    shipments: Sequence[Shipment],
    repeats: int,
    computing: Sequence[torch.device] = (),
    lasting_s: float = 0.0,
) -> list[float]:
    """Return the median time of each copy while all of them run concurrently.

        gate    ─ sleep ─┐                 all queues fill while the gate sleeps
        lane 1           [copy][copy][copy] ...
        lane 2           [copy ][copy ][copy ] ...

    Args:
        shipments: each is repeated in its own queue. Only one may be between two host memories.
        repeats: copies per shipment, at least 3.
        computing: GPUs that multiply matrices meanwhile.
        lasting_s: approximate total duration in seconds, which sets the amount of multiplication.

    Returns:
        Seconds, in the order of the shipments. The first and last copies are left out, because they
        may run alone.
    """
    if not any(end.type == "cuda" for item in shipments for end in (item.source, item.target)):
        return [_host_copy_s(item, repeats) for item in shipments]
    # A warm-up: the first copy on a link may allocate memory or open peer access.
    for item in shipments:
        item.go()
    _wait(shipments, computing)
    for device in computing:
        _multiply(device, lasting_s)
    lanes = [_lanes(item) for item in shipments]
    gate = _gate(lanes[0][0].device)
    marks = []
    for item, (outgoing, incoming) in zip(shipments, lanes, strict=True):
        outgoing.wait(gate)
        with outgoing, incoming:
            marks.append([outgoing.mark(timed=True)])
            for _ in range(repeats):
                item.go()
                marks[-1].append(outgoing.mark(timed=True))
    _wait(shipments, computing)
    return [_median_s(row) for row in marks]


def _lanes(item: Shipment) -> tuple[Lane, Lane]:
    """Return the lanes of both ends; both are the GPU's lane if the other end is the host."""
    if item.source.type == item.target.type:
        return Lane(item.source), Lane(item.target)
    lane = Lane(item.source if item.source.type == "cuda" else item.target)
    return lane, lane


def _gate(device: torch.device) -> Mark:
    """Return a mark that is reached once all queues are full, so that copies start together."""
    lane = Lane(device)
    with torch.cuda.device(device), lane:
        torch.cuda._sleep(_ASLEEP_CYCLES)  # type: ignore[no-untyped-call]
    return lane.mark()


def _median_s(marks: Sequence[torch.cuda.Event]) -> float:
    times = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
    inner = sorted(times[1:-1] or times)
    return float(inner[len(inner) // 2])


def _host_copy_s(item: Shipment, repeats: int) -> float:
    """Return the shortest of several copies: disturbances only ever lengthen a host copy."""
    samples = []
    for _ in range(repeats):
        began = time.perf_counter()
        item.go()
        samples.append(time.perf_counter() - began)
    return min(samples)


def _multiply(device: torch.device, lasting_s: float) -> None:
    """Keep a GPU busy for about ``lasting_s``, without waiting for it.

    The recording stream is used, because another stream would take a cuBLAS workspace for good.
    """
    with torch.cuda.device(device), torch.cuda.stream(recorder(device).stream):
        side = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16, device=device)
        product = torch.empty_like(side)
        marks = []
        for _ in range(3):
            torch.mm(side, side, out=product)
            marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            marks[-1].record()
        synchronise(device)
        once_s = max(1e-6, marks[1].elapsed_time(marks[2]) / 1e3)
        for _ in range(min(_MOST_PRODUCTS, 2 + math.ceil(1.5 * (lasting_s + 0.005) / once_s))):
            torch.mm(side, side, out=product)


def _wait(shipments: Sequence[Shipment], computing: Sequence[torch.device]) -> None:
    ends = {end for item in shipments for end in (item.source, item.target)}
    for device in ends | set(computing):
        synchronise(device)
