"""On real GPUs: every kind of job of the executor's benchmark runs, at tiny sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ENGINES = [
    "ours",
    "DDP",
    "DDP-compiled",
    "FSDP2",
    "torch.distributed",
    "placer.distributed",
    "tutorial",
]
JOBS = [
    *(f"gpt@2:{engine}" for engine in ENGINES),
    "unet@2:ours",
    "unet@2:torch.distributed zero-bubble",
    "large@2",
    "stream-gpt@2",
    "switching",
    "overhead",
    "tutorial",
    "compile-gpt",
]


@pytest.mark.gpu
@pytest.mark.timeout(450)
def test_every_kind_of_job_gives_values_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    result = tmp_path / "rows.json"
    program = (
        "import json, pathlib, benchmarks.executor as e\n"
        f"if __name__ == '__main__':\n    rows = e.run({JOBS!r})\n"
        f"    pathlib.Path({str(result)!r}).write_text(json.dumps(rows))"
    )
    environment = os.environ | {
        "PLACER_EXECUTOR_TINY": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-c", program]
    # its output tells the time of each job, also when it takes too long
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=400)
    rows = json.loads(result.read_text())
    measures = [row["measure"] for row in rows]
    assert {"training step", "training step, DDP", "training step, FSDP2"} <= set(measures)
    assert not [
        measure
        for measure in measures
        if measure.startswith("no value") and "not installed" not in measure
    ]
