"""``placer serve``: every setting of the service as an option."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from placer.cli.option_fields import parameter, show
from placer.cli.terminal import extra

SETTINGS: dict[str, dict[str, tuple[type, str]]] = {
    "Where it listens": {
        "host": (str, "the address; 0.0.0.0 for every interface; default: 127.0.0.1"),
        "port": (int, "the port; 0 takes a free one; default: 8080"),
        "tls_cert": (str, "a certificate chain in PEM; without one the service speaks plain HTTP"),
        "tls_key": (str, "the certificate's private key in PEM"),
    },
    "Who may ask": {
        "keys_file": (str, "bearer keys; needed where others can reach the service"),
        "rate_per_s": (
            float,
            "requests per second of a key, unless its line says otherwise; default: 50",
        ),
        "client_share": (float, "the share of the queue that one client may fill; default: 0.75"),
    },
    "What it keeps": {
        "database": (
            str,
            "a file, :memory: or postgresql://...; default: a file in your state folder",
        ),
        "keep": (int, "the number of placements to keep; the oldest go first; default: 10000"),
        "cache_bytes": (int, "memory for answers; default: 32 MiB"),
        "lease_s": (
            float,
            "after this time without a sign of life, a replica loses its jobs; default: 10",
        ),
    },
    "What it takes": {
        "max_body_bytes": (int, "the largest request body; default: 16 MiB"),
        "max_bodies_bytes": (int, "memory for all request bodies together; default: 128 MiB"),
        "body_timeout_s": (float, "how long a client may take to send its body; default: 60"),
        "queue": (int, "solves that may wait for a worker; the next one gets 429; default: 32"),
    },
    "How it solves": {
        "workers": (int, "solves that run at the same time; default: half of the cores"),
        "max_time_limit_s": (
            float,
            "the longest time limit that a request may give; default: 3600",
        ),
        "max_solver_workers": (
            int,
            "the most cores that a request may ask for; default: all, at least 8",
        ),
        "worker_memory_bytes": (int, "memory of a worker; 0 for no limit; default: 4 GiB"),
        "default_wait_s": (float, "how long a POST waits before the answer is 202; default: 10"),
        "overrun_s": (float, "how far a solve may overrun its own time limit; default: 10"),
        "stop_grace_s": (float, "how long a stopped solve may take to return its best; default: 2"),
    },
    "What it measures": {
        "measure_timeout_s": (
            float,
            "how long measuring this node's devices may take; default: 300",
        ),
        "profile_timeout_s": (float, "how long measuring a client's graph may take; default: 600"),
        "profile_memory_bytes": (
            int,
            "memory for measuring a graph; 0 for no limit; default: half of the machine's",
        ),
        "node_name": (str, "this machine's name, where it registers; default: its host name"),
        "register_url": (str, "another service that receives this node's devices"),
    },
    "What it logs": {
        "log_level": (str, "critical, error, warning, info or debug; default: info"),
        "log_format": (str, "text, or json for one object a line; default: text"),
    },
}
"""The type and the help text of each setting, below the headings of the help."""


def serve(**settings: Any) -> None:
    """Serve placements over REST.

    A setting that is left out comes from its environment variable, or has a default.
    PLACER_REGISTER_KEY, the bearer key for --register-url, is read from there alone: other users
    of the machine can see a command line.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    with extra("server"):
        from placer_server.app import run
        from placer_server.settings import Settings
    run(Settings(**given))


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield an option for each setting; its help names the environment variable."""
    for panel, settings in SETTINGS.items():
        for name, (type_, text) in settings.items():
            option = typer.Option(
                f"--{name.replace('_', '-')}",
                help=f"{text} [PLACER_{name.upper()}]",
                rich_help_panel=panel,
            )
            yield parameter(name, type_ | None, option, None)


show(serve, list(_parameters()))
