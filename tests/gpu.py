"""Runs the GPU tests and records the result; or tells whether the record speaks for the present
code.

    python tests/gpu.py [--quick] [--workers N] [FOLDER ...]   run, and write tests/gpu-record.json
    python tests/gpu.py --check    compare the record with the code, without torch

A run goes through the test folders one after another and records each as soon as it has ended, so
that a run which is killed loses one folder; naming folders splits a run into several. Tests with
the marker ``alone`` measure time or a device's whole memory: they run one by one. The others of a
folder run in several processes at the same time."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import gpu_record  # noqa: E402
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


@dataclass
class Outcome:
    """What became of the tests of one folder.

    Attributes:
        passed: number of tests.
        failed: number of tests; a process that ended early counts as one.
        skipped: number of tests.
        failures: the failed tests by name, each with the last line of what it raised.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def main() -> int:
    """Run or check; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python tests/gpu.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="FOLDER",
        help="test folders, with those in them; all if omitted",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run the tests with the marker quick: every path once"
    )
    parser.add_argument(
        "--check", action="store_true", help="run nothing; exit with 1 where the record is outdated"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=_workers(),
        help="processes at the same time (%(default)s here)",
    )
    asked = parser.parse_args()
    sources = Sources(ROOT)
    if asked.check:
        return check(sources)
    return run(
        sources, _chosen(sources, asked.folders, asked.quick, parser), asked.quick, asked.workers
    )


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
        entry |= gpu_record.code(folder, sources)  # as it is before the tests run
        began = perf_counter()
        outcome = Outcome()
        _pytest(sources.root, tests, f"{selected} and not alone", workers, outcome)
        if some := [test for test in tests if test in timed]:
            _pytest(sources.root, some, f"{selected} and alone", 1, outcome)
        entry |= {name: getattr(outcome, name) for name in ("passed", "failed", "skipped")}
        entry["seconds"] = round(perf_counter() - began, 1)
        entry["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
        gpu_record.add(sources.root, folder, entry)
        failures |= outcome.failures
        rows.append((folder, entry))
        print(
            f"{folder}: {outcome.passed} passed, {outcome.failed} failed in {entry['seconds']} s",
            flush=True,
        )
    print()
    for name, why in failures.items():
        print(f"FAILED {name}: {why}")
    print(
        f"{facts['gpu_count']} x {facts['gpus'][0]}, torch {facts['torch']}, CUDA {facts['cuda']}"
    )
    print(f"{'folder':40} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}")
    for folder, entry in rows:
        print(
            f"{folder:40} {entry['passed']:7} {entry['failed']:7} {entry['skipped']:7} "
            f"{entry['seconds']:8}"
        )
    return int(bool(failures))


def _chosen(
    sources: Sources, folders: Sequence[str], quick: bool, parser: argparse.ArgumentParser
) -> dict[str, list[Path]]:
    """The test files to run, by folder."""
    known = sources.tests_with("quick") if quick else sources.gpu_tests
    wanted = [Path(os.path.relpath(Path(folder).resolve(), ROOT)) for folder in folders]
    for name, path in zip(folders, wanted, strict=True):
        if not any(Path(folder).is_relative_to(path) for folder in known):
            parser.error(
                f"{name!r} has no {'quick ' * quick}GPU tests; "
                f"folders that have some: {', '.join(known)}"
            )
    return {
        folder: tests
        for folder, tests in known.items()
        if not wanted or any(Path(folder).is_relative_to(path) for path in wanted)
    }


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


def _pytest(root: Path, tests: Sequence[Path], marked: str, workers: int, outcome: Outcome) -> None:
    """Run the tests with these markers in a process of its own, and add up what became of them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "--import-mode=importlib",
            "-q",
            "-m",
            marked,
        ]
        command += ["-p", "no:cacheprovider", "-p", "no:schemathesis", f"--junitxml={report}"]
        if workers > 1:
            command += ["-n", str(workers), "--dist", "loadgroup"]
        threads = str(max(1, (os.cpu_count() or 1) // workers // 2))
        environment = {"OMP_NUM_THREADS": threads, **os.environ}
        status = subprocess.run(
            [*command, *map(str, tests)], cwd=root, env=environment, check=False
        ).returncode
        if report.exists():
            _count(report, outcome)
    # 1: tests failed, which are counted. 5: no test has these markers.
    if status not in (0, 1, 5):
        outcome.failed += 1
        outcome.failures[" ".join(path.name for path in tests)] = f"pytest ended with {status}"


def _count(report: Path, outcome: Outcome) -> None:
    """Add up a report in JUnit's form."""
    for case in ElementTree.parse(report).iter("testcase"):
        broken = [entry for entry in case if entry.tag in ("failure", "error")]
        if broken:
            outcome.failed += 1
            lines = (broken[0].get("message") or "").strip().splitlines() or [""]
            outcome.failures[f"{case.get('classname')}::{case.get('name')}"] = lines[0][:200]
        elif any(entry.tag == "skipped" for entry in case):
            outcome.skipped += 1
        else:
            outcome.passed += 1


if __name__ == "__main__":
    sys.exit(main())
