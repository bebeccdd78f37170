"""Runs the GPU tests and records the result; or tells whether the record speaks for the present
code.

    python tests/gpu.py [--quick] [--workers N] [FOLDER ...]   run, and write tests/gpu-record.json
    python tests/gpu.py --check    compare the record with the code, without torch

A run goes through the test folders one after another and records each as soon as it has ended, so
that a run which is killed loses one folder; naming folders splits a run into several. Tests with
the marker ``alone`` measure time or a device's whole memory: they run one by one. The others of a
folder run in several processes at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import gpu_record  # noqa: E402
import recorded_runs  # noqa: E402
import run_record  # noqa: E402
from module_hashes import Sources  # noqa: E402

PROCESSORS_PER_WORKER, MOST_WORKERS = 4, 8
"""A test process captures and compares on the CPU while another one uses the GPUs; each holds 0.5
GB of every GPU."""

_FACTS = """
import json, platform, torch
count = torch.cuda.device_count()
gpus = [torch.cuda.get_device_name(index) for index in range(count)]
versions = {
    "python": platform.python_version(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
}
print(json.dumps({"gpu_count": count, "gpus": gpus, **versions}))
"""


def main() -> int:
    """Run or check; the exit code."""
    parser = recorded_runs.parser("python tests/gpu.py", __doc__ or "", _workers())
    parser.add_argument(
        "--quick", action="store_true", help="run the tests with the marker quick: every path once"
    )
    asked = parser.parse_args()
    sources = Sources(ROOT)
    if asked.check:
        return check(sources)
    known = sources.tests_with("quick") if asked.quick else sources.marked_tests
    try:
        files = recorded_runs.chosen(ROOT, asked.folders, known)
    except LookupError as error:
        kind = "quick " * asked.quick
        parser.error(
            f"{error.args[0]!r} has no {kind}GPU tests; folders that have some: {', '.join(known)}"
        )
    return run(sources, files, asked.quick, asked.workers)


def check(sources: Sources) -> int:
    """Print what is outdated; 1 if anything is."""
    lines = gpu_record.outdated(gpu_record.read(sources.root), sources)
    if lines:
        print(
            *lines,
            "Run these tests again on two or more GPUs: make gpu, for some FOLDERS='...'",
            sep="\n",
        )
    return int(bool(lines))


def run(sources: Sources, files: dict[str, list[Path]], quick: bool, workers: int) -> int:
    """Run the test files of each folder and record them; 1 if any test failed."""
    selected = "gpu and quick" if quick else "gpu"
    facts = _facts()
    if not facts["gpu_count"]:
        print("GPU tests need CUDA devices, and torch sees none", file=sys.stderr)
        return 2
    rows, failures = [], {}
    timed = {test for tests in sources.tests_with("alone").values() for test in tests}
    for folder, tests in files.items():
        entry: dict[str, Any] = {"run": gpu_record.QUICK if quick else gpu_record.FULL, **facts}
        entry |= run_record.code(folder, sources)  # as it is before the tests run
        began = perf_counter()
        outcome = recorded_runs.Outcome()
        _pytest(sources.root, tests, f"{selected} and not alone", workers, outcome)
        if some := [test for test in tests if test in timed]:
            _pytest(sources.root, some, f"{selected} and alone", 1, outcome)
        entry |= {name: getattr(outcome, name) for name in recorded_runs.COUNTS}
        entry["seconds"] = round(perf_counter() - began, 1)
        entry["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
        gpu_record.add(sources.root, folder, entry)
        failures |= outcome.failures
        rows.append((folder, entry))
        print(
            f"{folder}: {outcome.passed} passed, {outcome.failed} failed in {entry['seconds']} s",
            flush=True,
        )
    versions = f"torch {facts['torch']}, CUDA {facts['cuda']}"
    recorded_runs.print_summary(
        rows, failures, f"{facts['gpu_count']} x {facts['gpus'][0]}, {versions}"
    )
    return int(bool(failures))


def _workers() -> int:
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // PROCESSORS_PER_WORKER))


def _facts() -> dict[str, Any]:
    """Ask a separate process for GPUs and versions, so that this one holds no GPU memory."""
    answer = subprocess.run(
        [sys.executable, "-c", _FACTS], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise SystemExit(f"torch cannot tell its GPUs:\n{answer.stderr}")
    facts: dict[str, Any] = json.loads(answer.stdout)
    return facts


def _pytest(
    root: Path, tests: list[Path], marked: str, workers: int, outcome: recorded_runs.Outcome
) -> None:
    """Run the tests with these markers, with the processors shared out among the processes."""
    threads = str(max(1, (os.cpu_count() or 1) // workers // 2))
    recorded_runs.run_pytest(root, tests, marked, workers, outcome, {"OMP_NUM_THREADS": threads})


if __name__ == "__main__":
    sys.exit(main())
