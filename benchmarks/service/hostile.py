"""The service under hostile bodies, and under requests generated from its OpenAPI document."""

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
    """The results of hostile bodies.

    Attributes:
        sent: the number of bodies.
        failures: the number of answers with a 5xx.
        largest_bytes: the size of the largest problem in an answer.
        growth_percent: the service's memory after all bodies relative to after the first fifth.
    """

    sent: int
    failures: int
    largest_bytes: int
    growth_percent: float


def send(count: int = BODIES, seed: int = 0) -> Hostile:
    """Send bodies one after another, and check every answer."""
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
    """Return how many bodies a coverage-guided fuzzer tried, and its findings.

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
    """Return the findings of schemathesis with all its checks."""
    with serving(workers=1, default_wait_s=1) as server:
        return contract.check(f"http://127.0.0.1:{server.port}", CONTRACT_S, examples=100)
