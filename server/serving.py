"""Running the application under uvicorn, in the main thread or in another one."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType

from placer.errors import InputError, ServerError
from placer.utils.extras import extra

with extra("server"):
    import uvicorn
    from fastapi import FastAPI

    from . import healthcheck
    from .observability import logs
    from .settings import Settings, misspelt
    from .web.connection import Connection

log = logging.getLogger("placer_server")


class Server(uvicorn.Server):
    """uvicorn server that ends the solves as soon as it must stop.

    Waiting clients then receive the best placement so far.
    """

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_level=settings.log_level,
            log_config=logs.config(settings),
            access_log=False,
            server_header=False,
            http=partial(Connection, metrics=app.state.metrics),  # type: ignore[arg-type]
            ws="none",
            ssl_certfile=settings.tls_cert or None,
            ssl_keyfile=settings.tls_key or None,
            # Stopped solves need their grace time, and 3 s to send the answers.
            timeout_graceful_shutdown=math.ceil(settings.stop_grace_s + 3),
        )
        _load(config, settings)
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the server must stop."""
        self._loop = asyncio.get_running_loop()
        uvicorn_log = logging.getLogger("uvicorn.error")
        uvicorn_log.addFilter(self._is_informative)
        try:
            await super().serve(sockets)
        except SystemExit:
            # uvicorn exits in this way if the application does not start; see ``not_started``.
            pass
        finally:
            uvicorn_log.removeFilter(self._is_informative)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and log the address."""
        await super().startup(sockets)
        if self.started and sockets:
            log.info("serving on %s", _url(sockets[0], self.config.is_ssl))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on SIGTERM or SIGINT; a second Ctrl-C does not wait for open requests.

        uvicorn would raise the signal again at its end. A service that stopped as requested exits
        with 0.
        """
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.stop()

    def stop(self) -> None:
        """End the solves, answer the waiting clients, and stop. Any thread may call this."""
        service = getattr(self._app.state, "service", None)
        if service is not None and self._loop is not None:
            # The loop may have ended already.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(service.solves.stop_all)
        self.should_exit = True

    def _is_informative(self, record: logging.LogRecord) -> bool:
        """Return False for the traceback of a failed start whose reason is known.

        Pages of traceback would hide the reason.
        """
        return not (
            hasattr(self._app.state, "not_started") and record.getMessage().startswith("Traceback")
        )

    def not_started(self) -> ServerError:
        """Return the error that says why the service did not start."""
        reason = getattr(self._app.state, "not_started", "see its log")
        return ServerError(f"the service could not start: {reason}")


def _load(config: uvicorn.Config, settings: Settings) -> None:
    """Load the certificate and the rest of uvicorn's configuration.

    Raises:
        InputError: A key is given without its certificate.
        ServerError: The certificate or its key cannot be used.
    """
    if settings.tls_key and not settings.tls_cert:
        raise InputError(
            f"PLACER_TLS_KEY is {settings.tls_key!r}, and PLACER_TLS_CERT is not given; give the"
            " certificate chain of this key, too"
        )
    try:
        config.load()
    except OSError as error:
        # ssl.SSLError is an OSError too.
        raise ServerError(
            f"TLS cannot be enabled with PLACER_TLS_CERT {settings.tls_cert!r} and PLACER_TLS_KEY"
            f" {settings.tls_key!r}: {error.strerror or error}; give a certificate chain in PEM,"
            " and its private key in the same file or in another one"
        ) from error


def serve(app: FastAPI, settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ServerError: The service could not start.
    """
    server = Server(app, settings)
    for hint in misspelt(os.environ):
        log.warning(hint)
    with (
        _listener(settings) as listener,
        _recorded_for_health_checks(listener, server.config.is_ssl),
    ):
        _relax_garbage_collection()
        server.run(sockets=[listener])
    if not server.started:
        raise server.not_started()


@contextmanager
def _recorded_for_health_checks(listener: socket.socket, tls: bool) -> Iterator[None]:
    host, port = listener.getsockname()[:2]
    with ExitStack() as stack:
        try:
            stack.enter_context(
                healthcheck.record_address(healthcheck.Address(host, port, tls), os.environ)
            )
        except OSError as error:
            log.info(
                "the address could not be written; the health check uses PLACER_HOST and"
                " PLACER_PORT: %s",
                error,
            )
        yield


def _relax_garbage_collection() -> None:
    """Let the garbage collector run less often.

    A request makes about ten thousand objects, nearly all of which are freed without a cycle.
    Searching the imported modules for garbage would take a quarter of a request's time.
    """
    # Exclude everything that exists now from later searches.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@contextmanager
def serve_in_thread(app: FastAPI, settings: Settings) -> Iterator[str]:
    """Serve in another thread while the context is open.

    Yields:
        The service's URL.

    Raises:
        ServerError: The service could not start.
    """
    server = Server(app, settings)
    with _listener(settings) as listener:
        thread = threading.Thread(
            target=server.run, args=([listener],), name="placer-server", daemon=True
        )
        thread.start()
        try:
            while not server.started and thread.is_alive():
                thread.join(0.01)
            if not server.started:
                raise server.not_started()
            yield _url(listener, server.config.is_ssl)
        finally:
            server.stop()
            thread.join()


def _listener(settings: Settings) -> socket.socket:
    # asyncio disables Nagle's algorithm only for sockets with an explicit TCP protocol. With it,
    # each answer waits 40 ms.
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(2048)
        return listener
    except OSError as error:
        listener.close()
        raise ServerError(
            f"the service cannot listen on {settings.host}, port {settings.port}: {error.strerror};"
            " give another --port, or set PLACER_HOST and PLACER_PORT"
        ) from error


def _url(listener: socket.socket, tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
