"""The service against its own OpenAPI document: schemathesis with all its checks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

CONFIGURATION = Path(__file__).resolve().parent / "schemathesis.toml"


class Contract(NamedTuple):
    """The findings of schemathesis.

    Attributes:
        cases: the number of requests that it made.
        findings: the number of failed checks, each kind once.
        log: its whole output.
    """

    cases: int
    findings: int
    log: str


def check(
    url: str, seconds: float, examples: int, phases: str = "examples,coverage,fuzzing,stateful"
) -> Contract:
    """Let schemathesis generate valid and invalid requests to every path.

    Args:
        url: the URL of the service.
        seconds: the time limit.
        examples: the maximum number of examples for each path and phase.
        phases: the phases of schemathesis.

    Raises:
        RuntimeError: it did not run.
    """
    program = shutil.which("st", path=str(Path(sys.executable).parent)) or shutil.which("st")
    if program is None:
        raise RuntimeError("schemathesis is not installed: pip install 'torch-placer[test]'")
    asked = (
        f"run {url}/openapi.json --checks all --continue-on-failure "
        "--generation-deterministic --no-color"
    )
    limits = [
        "--max-time",
        str(round(seconds)),
        "--max-examples",
        str(examples),
        "--phases",
        phases,
    ]
    with TemporaryDirectory() as notes:  # schemathesis keeps notes in its working directory
        done = subprocess.run(
            [program, "--config-file", str(CONFIGURATION), *asked.split(), *limits],
            capture_output=True,
            text=True,
            timeout=seconds + 300,
            cwd=notes,
        )
    log = done.stdout + done.stderr
    cases = re.search(r"(\d+) generated", log)
    if done.returncode not in (0, 1) or cases is None:
        raise RuntimeError(f"schemathesis ended with {done.returncode}: {log[-2000:]}")
    found = re.search(r"(\d+) unique failures?", log)
    findings = int(found[1]) if found else 0
    return Contract(int(cases[1]), max(findings, done.returncode), log)
