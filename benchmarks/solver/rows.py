"""A case as a row: our value, bound, gap, time and peak memory, and the peers' values."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from placer.schema import Placement

from .. import record

ROUNDED = 2e-6
"""The published values are rounded so."""


@dataclass(frozen=True)
class Wanted:
    """The targets of a case; a field that is None is not a target.

    Attributes:
        value: the largest allowed value, up to rounding.
        proven_s: the seconds in which the answer must be proven.
        gap: the largest allowed gap in percent; a proven answer has a gap of 0.
        time_s: the seconds in which the answer must be there.
        peak_mib: the largest allowed memory of the process.
    """

    value: float | None = None
    proven_s: float | None = None
    gap: float | None = None
    time_s: float | None = None
    peak_mib: float | None = None

    def __str__(self) -> str:
        limits = {"gap <= {:g}%": self.gap, "in {:g} s": self.time_s, "<= {:g} MiB": self.peak_mib}
        limits["proven in {:g} s"] = self.proven_s
        return ", ".join(
            text.format(number) for text, number in limits.items() if number is not None
        )

    def met(self, value: float | None, figures: Mapping[str, Any], proven: bool) -> bool | None:
        """Return whether all targets are met; None if there is no target."""
        if self == Wanted():
            return None
        limits = [
            (figures["gap, %"], self.gap),
            (figures["time, s"], self.time_s),
            (figures["peak, MiB"], self.peak_mib),
        ]
        if self.proven_s is not None and not (proven and figures["time, s"] <= self.proven_s):
            return False
        if self.value is not None and (value is None or value > self.value * (1 + ROUNDED)):
            return False
        return all(
            limit is None or (number is not None and number <= limit) for number, limit in limits
        )


def measured(
    case: str,
    measure: str,
    solve: Callable[[], Placement],
    wanted: Wanted,
    *,
    value: Callable[[Placement], float | None] | None = None,
    peers: Callable[[], Mapping[str, float | None]] | None = None,
    figures: Callable[[Placement], Mapping[str, float | str | None]] | None = None,
) -> dict[str, Any]:
    """Solve a case once and record the result.

    Args:
        case: the name of the case.
        measure: its objective, in milliseconds.
        solve: from the input to the checked answer; its time counts.
        wanted: the targets of the answer.
        value: computes the value from the answer independently of the solver; the solver's own
            value if left out.
        peers: computes the peers' values after the answer; its memory does not count.
        figures: computes further figures from the answer.
    """
    began = perf_counter()
    placement = solve()
    time_s = perf_counter() - began
    found = placement.objective_value if value is None else value(placement)
    proven = placement.status == "optimal"
    found_figures = {
        "bound": placement.bound,
        "gap, %": None if placement.gap is None else 0.0 if proven else 100 * placement.gap,
        "time, s": round(time_s, 3),
        "peak, MiB": round(peak_mib()),
        "asked": str(wanted),
    }
    return record.row(
        case,
        measure,
        "ms",
        found,
        target=wanted.value,
        met=wanted.met(found, found_figures, proven),
        peers=peers() if peers is not None else {},
        figures=found_figures | dict(figures(placement) if figures is not None else {}),
    )


def peak_mib() -> float:
    """Return the most memory that this process ever held, in MiB."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    # getrusage is unsuitable: across exec it keeps the peak of the parent process.
    return int(text.partition("VmHWM:")[2].split()[0]) / 2**10
