"""A cancelled ``place`` stops its solve on the service; a broken connection does not.

Ctrl-C in ``placer solve`` and a cancelled ``place`` left the solve running on the service to the
end of its time limit.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import solvers_for_tests
from broken_connections import Breaking, Counting

from placer.errors import TimeoutExceeded
from placer.schema import PlacementRequest
from placer_client import AsyncClient, Client
from placer_server.app import background
from placer_server.jobs import solves
from placer_server.openapi import examples
from placer_server.settings import Settings

KEY = "0" * 32
DONE = {"status": "optimal", "objective": "throughput", "objective_value": 1.0, "id": KEY}
RUNNING = {"id": KEY, "status": "running", "incumbent": 7.0, "bound": 3.0, "elapsed_s": 1.0}


@pytest.fixture
def service() -> Iterator[str]:
    """Start a service whose solves continue until they are stopped."""
    settings = Settings(
        port=0, database=":memory:", workers=1, queue=4, log_level="error", stop_grace_s=5.0
    )
    with background(settings, solver=solvers_for_tests.until_stopped) as url:
        yield url


def question(**changes: Any) -> PlacementRequest:
    return PlacementRequest.model_validate(
        examples.requests()["throughput"]["value"] | {"time_limit_s": 60} | changes
    )


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)


def status_of(url: str, request: PlacementRequest) -> str:
    reply = httpx.get(f"{url}/v1/placements/{request.content_hash()}").json()
    return str(reply["status"])


def has_found(url: str, request: PlacementRequest) -> bool:
    reply = httpx.get(f"{url}/v1/placements/{request.content_hash()}").json()
    return reply.get("incumbent") == 7.0


def is_stopped(url: str, request: PlacementRequest) -> bool:
    return (
        status_of(url, request) == "feasible"
        and 'status="stopped"' in httpx.get(f"{url}/metrics").text
    )


def test_a_cancelled_place_stops_the_solve(service: str) -> None:
    request = question()

    async def go() -> None:
        async with AsyncClient(service) as client:
            placing = asyncio.create_task(client.place(request))
            while not await asyncio.to_thread(has_found, service, request):
                await asyncio.sleep(0.02)
            placing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await placing

    asyncio.run(go())
    until(lambda: is_stopped(service, request))


def test_it_stops_too_when_it_is_broken_off_in_a_later_poll(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placer_client.endpoints.MAX_POLL_S", 0.3)
    request = question()

    async def go() -> None:
        async with AsyncClient(service, transport=(answers := Counting())) as client:
            placing = asyncio.create_task(client.place(request))
            while answers.answers < 3 or not await asyncio.to_thread(has_found, service, request):
                await asyncio.sleep(0.02)
            placing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await placing

    asyncio.run(go())
    until(lambda: is_stopped(service, request))


COMMANDS = {
    "solve": [sys.executable, "-P", "-m", "placer", "solve", "request.json", "--server"],
    "place": [sys.executable, "-P", "place.py"],
}
PLACE = """
import sys
from pathlib import Path
from placer.schema import PlacementRequest
from placer_client import Client
with Client(sys.argv[1]) as client:
    client.place(PlacementRequest.model_validate_json(Path("request.json").read_text()))
"""


@pytest.mark.covering
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_a_program_that_is_broken_off_stops_its_solve(
    service: str, tmp_path: Path, command: str, sig: int
) -> None:
    request = question()
    (tmp_path / "request.json").write_text(request.model_dump_json())
    (tmp_path / "place.py").write_text(PLACE)
    # In the background of a shell programs begin with SIGINT ignored.
    began = subprocess.Popen(
        [*COMMANDS[command], service],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    until(lambda: has_found(service, request))
    began.send_signal(sig)
    assert began.wait(20) != 0
    until(lambda: is_stopped(service, request))


def test_what_another_client_waits_for_goes_on(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other client may be between two polls."""
    monkeypatch.setattr("placer_client.endpoints.MAX_POLL_S", 0.1)
    request = question()

    async def go() -> None:
        async with AsyncClient(service) as first, AsyncClient(service) as second:
            waiting = asyncio.create_task(first.place(request))
            for _ in range(5):
                leaving = asyncio.create_task(second.place(request))
                await asyncio.sleep(0.25)
                leaving.cancel()
                await asyncio.sleep(0.1)
            assert await asyncio.to_thread(status_of, service, request) == "running"
            stopped = await second.stop(request.content_hash())
            assert await waiting == stopped

    asyncio.run(go())


def test_what_was_submitted_goes_on(service: str) -> None:
    request = question()

    async def go() -> None:
        async with AsyncClient(service) as client:
            await client.submit(request)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await client.place(request)

    asyncio.run(go())
    time.sleep(solves.RETURN_S + 0.5)
    assert status_of(service, request) == "running"


def test_what_is_not_there_in_time_goes_on(service: str) -> None:
    request = question()
    with Client(service) as client, pytest.raises(TimeoutExceeded, match="It continues"):
        client.place(request, wait=0.3)
    time.sleep(solves.RETURN_S + 0.5)
    assert status_of(service, request) == "running"


class Script:
    """Transport that returns its replies in turn and raises exceptions."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        leaving = request.url.params.get("on_disconnect", "keep")
        self.asked.append(f"{request.method} {leaving}")
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        status, content = reply
        return httpx.Response(status, content=json.dumps(content))


@pytest.mark.parametrize(
    "fault",
    [
        httpx.ReadError("reset"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("half"),
        (504, {}),
    ],
)
def test_after_a_connection_broke_the_whole_answer_is_asked_for(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service treats the broken connection as a client that left.

    Its best placement so far is then not the answer.
    """
    monkeypatch.setattr("placer_client.exchange.FIRST_PAUSE_S", 0.001)
    for replies, asked in (
        ([fault, (200, DONE)], ["POST stop", "POST keep"]),
        ([(202, RUNNING), fault, (200, DONE)], ["POST stop", "GET stop", "POST keep"]),
        (
            [(202, RUNNING), fault, fault, (202, RUNNING), (200, DONE)],
            ["POST stop", "GET stop", *["POST keep"] * 2, "GET stop"],
        ),
    ):
        script = Script(*replies)
        with Client("http://service.test", transport=httpx.MockTransport(script)) as client:
            assert client.place(question()).status == "optimal"
        assert script.asked == asked


@pytest.mark.parametrize("fault", [httpx.ConnectError("refused"), (429, {}), (503, {})])
def test_where_the_service_saw_no_connection_end_the_same_is_asked_again(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placer_client.exchange.FIRST_PAUSE_S", 0.001)
    script = Script(fault, (202, RUNNING), fault, (200, DONE))
    with Client("http://service.test", transport=httpx.MockTransport(script)) as client:
        assert client.place(question()).status == "optimal"
    assert script.asked == ["POST stop"] * 2 + ["GET stop"] * 2


def test_a_connection_that_breaks_costs_no_answer_its_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections end earlier than the solve, as behind a proxy with a short timeout.

    The first one to break stops the solve. The solve that the client asks for then continues when
    the next one breaks.
    """
    monkeypatch.setattr("placer_client.exchange.FIRST_PAUSE_S", 0.001)
    settings = Settings(port=0, database=":memory:", workers=1, log_level="error", stop_grace_s=5.0)
    notes = tmp_path / "notes"
    profile = question().profile.model_copy(update={"model": str(notes)})
    request = question(profile=profile.model_dump(mode="json"))

    def starts() -> int:
        return len(notes.read_text().split()) if notes.exists() else 0

    with background(settings, solver=solvers_for_tests.noted_until_released) as url:
        transport = Breaking(
            (
                lambda: until(lambda: starts() == 1),
                lambda: until(lambda: status_of(url, request) == "feasible"),
            ),
            # The service has time to notice that the connection broke.
            (lambda: until(lambda: starts() == 2), lambda: time.sleep(0.1)),
            (lambda: None, (tmp_path / "release").touch),
        )
        with Client(url, transport=transport) as client:
            assert client.place(request).status == "optimal"
    assert starts() == 2
