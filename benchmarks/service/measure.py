"""The measurements of the service, each a function that returns its samples."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from .load import Connection, message, request_body
from .server import Server, serving, start, wait_ready

POST = "/v1/placements?wait=0"


def cache_hits_per_s(rounds: int = 5, requests: int = 2000, **settings: object) -> list[float]:
    """Return cached answers per second of the service's processor time.

    The same 200-layer request is posted repeatedly, and the store has its answer.
    """
    with serving(**settings) as server:
        connection = server.connect()
        raw = message("POST", "/v1/placements?wait=60", request_body())
        expect(connection.send(raw).status, 200)
        return [
            rate(server, requests, lambda _: expect(connection.send(raw).status, 200))
            for _ in range(rounds)
        ]


def posts_per_s(rounds: int = 5, requests: int = 400, **settings: object) -> list[float]:
    """Return accepted requests per second of the service's processor time.

    They are new 200-layer requests, which the service checks and queues.
    """
    template = json.loads(request_body())
    samples = []
    with serving("waiting", workers=1, queue=100_000, **settings) as server:
        connection = server.connect()
        for turn in range(rounds):
            raws = [
                message(
                    "POST", POST, json.dumps({**template, "seed": turn * requests + n}).encode()
                )
                for n in range(requests)
            ]
            samples.append(rate(server, requests, partial(_queue, connection, raws)))
    return samples


def health_ms(rounds: int = 5, requests: int = 400, workers: int = 2) -> list[float]:
    """Return the 99th percentile of /healthz while every worker computes and requests arrive."""
    samples = []
    with serving("spinning", workers=workers, queue=100_000) as server, posting(server):
        connection = server.connect()
        for _ in range(rounds):
            times = []
            for _ in range(requests):
                times.append(1e3 * timed(lambda: expect(connection.get("/healthz").status, 200)))
                time.sleep(0.002)
            samples.append(percentile(times, 0.99))
    return samples


def cold_start_s(rounds: int = 5) -> list[float]:
    """Return the time from the command to the first 200 of /readyz; a worker has run by then."""
    return [_cold_start_s() for _ in range(rounds)]


def stop_ms(rounds: int = 10) -> list[float]:
    """Return the time from DELETE to the best placement so far, for a running solve."""
    samples = []
    with serving(workers=1) as server:
        connection = server.connect()
        for turn in range(rounds):
            body = request_body(
                120, seed=turn, time_limit_s=60, workers=1, constraints={"contiguous": False}
            )
            where = _running(connection, body)
            if where is None:
                continue  # the solve ended before it could be stopped
            began = time.perf_counter()
            reply = connection.delete(where)
            samples.append(1e3 * (time.perf_counter() - began))
            expect(reply.status, 200)
            expect(bool(reply.json()["layer_devices"]), True)
    return samples


def solve_overhead_ms(rounds: int = 20) -> list[float]:
    """Return the time of a new 200-layer request, minus the time that the solver reports."""
    samples = []
    with serving(workers=1) as server:
        connection = server.connect()
        for turn in range(rounds):
            raw = message("POST", "/v1/placements?wait=60", request_body(seed=turn))
            began = time.perf_counter()
            reply = connection.send(raw)
            passed = time.perf_counter() - began
            expect(reply.status, 200)
            samples.append(1e3 * (passed - reply.json()["solve_time_s"]))
    return samples


def _queue(connection: Connection, raws: list[bytes], number: int) -> None:
    expect(connection.send(raws[number]).status, 202)


def _cold_start_s() -> float:
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        process, port = start("", folder)
        try:
            wait_ready(port)
            return time.perf_counter() - began
        finally:
            process.terminate()
            process.wait(60)


def _running(connection: Connection, body: bytes) -> str | None:
    """Return the path of a solve that has found a placement and goes on; None if it ended."""
    reply = connection.post(POST, body)
    where = f"/v1/placements/{reply.json()['id']}"
    while reply.status == 202 and reply.json()["incumbent"] is None:
        time.sleep(0.01)
        reply = connection.get(where)
    time.sleep(0.3)
    return where if connection.get(where).status == 202 else None


@contextmanager
def posting(server: Server) -> Iterator[None]:
    """Post 20 requests with 200 layers a second meanwhile, so that every worker stays busy."""
    template = json.loads(request_body())
    stop = threading.Event()
    connection = server.connect()

    def post() -> None:
        seed = 0
        while not stop.wait(0.05):
            seed += 1
            expect(
                connection.post(POST, json.dumps({**template, "seed": seed}).encode()).status, 202
            )

    poster = threading.Thread(target=post)
    poster.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        stop.set()
        poster.join()


def rate(server: Server, requests: int, send: Callable[[int], Any]) -> float:
    """Return requests per second of the service's processor time."""
    before = server.cpu_s()
    for number in range(requests):
        send(number)
    return requests / (server.cpu_s() - before)


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def percentile(samples: list[float], share: float) -> float:
    """Return the sample below which ``share`` of all samples lie."""
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


def expect(got: Any, wanted: Any) -> None:
    """Raise if an answer is wrong: then the measurement is invalid."""
    if got != wanted:
        raise RuntimeError(f"the service answered {got}, not {wanted}")
