"""Solver requests of every kind, each small enough that the search ends with a proof.

``UNIQUE`` are requests with one optimal map, up to a renaming of equal devices. That was found by
trying every map. For ``OBJECTIVE`` only the objective is compared.
"""

from __future__ import annotations

from typing import Any

from public_api import BRANCHES, MIB, question

FREE = {"contiguous": False}
WITHOUT_MEMORY = {"memory_mib": 24}

UNIQUE: dict[str, dict[str, Any]] = {
    "chain": question(chunks=4),
    "branches": question(edges=BRANCHES, chunks=4, size=4 * MIB),
    "free": question(edges=BRANCHES, constraints=FREE, chunks=2, kinds=("a", "b")),
    "latency": question(
        edges=BRANCHES, training=False, objective="latency", kinds=("a", "b"), constraints=FREE
    ),
    "unlike devices": question(edges=BRANCHES, kinds=("a", "b", "c"), chunks=4),
    "unlike links": question(
        chunks=4, size=24 * MIB, devices={"unlike_links": True, "missing": [(2, 0), (0, 2)]}
    ),
    "memory limits": question(chunks=6, devices={"memory_mib": (90, 80, 70)}),
    "inference, overlapped transfers": question(
        training=False, chunks=4, transfers="overlapped", size=8 * MIB, kinds=("a", "b")
    ),
    "recompute": question(
        chunks=6, constraints={"recompute": "auto"}, devices={"memory_mib": (100, 72, 60)}
    ),
    "pinned, forbidden and colocated layers": question(
        edges=BRANCHES,
        chunks=4,
        constraints={
            "pinned": {"l0": "d1"},
            "forbidden": {"l7": ["d1"], "*": ["d2"]},
            "colocated": [["l2", "l3"]],
            "max_layers": 6,
        },
    ),
    "step under 1f1b": question(
        objective="step",
        schedule="1f1b",
        chunks=6,
        kinds=("a", "b"),
        constraints={"max_devices": 2},
    ),
    "step under zero-bubble": question(
        objective="step", schedule="zero-bubble", chunks=4, kinds=("a", "b")
    ),
}

OBJECTIVE: dict[str, dict[str, Any]] = {
    "tied parameters": question(
        chunks=4,
        profile={
            "colocated": [["l0", "l7"]],
            "tied": [{"layers": ["l0", "l7"], "gradient_bytes": MIB, "param_bytes": MIB}],
        },
    ),
    "memory": question(edges=BRANCHES, objective="memory", chunks=4),
    "step, every schedule and two batch sizes": question(
        objective="step",
        schedule="auto",
        kinds=("a", "b"),
        batch_size=16,
        more_batch_sizes={2: 0.55},
    ),
    "step in steady state": question(
        objective="step",
        schedule="fill-drain",
        step_kind="steady-state",
        chunks=4,
        kinds=("a", "b"),
    ),
    "devices": question(
        edges=BRANCHES, objective="devices", bottleneck_ms=24.0, kinds=("a",) * 4, chunks=4
    ),
    "ties": question(
        kinds=("a", "a"),
        extra={n: {"forward_ms": {"a": 1.0}, "backward_ms": {"a": 2.0}} for n in range(8)},
        break_ties=True,
        chunks=4,
    ),
    "explained limits": question(
        chunks=4, explain=True, kinds=("a", "a"), devices={"memory_mib": (80, 160)}
    ),
    "too little memory": question(chunks=4, devices=WITHOUT_MEMORY),
    "requirements that contradict": question(
        chunks=4,
        kinds=("a", "a"),
        constraints={
            "min_devices": 2,
            "max_layers": 5,
            "colocated": [["l0", "l7"]],
            "contiguous": True,
        },
    ),
}
