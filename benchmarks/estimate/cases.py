"""The profiler's cases: the memory that was measured, ours and the peers' estimates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from placer import Constraints, PlacementRequest, solve
from placer.estimator.fake_profile import estimated_profile
from placer.schema import Cluster, Device

from .. import record
from ..profiler import cases as profiler_cases
from ..profiler.cases import Case
from ..profiler.rows import PEAK
from . import peers

RESULTS = "profiler-1xH200"
_DEVICE = Device(name="cuda:0", type="NVIDIA H200", memory_bytes=141 * 10**9, host="gpus")


@dataclass(frozen=True)
class Estimate:
    """A case with its memory in MiB.

    Attributes:
        label: the case, as in tables.
        measured: the peak that torch's allocator counted on the GPU.
        estimated: our estimate of it.
        peers: the peers' estimates, by name.
    """

    label: str
    measured: float
    estimated: float
    peers: dict[str, float]

    def errors(self) -> dict[str, float]:
        """Return the error in percent of every estimate; ours is ``Placer``."""
        every = {"Placer": self.estimated, **self.peers}
        return {name: 100 * (value / self.measured - 1) for name, value in every.items()}


def measured() -> list[Estimate]:
    """Return all cases.

    Raises:
        LookupError: if the recorded results lack a case.
    """
    known = {row["case"]: row["value"] for row in _recorded()}
    return [
        _estimate(case, known) for model in profiler_cases.FULL for case in profiler_cases.of(model)
    ]


def _recorded() -> Iterator[record.Row]:
    for row in record.read(RESULTS)["rows"]:
        if row["measure"] == PEAK:
            yield row


def _estimate(case: Case, known: dict[str, float]) -> Estimate:
    label = _label(case)
    recorded = known[f"{label}, 1 devices for want of {case.wanted}"]
    inputs, _ = case.batch(torch.device("meta"), case.micro_batch)
    model = case.make(torch.device("meta"))
    found = estimated_profile(model, inputs, Cluster(devices=(_DEVICE,)), training=case.training)
    # the GPU run had one micro-batch in flight, and its passes were not recorded
    by_hand = Constraints(contiguous=False)
    placement = solve(PlacementRequest(profile=found, objective="memory", constraints=by_hand))
    estimated = placement.devices[0].memory.total_bytes
    result = Estimate(label, recorded, estimated / 2**20, peers.estimates(case))
    print(label, {name: f"{error:.2f} %" for name, error in result.errors().items()}, flush=True)
    return result


def _label(case: Case) -> str:
    """Return the case's name without its devices, of full size on any machine."""
    precision = "bf16" if case.half else "TF32"
    mode = "training" if case.training else "inference"
    return f"{case.model.label}, {precision}, {mode}, micro-batch {case.micro_batch}"
