"""``placer serve``: every setting of the service as an option."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from placer.cli.terminal import extra

SETTINGS: dict[str, dict[str, str]] = {
    "Where it listens": {
        "host": "the address; 0.0.0.0 for every interface; default: 127.0.0.1",
        "port": "the port; 0 takes a free one; default: 8080",
        "tls_cert": "a certificate chain in PEM; without one it speaks plain HTTP, say to a proxy",
        "tls_key": "the certificate's private key in PEM",
    },
    "Who may ask": {
        "keys_file": "bearer keys; needed where others can reach the service",
        "rate_per_s": "how often a key may ask, where its line does not say; default: 50",
        "client_share": "how much of the queue one client may fill; default: 0.75",
    },
    "What it keeps": {
        "database": "the file, :memory: or postgresql://... that keeps placements; default: in your state folder",
        "keep": "how many placements; the oldest go first; default: 10000",
        "cache_bytes": "what answers that are kept in memory, too, may take; default: 32 MiB",
        "lease_s": "a replica without a sign of life for so long loses its jobs to others; default: 10",
    },
    "What it takes": {
        "max_body_bytes": "the largest request body; default: 16 MiB",
        "max_bodies_bytes": "what all bodies that are read at a time may take together; default: 128 MiB",
        "body_timeout_s": "how long a client may take to send its body; default: 60",
        "queue": "solves that may wait for a worker; one more is 429; default: 32",
    },
    "How it solves": {
        "workers": "solves that run at the same time; default: half of the cores",
        "max_time_limit_s": "the longest time limit that a request may give; default: 3600",
        "max_solver_workers": "the most cores that a request may ask for; default: all, or 8 where there are fewer",
        "worker_memory_bytes": "what a worker may take; 0 for no limit; default: 4 GiB",
        "default_wait_s": "how long a POST waits before it is 202; default: 10",
        "overrun_s": "how far a solve may overrun its own time limit; default: 10",
        "stop_grace_s": "how long a stopped solve may take to hand over its best; default: 2",
    },
    "What it measures": {
        "measure_timeout_s": "how long measuring this node's devices may take; default: 300",
        "profile_timeout_s": "how long measuring a client's graph may take; default: 600",
        "profile_memory_bytes": "what that may take of this machine's memory; 0 for no limit; default: half of it",
        "node_name": "this machine's name, where it registers; default: its host name",
        "register_url": "another service that is told this node's devices",
    },
    "What it logs": {
        "log_level": "critical, error, warning, info or debug; default: info",
        "log_format": "text, or json for one object a line; default: text",
    },
}
"""What the help says of each, by the heading under which it stands."""


def _option(setting: str) -> Any:
    """The option of a setting; its help names the environment variable."""
    panel = next(name for name, texts in SETTINGS.items() if setting in texts)
    words = f"{SETTINGS[panel][setting]} [PLACER_{setting.upper()}]"
    return typer.Option(f"--{setting.replace('_', '-')}", help=words, rich_help_panel=panel)


def serve(
    host: Annotated[str | None, _option("host")] = None,
    port: Annotated[int | None, _option("port")] = None,
    tls_cert: Annotated[str | None, _option("tls_cert")] = None,
    tls_key: Annotated[str | None, _option("tls_key")] = None,
    keys_file: Annotated[str | None, _option("keys_file")] = None,
    rate_per_s: Annotated[float | None, _option("rate_per_s")] = None,
    client_share: Annotated[float | None, _option("client_share")] = None,
    database: Annotated[str | None, _option("database")] = None,
    keep: Annotated[int | None, _option("keep")] = None,
    cache_bytes: Annotated[int | None, _option("cache_bytes")] = None,
    lease_s: Annotated[float | None, _option("lease_s")] = None,
    max_body_bytes: Annotated[int | None, _option("max_body_bytes")] = None,
    max_bodies_bytes: Annotated[int | None, _option("max_bodies_bytes")] = None,
    body_timeout_s: Annotated[float | None, _option("body_timeout_s")] = None,
    queue: Annotated[int | None, _option("queue")] = None,
    workers: Annotated[int | None, _option("workers")] = None,
    max_time_limit_s: Annotated[float | None, _option("max_time_limit_s")] = None,
    max_solver_workers: Annotated[int | None, _option("max_solver_workers")] = None,
    worker_memory_bytes: Annotated[int | None, _option("worker_memory_bytes")] = None,
    default_wait_s: Annotated[float | None, _option("default_wait_s")] = None,
    overrun_s: Annotated[float | None, _option("overrun_s")] = None,
    stop_grace_s: Annotated[float | None, _option("stop_grace_s")] = None,
    measure_timeout_s: Annotated[float | None, _option("measure_timeout_s")] = None,
    profile_timeout_s: Annotated[float | None, _option("profile_timeout_s")] = None,
    profile_memory_bytes: Annotated[int | None, _option("profile_memory_bytes")] = None,
    node_name: Annotated[str | None, _option("node_name")] = None,
    register_url: Annotated[str | None, _option("register_url")] = None,
    log_level: Annotated[str | None, _option("log_level")] = None,
    log_format: Annotated[str | None, _option("log_format")] = None,
) -> None:
    """Serve placements over REST.

    What is left out comes from its environment variable, or has a default. PLACER_REGISTER_KEY, the
    bearer key for --register-url, is read from there alone: a command line can be seen by others.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    with extra("server"):
        from placer_server.app import run
        from placer_server.settings import Settings
    run(Settings(**given))
