"""The state of this node's GPUs for ``/metrics``, as ``nvidia-smi`` tells it; nothing where there
is none.
"""

from __future__ import annotations

import asyncio
import csv
import io
import logging
import os
import shutil
import signal
import subprocess
from contextlib import suppress

from .metrics import Metrics

log = logging.getLogger("placer_server")

EVERY_S = 15.0
TIMEOUT_S = 10.0
ASKED = ("uuid", "name", "memory.used", "memory.total", "utilization.gpu", "temperature.gpu")
MIB = 2**20


async def watch_gpus(metrics: Metrics) -> None:
    """Look every fifteen seconds, if there is ``nvidia-smi``."""
    program = shutil.which("nvidia-smi")
    while program is not None:
        try:
            said = await _ask(program)
        except (OSError, TimeoutError) as error:
            log.warning("the GPUs' state is not known: %s", error or "nvidia-smi does not answer")
            metrics.forget_gpus()
        else:
            note(metrics, said)
        await asyncio.sleep(EVERY_S)


async def _ask(program: str) -> str:
    command = (program, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits")
    # Not asyncio's own way to start it: a service that ends meanwhile would kill it without what it
    # has started.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            said, _ = await asyncio.to_thread(process.communicate)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                # with what it started, which holds the pipe open
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise OSError(f"nvidia-smi ended with {process.returncode}")
    return said.decode(errors="replace")


def note(metrics: Metrics, said: str) -> None:
    """Take over what ``nvidia-smi`` said of each GPU; what it does not know of one is left out."""
    metrics.forget_gpus()
    for row in csv.reader(io.StringIO(said), skipinitialspace=True):
        if len(row) != len(ASKED):
            continue
        uuid, name, *values = row
        gauges = (
            (metrics.gpu_memory_used, MIB),
            (metrics.gpu_memory_total, MIB),
            (metrics.gpu_busy, 0.01),
            (metrics.gpu_celsius, 1),
        )
        for (gauge, unit), value in zip(gauges, values, strict=True):
            try:
                known = float(value)
            except ValueError:  # "[N/A]"
                continue
            gauge.labels(uuid, name).set(known * unit)
