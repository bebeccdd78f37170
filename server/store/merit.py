"""Which of two answers to a question is worth keeping."""

from __future__ import annotations

import math
from typing import Any

import sqlalchemy as sa


def is_worse(version: str, summary: dict[str, Any], before: sa.Row[Any]) -> bool:
    """Whether an answer is worse than that before it; values of two versions of Placer say nothing
    of each other.
    """
    mine, other = _merit(summary), _merit(before.summary)
    return mine < other and (version == before.version or mine == _merit({}))


def _merit(summary: dict[str, Any]) -> tuple[bool, float]:
    """The greater, the better: what is proven first, then the smallest value; nothing found is the
    least.
    """
    value = summary.get("objective_value")
    return summary.get("status") in (
        "optimal",
        "infeasible",
    ), -math.inf if value is None else -value
