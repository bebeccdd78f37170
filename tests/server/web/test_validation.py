"""Process that checks large bodies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, json, os, signal, sys
from placer_server.openapi import examples
from placer_server.web.validation import INLINE_BYTES, Validator

checker = Validator()
body = json.dumps(examples.requests()["throughput"]["value"]) + " " * INLINE_BYTES
asyncio.run(checker.check(body.encode()))
(process,) = checker._processes._processes
print(process, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def lives(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_it_ends_with_its_service_even_where_that_is_killed():
    # It waited at a pipe of which it held both ends, for ever, and with it the process that workers
    # are forked from.
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM], stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        process = int(service.stdout.readline())
    end = time.monotonic() + 10
    while lives(process) and time.monotonic() < end:
        time.sleep(0.05)
    try:
        assert not lives(process)
    finally:
        if lives(process):
            os.kill(process, 9)
