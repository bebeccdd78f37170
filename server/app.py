"""Makes the application, and runs it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import placer
from placer.errors import InputError, PlacerError
from placer.utils.extras import extra

with extra("server"):
    from fastapi import FastAPI

    from . import serving
    from .api.handlers import handle_errors
    from .api.paths import include_routes
    from .api.service import Service
    from .jobs.jobs import Jobs
    from .jobs.peers import Peers
    from .judge.judge import Judge
    from .keys import Keys
    from .node.cluster import NodeCluster
    from .node.profiling import Profiling
    from .node.registering import register_forever
    from .observe.gpus import watch_gpus
    from .observe.metrics import Measured, Metrics
    from .openapi.document import describe
    from .settings import Settings
    from .shares import Shares
    from .store.database import StoreError
    from .store.replicas import Replicas
    from .store.store import Store
    from .store.upkeep import mend, mend_forever
    from .web.checker import Checker
    from .web.guard import Guard
    from .web.heads import Heads
    from .web.intake import Intake
    from .workers.solving import Solver, default_solver
    from .workers.worker import Crashed, Killed, Worker, prepare, tell_taken_bytes

log = logging.getLogger("placer_server")

WARM_UP_S = 60.0
SMALL_SOLVE_BYTES = 64 * 2**20
"""What a solve of some fifty layers takes beside what its worker does."""

MOST_STREAMS = 512
THREADS = 32
"""For what waits: on PostgreSQL, or minutes for a measurement. asyncio's own are few where there
are few cores."""


def create_app(settings: Settings | None = None, *, solver: Solver = default_solver) -> FastAPI:
    """The service as an ASGI application.

    Args:
        settings: how it behaves; from the environment if None.
        solver: what solves a request, ``solver(request, *, progress=None, stop=None) ->
            Placement``; it is called in a process of its own, so it must be importable by name from
            there.

    Raises:
        InputError: the solver is defined in the main script, where no other process can import it
            from; or the service would be reached from elsewhere without keys.
    """
    if getattr(solver, "__module__", None) == "__main__":
        raise InputError(
            f"solver {solver!r} is defined in the main script; move it to a module that can be imported"
        )
    app = FastAPI(
        title="Placer",
        version=placer.__version__,
        summary="Where each layer of a PyTorch model should run.",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        # the redirect would go to whatever host the client names
        redirect_slashes=False,
    )
    app.state.settings = settings or Settings()
    app.state.solver = solver
    app.state.metrics = Metrics()
    include_routes(app)
    app.add_middleware(Heads)
    app.add_middleware(Guard, keys=Keys(app.state.settings))
    # the outermost: it sees what the guard refuses
    app.add_middleware(Measured, metrics=app.state.metrics)
    handle_errors(app)
    describe(app)
    return app


def run(settings: Settings | None = None, *, solver: Solver = default_solver) -> None:
    """Serve until SIGTERM or SIGINT; then every solve ends with its best, and those who wait get
    it.

    Args:
        settings: how it behaves; from the environment if None.
        solver: see ``create_app``.

    Raises:
        ServerError: it could not start.
    """
    settings = settings or Settings()
    prepare()
    serving.serve(create_app(settings, solver=solver), settings)


@contextmanager
def background(
    settings: Settings | None = None, *, solver: Solver = default_solver
) -> Iterator[str]:
    """Serve in a thread of this process for as long as the context is open.

    Args:
        settings: how it behaves, from the environment if None; port 0 takes a free one.
        solver: see ``create_app``.

    Yields:
        The service's URL.

    Raises:
        ServerError: it could not start.
    """
    settings = settings or Settings()
    with serving.serve_in_thread(create_app(settings, solver=solver), settings) as url:
        yield url


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(THREADS, thread_name_prefix="placer")
    )
    owner = secrets.token_hex(8)
    store = await asyncio.to_thread(_open_store, app, settings, owner)
    peers = _peers(settings, store, owner)
    jobs = Jobs(settings, store, app.state.metrics, app.state.solver, peers)
    service = Service(
        settings,
        store,
        app.state.metrics,
        Intake(settings),
        Checker(),
        jobs,
        Judge(settings),
        Profiling(settings, store, app.state.metrics),
        NodeCluster(settings),
        Shares(MOST_STREAMS, settings.client_share, "event streams are open", retry_s=5),
    )
    app.state.service = service
    jobs.resume()
    warming = asyncio.create_task(_warm_up(service))
    upkeep_tasks = [
        asyncio.create_task(mend_forever(store)),
        asyncio.create_task(watch_gpus(app.state.metrics)),
    ]
    if store.database.shared:
        upkeep_tasks.append(asyncio.create_task(service.profiling.resume()))
    if settings.register_url:
        upkeep_tasks.append(asyncio.create_task(register_forever(settings, service.cluster)))
    try:
        yield
    finally:
        service.cluster.stop()
        await service.profiling.close()
        for task in upkeep_tasks:
            task.cancel()
        await jobs.close()
        await mend(store)
        await warming
        service.checker.close()
        store.close()


def _peers(settings: Settings, store: Store, owner: str) -> Peers | None:
    if not store.database.shared:
        return None
    return Peers(store, Replicas(store.database, owner, settings.lease_s), settings.lease_s)


def _open_store(app: FastAPI, settings: Settings, owner: str) -> Store:
    try:
        return Store(settings.database, settings.keep, owner, settings.cache_bytes)
    except StoreError as error:
        app.state.not_started = f"{error}; set PLACER_DATABASE to a file that can be written, or a database that answers"
        raise
    except PlacerError as error:
        app.state.not_started = str(error)
        raise
    except OSError as error:
        app.state.not_started = f"database {settings.database!r} cannot be used: {error}; set PLACER_DATABASE to a file that can be written"
        raise


async def _warm_up(service: Service) -> None:
    """Run a worker that does nothing; the service is ready when it came back, and a small solve
    would.

    Readiness needs no key, so what the system says of a failure is in the log alone.
    """
    worker = Worker(tell_taken_bytes, b"", lambda *_: None, limit_s=WARM_UP_S, grace_s=1.0)
    try:
        taken_bytes = await asyncio.to_thread(worker.run)
    except (Crashed, Killed, OSError) as error:
        log.error("no worker can be started: %s", error)
        service.not_ready = "no worker can be started; the service's log says why"
        return
    service.not_ready = _too_little_memory(service.settings.worker_memory_bytes, taken_bytes)
    if service.not_ready:
        log.error(service.not_ready)


def _too_little_memory(limit_bytes: int, taken_bytes: int) -> str:
    """Why no worker could solve anything; empty if one could."""
    needed_bytes = taken_bytes + SMALL_SOLVE_BYTES
    if not limit_bytes or limit_bytes >= needed_bytes:
        return ""
    return (
        f"PLACER_WORKER_MEMORY_BYTES is {limit_bytes}; a worker takes {taken_bytes} bytes before it solves anything,"
        f" and a small solve {SMALL_SOLVE_BYTES} beside: set {needed_bytes} or more, or 0 for no limit"
    )
