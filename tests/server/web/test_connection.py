"""Limits on the size and the time of request heads."""

from __future__ import annotations

import json
import socket
from contextlib import closing

import httpx
import pytest

from placer_server.app import background
from placer_server.settings import Settings
from placer_server.web import connection

WAIT_S = 20


@pytest.fixture(scope="module")
def port():
    with background(Settings(port=0, database=":memory:", workers=1, log_level="critical")) as url:
        yield int(url.rpartition(":")[2])


@pytest.fixture
def connect(port):
    """Open a connection to the service."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)) as client:
        yield client


def answer(client):
    """Return status and problem of the answer after which the service closes the connection."""
    received = b""
    while part := client.recv(65536):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


START = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: "


@pytest.mark.parametrize("part", [b"X-Many: 1\r\n", b"x"], ids=["many headers", "one long header"])
def test_a_head_that_is_too_large_is_431(connect, part):
    filling = part * (connection.MAX_HEAD_BYTES // len(part))
    connect.sendall(START + filling)
    status, problem = answer(connect)
    assert (status, problem["type"]) == (431, "urn:placer:problem:head-too-large")


@pytest.mark.parametrize(
    "head",
    [
        START + b"x" * connection.MAX_HEAD_BYTES,
        START + b"1" + b"\r\nX-Many: 1" * (connection.MAX_HEAD_BYTES // len(b"X-Many: 1\r\n")),
        b"GET /" + b"x" * connection.MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: 127.0.0.1",
    ],
    ids=["one long header", "many headers", "a long path"],
)
def test_a_head_that_is_too_large_is_431_also_where_all_of_it_comes_at_once(connect, head):
    # What came in one piece, or ended in its second, could have 128 KiB and more.
    connect.sendall(head + b"\r\n\r\n")
    status, problem = answer(connect)
    assert (status, problem["type"]) == (431, "urn:placer:problem:head-too-large")


def test_a_head_without_end_is_not_taken(connect):
    connect.sendall(START)
    with pytest.raises(OSError, match=r"reset|pipe"):
        for _ in range(1000):  # ten megabytes
            connect.sendall(b"x" * 10_000)


def test_large_headers_within_the_limit_are_read(connect):
    connect.sendall(START.replace(b"X-Long", b"Connection: close\r\nX-Long"))
    for _ in range(5):
        connect.sendall(b"x" * 10_000)
    connect.sendall(b"\r\n\r\n")
    assert answer(connect)[0] == 200


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n", b"GET /healthz HTT"], ids=["nothing", "an empty line", "half a head"]
)
def test_a_connection_on_which_no_request_comes_is_closed(connect, monkeypatch, sent, port):
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with closing(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)) as client:
        client.sendall(sent)
        received = b""
        while part := client.recv(4096):
            received += part
    assert (b" 408 " in received) == sent.startswith(b"GET")


def test_who_waits_for_an_answer_is_not_cut_off_by_the_begin_of_the_next_request(
    monkeypatch, solvers, request_body
):
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    body = json.dumps(request_body()).encode()
    head = (
        b"POST /v1/placements?wait=1 HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: application/json\r\n"
    )
    settings = Settings(
        port=0, database=":memory:", workers=1, log_level="critical", stop_grace_s=5.0
    )
    with background(settings, solver=solvers.until_stopped) as url:
        with closing(
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=WAIT_S)
        ) as client:
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /hea")
            assert b" 202 " in client.recv(4096)


def test_what_is_no_http_is_a_problem_as_everything_else(connect):
    connect.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    status, problem = answer(connect)
    assert (status, problem["type"]) == (400, "urn:placer:problem:malformed-http")


@pytest.mark.parametrize(
    ("sent", "status"),
    [(START + b"x" * connection.MAX_HEAD_BYTES, 431), (b"GET /", 408), (b"\x16\x03\r\n\r\n", 400)],
)
def test_what_is_refused_before_its_head_is_read_is_counted(monkeypatch, sent, status):
    # It never comes to the application, whose middleware counts: a flood of it was in no metric.
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with background(Settings(port=0, database=":memory:", workers=1, log_level="critical")) as url:
        with closing(
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=WAIT_S)
        ) as client:
            client.sendall(sent)
            assert answer(client)[0] == status
        told = httpx.get(f"{url}/metrics").text
    assert f'placer_requests_total{{method="other",route="unknown",status="{status}"}} 1.0' in told
