"""A longer mixed load.

It contains valid and invalid requests, stopped solves, and clients that disconnect during a
request.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from random import Random
from typing import Any, NamedTuple

from . import bodies
from .load import Connection, Reply, message, request_body
from .server import Server, serving

SECONDS = float(os.environ.get("PLACER_SERVICE_SOAK_S", "60"))
CLIENTS = 4
SETTLED = 0.25
"""Of the time, after which memory is held to be what it stays: imports, caches and pools are there
by then."""

LAYERS = 12


class Soak(NamedTuple):
    """The results of the load.

    Attributes:
        requests: the number of requests.
        accepted: the jobs that the service accepted.
        unanswered: the number of accepted jobs with no placement at the end, or with several.
        failures: the number of answers with a 5xx.
        growth_percent: the service's memory at the end relative to its memory after warm-up.
    """

    requests: int
    accepted: int
    unanswered: int
    failures: int
    growth_percent: float


class Client:
    """A client in its own thread; several run at the same time."""

    def __init__(self, server: Server, number: int) -> None:
        self._server, self._connection = server, server.connect()
        self._random = Random(number)
        self._hostile = bodies.bodies(number)
        self._number, self._turn = number, 0
        self.accepted: set[str] = set()
        self.statuses: Counter[int] = Counter()

    def run(self, until: float) -> None:
        """Send requests in turn until it is time."""
        deeds: list[Callable[[], None]] = [
            self._new,
            self._new,
            self._again,
            self._faulty,
            self._stopped,
            self._gone,
        ]
        while time.monotonic() < until:
            self._random.choice([*deeds, self._listed, self._judged])()

    def _note(self, reply: Reply) -> Reply:
        self.statuses[reply.status] += 1
        if reply.status in (200, 202) and b'"id"' in reply.body:
            self.accepted.add(json.loads(reply.body)["id"])
        return reply

    def _body(self, **fields: Any) -> bytes:
        self._turn += 1
        return request_body(
            LAYERS, seed=self._number * 10_000_000 + self._turn, time_limit_s=2, workers=1, **fields
        )

    def _new(self) -> None:
        self._note(self._connection.post("/v1/placements?wait=5", self._body()))

    def _again(self) -> None:
        self._note(
            self._connection.post(
                "/v1/placements?wait=5", request_body(LAYERS, seed=self._random.randrange(20))
            )
        )

    def _faulty(self) -> None:
        path, body = next(islice(self._hostile, 1))
        self.statuses[self._connection.post(path, body).status] += 1

    def _stopped(self) -> None:
        reply = self._note(self._connection.post("/v1/placements?wait=0", self._body()))
        if reply.status == 202:
            self._note(self._connection.delete(f"/v1/placements/{reply.json()['id']}"))

    def _gone(self) -> None:
        """Disconnect in the middle of the body, or before the answer."""
        raw = message("POST", "/v1/placements?wait=5&on_disconnect=stop", self._body())
        with socket.create_connection(("127.0.0.1", self._server.port)) as leaving:
            leaving.sendall(raw if self._random.random() < 0.5 else raw[: len(raw) // 2])

    def _listed(self) -> None:
        self.statuses[self._connection.get("/v1/placements?limit=20").status] += 1
        self.statuses[self._connection.get("/readyz").status] += 1

    def _judged(self) -> None:
        if self.accepted and self._random.random() < 0.2:
            key = self._random.choice(sorted(self.accepted)[:50])
            self.statuses[self._connection.get(f"/v1/placements/{key}/timeline").status] += 1


def soak(seconds: float = SECONDS) -> Soak:
    """Load a service that uses Placer's own solver, and return what it did."""
    # the small cache is full before memory has settled
    with serving(workers=1, queue=16, keep=1_000_000, cache_bytes=2**20) as server:
        clients = [Client(server, number) for number in range(CLIENTS)]
        began = time.monotonic()
        threads = [
            threading.Thread(target=client.run, args=(began + seconds,)) for client in clients
        ]
        for thread in threads:
            thread.start()
        time.sleep(SETTLED * seconds)
        settled = server.memory_bytes()
        for thread in threads:
            thread.join()
        grown = server.memory_bytes()
        accepted = set().union(*(client.accepted for client in clients))
        unanswered = not_answered_once(server.connect(), accepted)
    statuses = sum((client.statuses for client in clients), Counter())
    failures = sum(count for status, count in statuses.items() if status >= 500)
    return Soak(statuses.total(), len(accepted), unanswered, failures, 100 * (grown / settled - 1))


def not_answered_once(connection: Connection, accepted: Collection[str]) -> int:
    """Count the ids without a placement after their solves ended, or with several entries."""
    missing = {key for key in accepted if not _answered(connection, key)}
    times = Counter(_listed(connection))
    return sum(key in missing or times[key] != 1 for key in accepted)


def _listed(connection: Connection) -> Iterator[str]:
    """Yield the ids of all placements as the service lists them."""
    cursor = ""
    while True:
        page = connection.get(f"/v1/placements?limit=200{cursor}").json()
        yield from (item["id"] for item in page["placements"])
        if not page["next"]:
            return
        cursor = f"&cursor={page['next']}"


def _answered(connection: Connection, key: str) -> bool:
    reply = connection.get(f"/v1/placements/{key}?wait=60")
    return reply.status == 200 and reply.json()["id"] == key
