"""State of this node's GPUs for ``/metrics``, read from ``nvidia-smi`` if it is installed."""

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
QUERY_FIELDS = ("uuid", "name", "memory.used", "memory.total", "utilization.gpu", "temperature.gpu")
MIB = 2**20


async def watch_gpus(metrics: Metrics) -> None:
    """Read the state of the GPUs every fifteen seconds, if ``nvidia-smi`` is installed."""
    program = shutil.which("nvidia-smi")
    while program is not None:
        try:
            output = await _query(program)
        except (OSError, TimeoutError) as error:
            log.warning(
                "the state of the GPUs is unknown: %s", error or "nvidia-smi does not answer"
            )
            metrics.forget_gpus()
        else:
            record_gpus(metrics, output)
        await asyncio.sleep(EVERY_S)


async def _query(program: str) -> str:
    command = (program, f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv,noheader,nounits")
    # asyncio's subprocesses are not used: at the service's end asyncio would kill nvidia-smi, but
    # not the processes that nvidia-smi has started.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await asyncio.to_thread(process.communicate)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                # Kill its whole process group: a child of it would keep the pipe open.
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise OSError(f"nvidia-smi ended with {process.returncode}")
    return output.decode(errors="replace")


def record_gpus(metrics: Metrics, output: str) -> None:
    """Record the output of ``nvidia-smi``; values that it does not know are left out."""
    metrics.forget_gpus()
    for row in csv.reader(io.StringIO(output), skipinitialspace=True):
        if len(row) != len(QUERY_FIELDS):
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
            except ValueError:
                # "[N/A]": this GPU does not report the value.
                continue
            gauge.labels(uuid, name).set(known * unit)
