"""Ranking of two answers to the same question."""

from __future__ import annotations

import math
from typing import Any

import sqlalchemy as sa


def is_worse(version: str, summary: dict[str, Any], before: sa.Row[Any]) -> bool:
    """Return whether an answer is worse than the stored one.

    Values of two versions of Placer are not comparable.
    """
    mine, other = _rank(summary), _rank(before.summary)
    return mine < other and (version == before.version or mine == _rank({}))


def _rank(summary: dict[str, Any]) -> tuple[bool, float]:
    """Return a sort key: proven answers first, then the smallest value; no placement is last."""
    value = summary.get("objective_value")
    return summary.get("status") in (
        "optimal",
        "infeasible",
    ), -math.inf if value is None else -value
