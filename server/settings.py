"""What an operator can set, by environment variable or ``placer serve``."""

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

MAX_WAIT_S = 60.0
"""The longest that one request may ask to wait for an answer; clients that wait longer ask again.
"""


CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
NODE_NAME = re.compile(r"^[A-Za-z0-9._-]{1,64}$")

_PATTERNS = {
    "PLACER_NODE_NAME": "should be 1 to 64 letters, digits, '.', '_' and '-'",
    "PLACER_REGISTER_URL": "should be the URL of a service, as http://host:8080",
}
"""What a value with a pattern should be, in words."""

_OTHERS = frozenset({"CACHE", "DEBUG", "KEY", "URL"})
"""What the library and its clients read."""


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "node"


def _cores() -> int:
    return os.cpu_count() or 2


class Settings(BaseSettings):
    """The service's settings; each is read from ``PLACER_`` and its name in capitals.

    Attributes:
        host: the address to listen on; ``0.0.0.0`` for every interface.
        port: the port to listen on; 0 takes a free one.
        keys_file: the file of bearer keys, see ``placer_server.keys``; without one the service
            listens on loopback alone.
        rate_per_s: how often a key may ask, where its line does not say.
        tls_cert: a certificate chain in PEM; without one the service speaks plain HTTP, say to a
            proxy.
        tls_key: the certificate's private key in PEM.
        database: the file that keeps the placements, made if missing; by default ``placements.db``
            in the user's state folder, on Linux ``~/.local/state/placer``. ``:memory:`` keeps them
            until the service stops; ``postgresql://user:password@host/database`` lets several
            replicas share them.
        lease_s: after so long without a sign of life from a replica, the others take over its jobs.
        keep: how many placements the database keeps; the oldest go first.
        cache_bytes: what answers that are kept in memory, too, may take; those used last are.
        max_body_bytes: the largest request body.
        max_bodies_bytes: what all bodies that are being read and checked at a time may take
            together.
        body_timeout_s: how long a client may take to send its body.
        workers: solves that run at the same time, one process each.
        queue: solves that may wait for a worker; one more is answered with 429.
        client_share: how much of the queue one client may fill; clients take turns in it.
        max_time_limit_s: the longest time limit that a request may give its solve.
        max_solver_workers: the most cores that a request may have its solve use (the request's
            ``workers``).
        worker_memory_bytes: what a worker's process may take; no limit if 0.
        default_wait_s: how long a POST waits for its placement before it answers 202.
        overrun_s: how far a solve may overrun its own time limit before it is stopped.
        stop_grace_s: how long a stopped solve may take to hand over its best placement before it is
            killed.
        measure_timeout_s: how long measuring this node's devices may take.
        profile_timeout_s: how long measuring a graph that a client sent may take.
        profile_memory_bytes: what its process may take of this machine's memory; no limit if 0.
        node_name: this machine's name, where it registers; its host name if not set.
        register_url: the URL of another Placer service that this one tells its devices, so that
            placements span hosts.
        register_key: the bearer key for that, with the scope ``solve``.
        log_level: of the server's log: ``critical``, ``error``, ``warning``, ``info``, ``debug``.
        log_format: ``text``, or ``json`` for one object a line; both name the request by its id.
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
        """Read the environment; what is given here counts more.

        Raises:
            InputError: a value cannot be used; the message names its environment variable.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = "PLACER_" + "_".join(str(part) for part in first["loc"]).upper()
            text = _PATTERNS.get(name) or wanted(first["msg"])
            raise InputError(f"{name} is {first['input']!r}; it {text}") from error


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """Hints at variables that are nearly those of settings; nothing would read them.

    Args:
        environment: names and values, as ``os.environ``. Others than the service's own start with
            PLACER_ too.
    """
    known = [name.upper() for name in Settings.model_fields]
    given = [
        name.removeprefix("PLACER_") for name in sorted(environment) if name.startswith("PLACER_")
    ]
    nearest = {
        name: get_close_matches(name, known, 1, 0.8)
        for name in given
        if name not in {*known, *_OTHERS}
    }
    return [
        f"PLACER_{name} is no setting; did you mean PLACER_{found[0]}?"
        for name, found in nearest.items()
        if found
    ]
