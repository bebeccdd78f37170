"""Settings of the service, from environment variables or options of ``placer serve``."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import Field, SecretStr, ValidationError

from placer.errors import InputError
from placer.schema.faults import wanted
from placer.utils import host_memory
from placer.utils.extras import extra

with extra("server"):
    from pydantic_settings import BaseSettings, SettingsConfigDict

# Longest time in seconds that one request may wait for an answer; clients then ask again.
MAX_WAIT_S = 60.0


CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
NODE_NAME = re.compile(r"^[A-Za-z0-9._-]{1,64}$")

# Descriptions of values that a pattern restricts.
_PATTERN_HINTS = {
    "PLACER_NODE_NAME": "should be 1 to 64 letters, digits, '.', '_' and '-'",
    "PLACER_REGISTER_URL": "should be the URL of a service, such as http://host:8080",
}

# Variables that the library and its clients read.
_OTHER_VARIABLES = frozenset({"CACHE", "DEBUG", "KEY", "URL"})


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "node"


def _cores() -> int:
    return os.cpu_count() or 2


class Settings(BaseSettings):
    """Settings of the service; each is read from ``PLACER_`` and its name in capitals.

    Attributes:
        host: Address to listen on; ``0.0.0.0`` for every interface.
        port: Port to listen on; 0 takes a free port.
        keys_file: File of bearer keys, see ``placer_server.keys``; without it the service listens
            on a loopback address only.
        rate_per_s: Requests per second that a key may send, unless its line says otherwise.
        tls_cert: Certificate chain in PEM; without it the service speaks plain HTTP, for example
            behind a proxy.
        tls_key: The certificate's private key in PEM.
        database: SQLite file that keeps the placements, made if missing; by default
            ``placements.db`` in the user's state folder, on Linux ``~/.local/state/placer``.
            ``:memory:`` keeps them until the service stops.
            ``postgresql://user:password@host/database`` lets several replicas share them.
        lease_s: Seconds without a sign of life after which other replicas take over a replica's
            jobs.
        keep: Number of placements that the database keeps; the oldest are deleted first.
        cache_bytes: Memory for the answers used last, in bytes.
        max_body_bytes: Largest request body in bytes.
        max_bodies_bytes: Largest total size of the bodies that are read and checked at the same
            time.
        body_timeout_s: Seconds that a client may take to send its body.
        workers: Number of solves that run at the same time, one process each.
        queue: Number of solves that may wait for a worker; a further one is answered with 429.
        client_share: Share of the queue that one client may fill; clients take turns in it.
        max_time_limit_s: Longest time limit in seconds that a request may give its solve.
        max_solver_workers: Largest number of cores that a request may have its solve use (the
            request's ``workers``).
        worker_memory_bytes: Memory limit of a worker process in bytes; no limit if 0.
        default_wait_s: Seconds that a POST waits for its placement before it answers 202.
        overrun_s: Seconds that a solve may run beyond its own time limit before it is stopped.
        stop_grace_s: Seconds that a stopped solve has to return its best placement before it is
            killed.
        measure_timeout_s: Seconds that a measurement of this node's devices may take.
        profile_timeout_s: Seconds that a measurement of a graph that a client sent may take.
        profile_memory_bytes: Memory limit of the process that measures a graph, in bytes; no limit
            if 0.
        node_name: Name under which this machine registers; its host name by default.
        register_url: URL of another Placer service with which this service registers its devices,
            so that placements can span hosts.
        register_key: Bearer key for that service, with the scope ``solve``.
        log_level: Log level: ``critical``, ``error``, ``warning``, ``info`` or ``debug``.
        log_format: ``text``, or ``json`` for one object per line; both contain the request's id.
    """

    model_config = SettingsConfigDict(env_prefix="PLACER_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8080
    keys_file: str = ""
    rate_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 50.0
    tls_cert: str = ""
    tls_key: str = ""
    database: str = Field(
        default_factory=lambda: str(
            platformdirs.user_state_path("placer", appauthor=False) / "placements.db"
        )
    )
    lease_s: Annotated[float, Field(ge=1, le=3600)] = 10.0
    keep: Annotated[int, Field(ge=1)] = 10_000
    cache_bytes: Annotated[int, Field(ge=0)] = 32 * 2**20
    max_body_bytes: Annotated[int, Field(ge=1)] = 16 * 2**20
    max_bodies_bytes: Annotated[int, Field(ge=1)] = 128 * 2**20
    body_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    # The other half of the cores serves requests, and solves that use several cores.
    workers: Annotated[int, Field(ge=1, le=256)] = Field(
        default_factory=lambda: max(1, _cores() // 2)
    )
    queue: Annotated[int, Field(ge=0, le=100_000)] = 32
    client_share: Annotated[float, Field(gt=0, le=1)] = 0.75
    max_time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 3600.0
    max_solver_workers: Annotated[int, Field(ge=1, le=256)] = Field(
        default_factory=lambda: max(8, _cores())
    )
    worker_memory_bytes: Annotated[int, Field(ge=0)] = 4 * 2**30
    default_wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 10.0
    overrun_s: Annotated[float, Field(ge=0)] = 10.0
    stop_grace_s: Annotated[float, Field(ge=0)] = 2.0
    measure_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    profile_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    profile_memory_bytes: Annotated[int, Field(ge=0)] = Field(
        default_factory=lambda: host_memory.total_bytes(CGROUP_LIMIT) // 2
    )
    node_name: Annotated[str, Field(pattern=NODE_NAME.pattern)] = Field(default_factory=_host_name)
    register_url: Annotated[str, Field(pattern=r"^(https?://.+)?$")] = ""
    register_key: SecretStr = SecretStr("")
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    log_format: Literal["text", "json"] = "text"

    def __init__(self, **values: Any) -> None:
        """Read the environment; arguments take precedence.

        Raises:
            InputError: A value is invalid; the message names its environment variable.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = "PLACER_" + "_".join(str(part) for part in first["loc"]).upper()
            text = _PATTERN_HINTS.get(name) or wanted(first["msg"])
            raise InputError(f"{name} is {first['input']!r}; it {text}") from error


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """Return hints about variables whose names nearly match a setting; nothing would read them.

    Args:
        environment: Names and values, as in ``os.environ``. Variables of other programs may start
            with PLACER_ too.
    """
    known = [name.upper() for name in Settings.model_fields]
    given = [
        name.removeprefix("PLACER_") for name in sorted(environment) if name.startswith("PLACER_")
    ]
    nearest = {
        name: get_close_matches(name, known, 1, 0.75)
        for name in given
        if name not in {*known, *_OTHER_VARIABLES}
    }
    return [
        f"PLACER_{name} is not a setting; did you mean PLACER_{found[0]}?"
        for name, found in nearest.items()
        if found
    ]
