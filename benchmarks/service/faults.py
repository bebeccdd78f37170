"""The fate of accepted jobs when a process is killed meanwhile, or the disk is full.

Each fault comes from outside, as an operator or the kernel would cause it: ``kill -9``, a limit on
the size of the service's files, or ``libfaketime`` between the service and its clock.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from placer_server.store.write_retries import RETRY_S

from .load import Connection, request_body
from .postgres import Postgres, postgres
from .server import Server, serving, start, wait_ready
from .soak import not_answered_once

LAYERS = 12
JOBS = 30
LEASE_S = 2
CLOCK_S = 1
"""So often the file is read that says what time it is."""
QUIET = {"log_level": "critical"}
"""A service says of each thing that it cannot write that it cannot."""


class Survived(NamedTuple):
    """The fate of the jobs.

    Attributes:
        accepted: the number of jobs that the service accepted.
        unanswered: the number of accepted jobs with no placement at the end, or with several.
        seconds: the time from the fault until all were answered.
    """

    accepted: int
    unanswered: int
    seconds: float


def worker_killed() -> Survived:
    """Kill two workers while they solve.

    A third death would count the job as one that kills workers.
    """
    with serving(workers=1, queue=JOBS, **QUIET) as server:
        accepted = accept(
            server.connect(),
            range(5),
            layers=120,
            time_limit_s=2,
            constraints={"contiguous": False},
        )
        killed: set[int] = set()
        began = time.monotonic()
        for _ in range(2):
            killed.add(_kill_worker(server, killed))
            time.sleep(0.3)
        return survived(server.connect(), accepted, began)


def server_killed() -> Survived:
    """Kill the service twice, and start it again on its file."""
    with TemporaryDirectory() as folder:
        accepted: set[str] = set()
        for turn in range(2):
            process, port = start("", folder, workers=1, queue=2 * JOBS, **QUIET)
            wait_ready(port)
            accepted |= accept(Connection(port), range(turn * JOBS, (turn + 1) * JOBS))
            process.kill()
            process.wait()
        process, port = start("", folder, workers=1, queue=2 * JOBS, **QUIET)
        try:
            wait_ready(port)
            return survived(Connection(port), accepted, time.monotonic())
        finally:
            process.terminate()
            process.wait(60)


def postgres_killed() -> Survived:
    """Kill PostgreSQL with all its processes, wait a second, and start it again."""
    with postgres() as database:
        with serving(database=database.new_database(), workers=1, queue=JOBS, **QUIET) as server:
            accepted = accept(server.connect(), range(JOBS))
            began = time.monotonic()
            database.kill()
            time.sleep(1)
            database.start()
            wait_ready(server.port)
            return survived(server.connect(), accepted, began)


def replica_killed() -> tuple[Survived, int]:
    """Kill one of two replicas on a PostgreSQL; the other answers.

    Returns:
        The fate of the jobs, and how many jobs were solved twice.
    """
    with postgres() as database, TemporaryDirectory() as folder:
        url = database.new_database()
        shared = {"database": url, "workers": 1, "queue": JOBS, "lease_s": LEASE_S, **QUIET}
        process, port = start("", folder, **shared)
        wait_ready(port)
        with serving(**shared) as other:
            accepted = accept(Connection(port), range(JOBS)) | accept(
                other.connect(), range(JOBS, 2 * JOBS)
            )
            began = time.monotonic()
            process.kill()
            process.wait()
            found = survived(other.connect(), accepted, began)
        return found, _solved_twice(database)


def _solved_twice(database: Postgres) -> int:
    """Return how many more solves than jobs two live replicas with shared jobs made."""
    url = database.new_database()
    shared = {"database": url, "workers": 1, "queue": JOBS, "lease_s": LEASE_S, **QUIET}
    with serving(**shared) as one, serving(**shared) as other:
        accepted = accept(one.connect(), range(JOBS)) | accept(other.connect(), range(JOBS))
        survived(one.connect(), accepted, time.monotonic())
        return solves(one) + solves(other) - len(accepted)


def disk_full() -> Survived:
    """Stop the growth of the service's files for a while; all jobs that it then accepts count."""
    with serving(workers=1, queue=4 * JOBS, **QUIET) as server:
        connection = server.connect()
        accepted = accept(connection, range(JOBS))
        _, most = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (2**16, most))
        accepted |= accept(connection, range(JOBS, 2 * JOBS))
        time.sleep(1)
        began = time.monotonic()
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (most, most))
        accepted |= accept(connection, range(2 * JOBS, 3 * JOBS))
        # until a retry, answers that could not be written are not found
        time.sleep(2 * RETRY_S)
        return survived(connection, accepted, began)


def clock_jumped() -> Survived:
    """Move the service's clock a day ahead, then two back, while jobs wait and are solved.

    Raises:
        RuntimeError: libfaketime is not installed, or did not reach the service.
    """
    with TemporaryDirectory() as folder:
        clock = Path(folder, "clock")
        clock.write_text("+0")
        with serving(environment=_faked(clock), workers=1, queue=3 * JOBS, **QUIET) as server:
            connection, accepted = server.connect(), set()
            began = time.monotonic()
            for turn, offset in enumerate(("+0", "+1d", "-1d")):
                clock.write_text(offset)
                accepted |= accept(connection, range(turn * JOBS, (turn + 1) * JOBS))
                time.sleep(CLOCK_S + 0.5)  # some jobs are answered on each day
            found = survived(connection, accepted, began)
            written = [
                one["created_s"]
                for one in connection.get("/v1/placements?limit=200").json()["placements"]
            ]
        if max(written) - min(written) < 86_400:
            raise RuntimeError("libfaketime did not reach the service's clock")
        return found


def _faked(clock: Path) -> dict[str, str]:
    """Return variables that let a process read its wall clock's offset from a file."""
    library = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
    if library is None:
        raise RuntimeError("libfaketime is not installed: apt-get install libfaketime")
    without_monotonic = {"DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": str(CLOCK_S),
        **without_monotonic,
    }


def accept(
    connection: Connection, seeds: Iterable[int], layers: int = LAYERS, **fields: object
) -> set[str]:
    """Send requests without waiting for answers, and return the ids of the accepted ones."""
    replies = [
        connection.post(
            "/v1/placements?wait=0", request_body(layers, seed=seed, workers=1, **fields)
        )
        for seed in seeds
    ]
    return {reply.json()["id"] for reply in replies if reply.status in (200, 202)}


def survived(connection: Connection, accepted: set[str], began: float) -> Survived:
    """Wait for every answer, and return the fate of the jobs."""
    unanswered = not_answered_once(connection, accepted)
    return Survived(len(accepted), unanswered, time.monotonic() - began)


def solves(server: Server) -> int:
    """Return how many solves this service made according to its metrics.

    Solves with the label ``elsewhere`` were answered by another replica.
    """
    told = server.connect().get("/metrics").body.decode()
    counts = re.findall(
        r'^placer_solves_total\{status="(?!elsewhere)\w+"\} (\S+)$', told, re.MULTILINE
    )
    return round(sum(map(float, counts)))


def _kill_worker(server: Server, killed: set[int]) -> int:
    """Kill the process that solves: a child of the process from which workers are forked."""
    pid = wait_for(lambda: next(iter(_workers(server) - killed), 0))
    time.sleep(0.2)  # so that it is in the middle of its solve
    os.kill(pid, signal.SIGKILL)
    return pid


def _workers(server: Server) -> set[int]:
    return {child for parent in _children(server.process.pid) for child in _children(parent)}


def _children(parent: int) -> set[int]:
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.add(int(status.parent.name))
    return found


def wait_for(find: Callable[[], int], seconds: float = 30.0) -> int:
    """Return the result of ``find`` once it is not zero."""
    end = time.monotonic() + seconds
    while not (found := find()):
        if time.monotonic() > end:
            raise TimeoutError("no worker began")
        time.sleep(0.01)
    return found
