"""Rows of the profiler's cases: the error of each estimate, and over all cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..record import row
from .cases import Estimate

Row = dict[str, Any]
OVERALL = "all cases"
ERROR = "peak memory on one H200, error of the estimate"
CLOSE_PERCENT, WORST_PERCENT = 5.0, 15.0
WANTED = 22 / 24
"""The share of cases whose estimate must be close."""


def rows(found: Sequence[Estimate]) -> list[Row]:
    """Return the rows over all cases, then a row for each case."""
    if not found:
        return []
    errors = [one.errors() for one in found]
    names = list(errors[0])
    close = {name: sum(abs(each[name]) <= CLOSE_PERCENT for each in errors) for name in names}
    worst = {name: max((each[name] for each in errors), key=abs) for name in names}
    return [
        row(
            OVERALL,
            f"{ERROR} within {CLOSE_PERCENT:.0f}%: cases of {len(found)}",
            "",
            close.pop("Placer"),
            target=round(WANTED * len(found)),
            smaller_is_better=False,
            peers=close,
        ),
        _error(OVERALL, f"{ERROR}: the worst of {len(found)} cases", worst),
        *(_error(one.label, ERROR, each, one) for one, each in zip(found, errors, strict=True)),
    ]


def _error(case: str, measure: str, errors: dict[str, float], one: Estimate | None = None) -> Row:
    """Return a row of errors in percent; negative is below what was measured."""
    rounded = {name: float(f"{error:.4g}") for name, error in errors.items()}
    ours = rounded.pop("Placer")
    figures = None
    if one is not None:
        figures = {"measured MiB": one.measured, "estimated MiB": float(f"{one.estimated:.4g}")}
    return row(
        case,
        measure,
        "%",
        ours,
        target=WORST_PERCENT,
        met=abs(ours) <= WORST_PERCENT,
        peers=rounded,
        figures=figures,
    )
