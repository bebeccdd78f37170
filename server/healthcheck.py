"""Health check of a container: ``python -m placer_server.healthcheck``.

A health check sees the environment of the container, but not the options of its command, such as
``--port``. The service therefore writes its address to a temporary file, and the check reads it.

The check runs every few seconds, so it imports nothing of the service. It uses no proxy.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT_S = 4.0
HOST, PORT = "127.0.0.1", 8080

# Wildcard listen addresses, mapped to a loopback address that a client can connect to.
EVERYWHERE = {"0.0.0.0": HOST, "::": "::1"}


class Address(NamedTuple):
    """Address on which a service listens.

    Attributes:
        host: Address or name.
        port: Port.
        tls: Whether the service speaks TLS.
    """

    host: str
    port: int
    tls: bool


def is_alive(environment: Mapping[str, str]) -> bool:
    """Return whether ``/healthz`` answers.

    TLS certificates are not verified: the check connects to its own machine.

    Args:
        environment: Environment of the service. The check asks the address that a service started
            in this environment wrote down, or else PLACER_HOST and PLACER_PORT.
    """
    host, port, tls = _recorded_address(environment) or Address(
        environment.get("PLACER_HOST") or HOST,
        int(environment.get("PLACER_PORT") or PORT),
        bool(environment.get("PLACER_TLS_CERT")),
    )
    at = EVERYWHERE.get(host, host), port
    if tls:
        unverified = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            *at, timeout=TIMEOUT_S, context=unverified
        )
    else:
        connection = http.client.HTTPConnection(*at, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def record_address(address: Address, environment: Mapping[str, str]) -> Iterator[None]:
    """Write down the service's address for health checks while the context is open.

    Raises:
        OSError: The file cannot be written.
    """
    for file, record in _records():
        # A service that was killed could not delete its record.
        if not _is_running(record["pid"]):
            with suppress(OSError):
                file.unlink()
    file = Path(f"{_prefix()}{os.getpid()}.json")
    record = {"pid": os.getpid(), "address": address, "started_in": _identity(environment)}
    half = file.with_suffix(".half")
    with suppress(FileNotFoundError):
        half.unlink()
    with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        json.dump(record, opened)
    half.replace(file)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def _recorded_address(environment: Mapping[str, str]) -> Address | None:
    """Return the address of the newest service that was started in this environment, or None."""
    found = [
        (file.stat().st_mtime, Address(*record["address"]))
        for file, record in _records()
        if record["started_in"] == _identity(environment) and _is_running(record["pid"])
    ]
    return max(found)[1] if found else None


def _records() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the records that services of this user wrote; files of other users are not trusted."""
    prefix = Path(_prefix())
    for file in prefix.parent.glob(f"{prefix.name}*.json"):
        with suppress(OSError, ValueError):
            if file.stat().st_uid == _user():
                yield file, json.loads(file.read_text())


def _prefix() -> str:
    return f"{tempfile.gettempdir()}/placer-service-{_user()}-"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _identity(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that distinguish the services of one user."""
    return [environment.get("PLACER_HOST", ""), environment.get("PLACER_PORT", "")]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    sys.exit(0 if is_alive(os.environ) else 1)
