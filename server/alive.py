"""Whether the service of this container lives: ``python -m placer_server.alive``, the health check
of the image.

A health check is given the environment of the container, but not the options of its command, such
as ``--port``. So a service writes down where it listens, in a file for temporary files, and the
check asks there.

The check imports nothing of the service, since it is run every few seconds; and asks no proxy.
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
EVERYWHERE = {"0.0.0.0": HOST, "::": "::1"}
"""Addresses to listen on that nobody can ask, and an address of this machine in their place."""


class Address(NamedTuple):
    """Where a service listens.

    Attributes:
        host: the address or name.
        port: the port.
        tls: whether it speaks TLS.
    """

    host: str
    port: int
    tls: bool


def is_alive(environment: Mapping[str, str]) -> bool:
    """Whether ``/healthz`` answers where the service listens; by TLS where that is on, whoever
    signed the certificate.

    Args:
        environment: the service's. It is asked where it wrote down that it listens; if it could
            not, at PLACER_HOST and PLACER_PORT.
    """
    host, port, tls = _written_down(environment) or Address(
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
def written_down(address: Address, environment: Mapping[str, str]) -> Iterator[None]:
    """Let health checks find a service for as long as the context is open.

    Args:
        address: where it listens.
        environment: in which it was started.

    Raises:
        OSError: there is no room for a file.
    """
    for file, record in _records():
        if not _runs(record["pid"]):  # it was killed
            with suppress(OSError):
                file.unlink()
    file = Path(f"{_prefix()}{os.getpid()}.json")
    record = {"pid": os.getpid(), "address": address, "started_in": _marks(environment)}
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


def _written_down(environment: Mapping[str, str]) -> Address | None:
    """Where the newest of the services listens that were started in such an environment; None if
    none wrote it down.
    """
    found = [
        (file.stat().st_mtime, Address(*record["address"]))
        for file, record in _records()
        if record["started_in"] == _marks(environment) and _runs(record["pid"])
    ]
    return max(found)[1] if found else None


def _records() -> Iterator[tuple[Path, dict[str, Any]]]:
    """What services of this user wrote down; nobody else's files are believed."""
    prefix = Path(_prefix())
    for file in prefix.parent.glob(f"{prefix.name}*.json"):
        with suppress(OSError, ValueError):
            if file.stat().st_uid == _user():
                yield file, json.loads(file.read_text())


def _prefix() -> str:
    return f"{tempfile.gettempdir()}/placer-service-{_user()}-"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _marks(environment: Mapping[str, str]) -> list[str]:
    """Return what tells the services of one user apart: the environments in which they were
    started.
    """
    return [environment.get("PLACER_HOST", ""), environment.get("PLACER_PORT", "")]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    sys.exit(0 if is_alive(os.environ) else 1)
