"""The service with a real socket, real workers, the real solver and the client."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import httpx
import pytest

from placer.errors import InputError, ServerError
from placer.schema import PlacementRequest
from placer_server import serving
from placer_server.app import background, create_app
from placer_server.openapi import examples
from placer_server.settings import Settings


@pytest.fixture
def settings(tmp_path):
    return Settings(
        port=0, database=str(tmp_path / "placements.db"), workers=1, log_level="warning"
    )


def example(name="throughput", **changes):
    return PlacementRequest.model_validate({**examples.requests()[name]["value"], **changes})


def test_the_solver_answers_through_the_service_as_it_does_here(settings):
    from placer.solver.solve import solve

    here = solve(example())
    with background(settings) as url:
        there = httpx.post(
            f"{url}/v1/placements", json=examples.requests()["throughput"]["value"]
        ).json()
    assert there["status"] == here.status == "optimal"
    assert there["objective_value"] == pytest.approx(here.objective_value)
    assert there["id"] == example().content_hash()


def test_an_infeasible_request_is_answered_with_its_reason(settings):
    with background(settings) as url:
        reply = httpx.post(f"{url}/v1/placements", json=examples.requests()["infeasible"]["value"])
    assert reply.status_code == 200
    assert reply.json()["status"] == "infeasible"
    assert reply.json()["infeasible"]["missing_bytes"] > 0


def test_sync_and_async_clients_get_the_same_placement(settings):
    from placer_client import AsyncClient, Client

    async def ask(url):
        async with AsyncClient(url) as client:
            return await client.place(example())

    with background(settings) as url:
        with Client(url) as client:
            placed = client.place(example())
            assert client.placement(placed.id) == client.stop(placed.id) == placed
        assert asyncio.run(ask(url)) == placed


def test_the_client_waits_through_a_full_queue(settings, solvers):
    from placer_client import Client

    full = settings.model_copy(update={"queue": 0, "overrun_s": 0.0})
    with background(full, solver=solvers.until_stopped) as url, Client(url) as client:
        busy = example(seed=1, time_limit_s=0.5).model_dump_json()
        headers = {"Content-Type": "application/json"}
        assert (
            httpx.post(f"{url}/v1/placements?wait=0", content=busy, headers=headers).status_code
            == 202
        )
        assert client.place(example(seed=2, time_limit_s=0.1)).status == "feasible"
        assert "placer_rejections_total 0.0" not in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize("how", ["of a length that is told", "in chunks"])
def test_a_body_of_100_mb_is_413_and_the_service_goes_on(settings, how):
    body = b" " * 100_000_000
    content = (
        body
        if how == "of a length that is told"
        else (body[at : at + 2**20] for at in range(0, len(body), 2**20))
    )
    with background(settings) as url:
        reply = httpx.post(
            f"{url}/v1/placements", content=content, headers={"Content-Type": "application/json"}
        )
        assert (reply.status_code, reply.headers["Content-Type"]) == (
            413,
            "application/problem+json",
        )
        assert httpx.get(f"{url}/healthz").status_code == 200


def test_answers_are_sent_at_once_and_not_held_back_for_more(settings):
    # socket.create_server makes sockets of protocol 0, for which asyncio leaves Nagle's algorithm
    # on.
    with serving._listener(settings) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_port_that_is_taken_is_an_error_that_names_it(settings):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ServerError, match=str(port)),
            background(settings.model_copy(update={"port": port})),
        ):
            pass


def test_a_database_that_cannot_be_opened_is_an_error_that_names_it(settings, tmp_path, capfd):
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is no database" * 100)
    with (
        pytest.raises(ServerError, match=r"broken\.db.*not a database"),
        background(settings.model_copy(update={"database": str(broken)})),
    ):
        pass
    # there were pages of it before the error
    assert "Traceback" not in capfd.readouterr().err


def test_sigterm_answers_those_who_wait_with_the_best_so_far_and_ends_cleanly(tmp_path, solvers):
    script = tmp_path / "service.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {os.path.dirname(solvers.__file__)!r})\n"
        "import solvers_for_tests\n"
        "from placer_server.app import run\n"
        "from placer_server.settings import Settings\n"
        "settings = Settings(port=int(sys.argv[1]), database=sys.argv[2], workers=1)\n"
        "run(settings, solver=solvers_for_tests.until_stopped)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(script), str(port), str(tmp_path / "p.db")],
        stderr=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    transport = httpx.HTTPTransport(retries=20)
    with httpx.Client(transport=transport, timeout=30) as client:
        while client.get(f"{url}/readyz").status_code != 200:
            time.sleep(0.02)
        replies = []

        def ask():
            replies.append(
                client.post(
                    f"{url}/v1/placements?wait=60", json=examples.requests()["throughput"]["value"]
                )
            )

        asking = threading.Thread(target=ask)
        asking.start()
        where = f"{url}/v1/placements/{example().content_hash()}"
        while "incumbent" not in (found := client.get(where).json()) or found["incumbent"] is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        asking.join(30)
    _, log = process.communicate(timeout=30)
    assert (replies[0].status_code, replies[0].json()["objective_value"]) == (200, 7.0)
    assert "Traceback" not in log
    assert f"serving on {url}" in log
    assert process.returncode == 0


def test_a_solver_of_the_main_script_is_refused():
    def solver(request, **options):
        raise AssertionError

    solver.__module__ = "__main__"
    with pytest.raises(InputError, match="main script"):
        create_app(Settings(database=":memory:"), solver=solver)


def test_the_service_speaks_tls_with_a_certificate(settings, tmp_path, solvers):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    secured = settings.model_copy(update={"tls_cert": str(cert), "tls_key": str(key)})
    with background(secured, solver=solvers.quick) as url:
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(f"{url}/healthz", verify=trusting).status_code == 200


def test_a_certificate_that_cannot_be_read_is_an_error_that_names_it(settings, tmp_path):
    broken = settings.model_copy(update={"tls_cert": str(tmp_path / "absent.pem")})
    message = r"PLACER_TLS_CERT '.*absent\.pem' .*; give a certificate chain in PEM"
    with pytest.raises(ServerError, match=message), background(broken):
        pass


def test_a_key_without_a_certificate_is_refused_with_what_is_missing(settings, tmp_path):
    # It was an AssertionError of uvicorn without a message.
    broken = settings.model_copy(update={"tls_key": str(tmp_path / "key.pem")})
    with (
        pytest.raises(
            InputError, match=r"PLACER_TLS_KEY is '.*', and PLACER_TLS_CERT is not given"
        ),
        background(broken),
    ):
        pass
