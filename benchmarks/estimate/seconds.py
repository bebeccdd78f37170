"""The time of an estimate of a Llama with 32 blocks and 7 billion parameters, imports included."""

from __future__ import annotations

import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

from .. import record

_RUNS = 3
_TARGET_S = 10.0
_PROGRAM = """
import torch
from placer import PlacementRequest, solve, zoo
from placer.estimator.fake_profile import estimated_profile
from placer.schema import Cluster, Device, Link

with torch.device("meta"):
    model = zoo.llama(32, 4096, 32, 32, 11008, 32000).bfloat16()
names = ("cuda:0", "cuda:1")
cluster = Cluster(
    devices=tuple(
        Device(name=name, type="GPU", memory_bytes=24 * 2**30, host="gpus") for name in names
    ),
    links=tuple(
        Link(source=a, target=b, bandwidth_bytes_per_s=25e9) for a, b in (names, names[::-1])
    ),
)
profile = estimated_profile(model, torch.zeros(1, 2048, dtype=torch.long), cluster)
print(solve(PlacementRequest(profile=profile, objective="memory", time_limit_s=5)).status)
"""


def row() -> dict[str, Any]:
    """Return the row, the median of several processes."""
    times = [_run_s() for _ in range(_RUNS)]
    return record.row(
        "Llama, 32 blocks, 6.7 billion parameters, bf16, training, 1 x 2048 tokens",
        "estimate and placement on two devices, imports included",
        "s",
        float(f"{statistics.median(times):.4g}"),
        spread=(float(f"{min(times):.4g}"), float(f"{max(times):.4g}")),
        target=_TARGET_S,
    )


def _run_s() -> float:
    began = perf_counter()
    subprocess.run([sys.executable, "-P", "-c", _PROGRAM], check=True)
    return perf_counter() - began
