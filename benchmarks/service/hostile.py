"""The service under bodies that mean it no good, and under a client that makes up requests from its
document.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import islice
from typing import NamedTuple

from . import bodies, contract
from .load import message
from .server import serving

BODIES = int(os.environ.get("PLACER_SERVICE_BODIES", "20000"))
"""100,000 is what was asked for; they take a while."""

CONTRACT_S = float(os.environ.get("PLACER_SERVICE_CONTRACT_S", "60"))


class Hostile(NamedTuple):
    """What became of hostile bodies.

    Attributes:
        sent: how many there were.
        failures: how many were answered with a 5xx.
        largest_bytes: the largest problem in an answer.
        growth_percent: memory of the service after all of them, against after the first fifth.
    """

    sent: int
    failures: int
    largest_bytes: int
    growth_percent: float


def send(count: int = BODIES, seed: int = 0) -> Hostile:
    """Send bodies one after another, and look at every answer."""
    failures = largest = warm = 0
    with serving("waiting", workers=1, queue=8, default_wait_s=0, keep=1000) as server:
        connection = server.connect()
        for number, (path, body) in enumerate(islice(bodies.bodies(seed), count)):
            reply = connection.send(message("POST", path, body))
            failures += reply.status >= 500
            if reply.status >= 400:
                largest = max(largest, len(reply.body))
            if number == count // 5:
                warm = server.memory_bytes()
        growth = 100 * (server.memory_bytes() / warm - 1) if warm else 0.0
    return Hostile(count, failures, largest, growth)


def fuzz(count: int = BODIES) -> tuple[int, int]:
    """So many bodies of a coverage-guided fuzzer for what reads them; how many there were, and
    findings.

    Raises:
        RuntimeError: the fuzzer did not run.
    """
    command = [sys.executable, "-m", "benchmarks.service.fuzz", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    runs = re.search(r"Done (\d+) runs|number_of_executed_units: (\d+)", done.stderr + done.stdout)
    if runs is None:
        raise RuntimeError(f"the fuzzer ended with {done.returncode}: {done.stderr[-2000:]}")
    return int(runs[1] or runs[2]), int(done.returncode != 0)


def contract_findings() -> contract.Contract:
    """What schemathesis finds with all its checks."""
    with serving(workers=1, default_wait_s=1) as server:
        return contract.check(f"http://127.0.0.1:{server.port}", CONTRACT_S, examples=100)
