"""The quality and speed of the solver on published graphs and profiles, and on real models.

Each case gives a row: value, bound, gap, time and peak memory of a process of its own, next to the
results of other tools on the same graph, see ``peers.py``. ``asked`` is a requirement in addition
to the target of the value; ``met`` covers both.

``PLACER_SOLVER_CASES="models,neurips20 layer_bert24"`` runs only the cases of a group
(``contiguous``, ``free``, ``latency``, ``pipedream``, ``models``, ``memory``, ``steps``,
``replicas``, ``by-stage``, ``overhead``, ``large``) or whose names start with the given text. Rows
of other cases stay if machine and versions are the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .. import record


def run(chosen: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Measure every row.

    Args:
        chosen: groups, or starts of case names; if empty, the ones that the environment names, or
            all.

    Raises:
        ValueError: an entry selects nothing.
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
