"""Fixtures that start a service with a solver of the test's choice."""

from __future__ import annotations

import copy
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import solvers_for_tests
from fastapi.testclient import TestClient
from postgres_server import PostgresServer, find_binaries
from service_process import ServiceProcess

from placer_server.app import create_app
from placer_server.openapi import examples
from placer_server.settings import Settings

Serve = Callable[..., TestClient]


@pytest.fixture
def solvers() -> Any:
    return solvers_for_tests


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return ``serve(solver, **settings)``, which starts a service and returns a client of it."""
    with ExitStack() as stack:
        yield partial(_started, stack)


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Serve]:
    """Return ``serve`` for services that all tests of a module use."""
    with ExitStack() as stack:
        yield partial(_started, stack)


@pytest.fixture(scope="module")
def service(serve_module: Serve) -> TestClient:
    """Return a client of a service for tests that read nothing of what other tests left there."""
    return serve_module()


def _started(stack: ExitStack, solver: Any = solvers_for_tests.quick, **values: Any) -> TestClient:
    defaults = {"database": ":memory:", "workers": 1, "queue": 1, "stop_grace_s": 5.0}
    app = create_app(Settings(**{**defaults, **values}), solver=solver)
    client = stack.enter_context(
        TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    )
    until(lambda: client.get("/readyz").status_code == 200)
    return client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServiceProcess]]:
    """Return ``start(solver, **settings)``, which starts a service in a process.

    Its database is the test's own file by default.
    """
    services: list[ServiceProcess] = []

    def start(solver: str, **settings: Any) -> ServiceProcess:
        services.append(ServiceProcess(solver, **{"database": str(tmp_path / "p.db"), **settings}))
        return services[-1]

    yield start
    for service in services:
        if service.process.is_alive():
            service.end(signal.SIGKILL)


@pytest.fixture(scope="session")
def request_body() -> Callable[..., dict[str, Any]]:
    """Return ``request_body(**changes)``, a valid request; another seed gives another id."""

    def make(**changes: Any) -> dict[str, Any]:
        return {**copy.deepcopy(examples.requests()["throughput"]["value"]), **changes}

    return make


@pytest.fixture
def service_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture the service's log, even after a test in which it configured logging itself.

    The service's loggers do not propagate then.
    """
    logger = logging.getLogger("placer_server")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.DEBUG, logger.name)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    return until


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for a condition, and fail if it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def running_postgres() -> Iterator[PostgresServer]:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    pytest.importorskip(
        "psycopg",
        reason="PostgreSQL's driver is not installed: pip install 'torch-placer[postgres]'",
    )
    server = PostgresServer(binaries)
    yield server
    server.stop()


@pytest.fixture
def postgres(running_postgres: PostgresServer) -> str:
    """Return the URL of a new, empty PostgreSQL database."""
    return running_postgres.new_database()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a new database of each kind."""
    if request.param == "sqlite":
        return str(tmp_path / "placements.db")
    return str(request.getfixturevalue("postgres"))
