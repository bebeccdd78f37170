"""The time of an estimate of a Llama with 32 blocks and 7 billion parameters, imports included.

Processor time counts, with one thread: other programs on the machine do not change it, and on an
idle core it is the time that a user waits.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from typing import Any

from .. import record

CASE = "Llama, 32 blocks, 6.7 billion parameters, bf16, training, 1 x 2048 tokens"
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
        Device(name=name, type="GPU", memory_bytes=40 * 2**30, host="gpus") for name in names
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
        CASE,
        "estimate and placement on two devices, imports included, processor time",
        "s",
        _rounded(statistics.median(times)),
        spread=(_rounded(min(times)), _rounded(max(times))),
        target=_TARGET_S,
    )


def _run_s() -> float:
    before = _processor_s()
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-P", "-c", _PROGRAM], check=True, env=alone)
    return _processor_s() - before


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
