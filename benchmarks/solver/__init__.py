"""How good the solver's answers are, and how fast it proves them: published graphs and profiles,
and real models.

A row a case: value, bound, gap, time and peak memory of a process of its own, beside what else one
would use on the same graph, see ``peers.py``. ``asked`` is what should hold beyond the target of
the value; ``met`` is about both.

``PLACER_SOLVER_CASES="models,neurips20 layer_bert24"`` runs alone the cases of a group
(``contiguous``, ``free``, ``latency``, ``pipedream``, ``models``, ``memory``, ``steps``,
``overhead``, ``large``) or whose names begin so, and keeps the rows that the results of the same
machine and versions have of others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .. import record


def run(chosen: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Measure every row.

    Args:
        chosen: groups, or beginnings of cases' names; those of the environment, or all, if empty.

    Raises:
        ValueError: one of them chooses nothing.
    """
    from . import jobs

    asked = chosen or [
        part.strip()
        for part in os.environ.get("PLACER_SOLVER_CASES", "").split(",")
        if part.strip()
    ]
    made = jobs.run(asked)
    if not asked:
        return made
    renewed = {row["case"] for row in made}
    kept = [row for row in record.known("solver") if row["case"] not in renewed]
    return jobs.in_order([*kept, *made])
