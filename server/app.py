"""The ASGI application: assembly, lifespan and startup checks."""

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
    from .api.error_handlers import handle_errors
    from .api.routes import ROUTERS
    from .api.service import Service
    from .jobs.evaluations import Estimates, Evaluations
    from .jobs.measurements import Measurements
    from .jobs.peers import Peers
    from .jobs.solves import Solves
    from .keys import Keys
    from .node.cluster import NodeCluster, register_forever
    from .observability.gpus import watch_gpus
    from .observability.metrics import Metrics, RequestMetrics
    from .openapi.document import describe
    from .quota import Quota
    from .settings import Settings
    from .store.database import StoreError
    from .store.replicas import Replicas
    from .store.store import Store
    from .store.write_retries import retry_writes, retry_writes_forever
    from .web.body_reader import BodyReader
    from .web.guard import Guard, HeadRequests
    from .web.validation import Validator
    from .workers.solving import Solver, default_solver
    from .workers.worker import Crashed, Killed, Worker, measure_idle_bytes, start_fork_server

log = logging.getLogger("placer_server")

WARM_UP_S = 60.0

# Memory for a solve of about fifty layers, in addition to the worker's base use.
SMALL_SOLVE_BYTES = 64 * 2**20

MAX_STREAMS = 512

# Threads for blocking calls: PostgreSQL statements, and measurements that take minutes. asyncio's
# default executor has few threads on machines with few cores.
THREADS = 32


def create_app(settings: Settings | None = None, *, solver: Solver = default_solver) -> FastAPI:
    """Return the service as an ASGI application.

    Args:
        settings: Settings of the service; read from the environment if None.
        solver: Function ``solver(request, *, progress=None, stop=None) -> Placement``. It runs in a
            worker process, so it must be importable by name.

    Raises:
        InputError: The solver is defined in the main script, from which no other process can import
            it; or the service would be reachable from other machines without keys.
    """
    if getattr(solver, "__module__", None) == "__main__":
        raise InputError(
            f"solver {solver!r} is defined in the main script, which workers cannot import;"
            " move it to a module"
        )
    app = FastAPI(
        title="Placer",
        version=placer.__version__,
        summary="Where each layer of a PyTorch model should run.",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        # A redirect would lead to the host that the client names, whatever it is.
        redirect_slashes=False,
    )
    app.state.settings = settings or Settings()
    app.state.solver = solver
    app.state.metrics = Metrics()
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(HeadRequests)
    app.add_middleware(Guard, keys=Keys(app.state.settings))
    # Added last, so it is the outermost middleware and counts requests that the guard rejects.
    app.add_middleware(RequestMetrics, metrics=app.state.metrics)
    handle_errors(app)
    describe(app)
    return app


def run(settings: Settings | None = None, *, solver: Solver = default_solver) -> None:
    """Serve until SIGTERM or SIGINT, then end every solve with its best placement so far.

    The arguments are as for ``create_app``.

    Raises:
        ServerError: The service could not start.
    """
    settings = settings or Settings()
    start_fork_server()
    serving.serve(create_app(settings, solver=solver), settings)


@contextmanager
def background(
    settings: Settings | None = None, *, solver: Solver = default_solver
) -> Iterator[str]:
    """Serve in a thread of this process while the context is open.

    The arguments are as for ``create_app``. Port 0 of the settings takes a free port.

    Yields:
        The service's URL.

    Raises:
        ServerError: The service could not start.
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
    peers = None
    if store.database.shared:
        peers = Peers(store, Replicas(store.database, owner, settings.lease_s), settings.lease_s)
    metrics = app.state.metrics
    service = Service(
        settings=settings,
        store=store,
        metrics=metrics,
        body_reader=BodyReader(settings),
        validator=Validator(),
        solves=Solves(settings, store, metrics, app.state.solver, peers),
        evaluations=Evaluations(settings),
        estimates=Estimates(settings),
        measurements=Measurements(settings, store, metrics),
        cluster=NodeCluster(settings),
        stream_quota=Quota(MAX_STREAMS, settings.client_share, "event streams", retry_s=5),
    )
    app.state.service = service
    # Continue the accepted jobs that an earlier start left.
    service.solves.resume()
    warming = asyncio.create_task(_warm_up(service))
    upkeep_tasks = [
        asyncio.create_task(retry_writes_forever(store)),
        asyncio.create_task(watch_gpus(app.state.metrics)),
    ]
    if store.database.shared:
        upkeep_tasks.append(asyncio.create_task(service.measurements.resume()))
    if settings.register_url:
        upkeep_tasks.append(asyncio.create_task(register_forever(settings, service.cluster)))
    try:
        yield
    finally:
        # Stop the workers first, then write what is pending, and close the store last.
        service.cluster.stop()
        await service.measurements.close()
        for task in upkeep_tasks:
            task.cancel()
        await service.solves.close()
        await retry_writes(store)
        await warming
        service.validator.close()
        store.close()


def _open_store(app: FastAPI, settings: Settings, owner: str) -> Store:
    try:
        return Store(settings.database, settings.keep, owner, settings.cache_bytes)
    except (PlacerError, OSError) as error:
        reason = str(error)
        if isinstance(error, StoreError):
            reason += "; set PLACER_DATABASE to a writable file or a reachable database"
        elif isinstance(error, OSError):
            reason = f"database {settings.database!r} cannot be used: {error}"
            reason += "; set PLACER_DATABASE to a writable file"
        app.state.not_started = reason
        raise


async def _warm_up(service: Service) -> None:
    """Run an idle worker; the service is ready once it has returned and a small solve would fit.

    ``/readyz`` needs no key, so the system's error message goes to the log only.
    """
    worker = Worker(measure_idle_bytes, b"", limit_s=WARM_UP_S, grace_s=1.0)
    try:
        idle_bytes = await asyncio.to_thread(worker.run)
    except (Crashed, Killed, OSError) as error:
        log.error("no worker can be started: %s", error)
        service.not_ready = "no worker can be started; see the service's log"
        return
    service.not_ready = _too_little_memory(service.settings.worker_memory_bytes, idle_bytes)
    if service.not_ready:
        log.error(service.not_ready)


def _too_little_memory(limit_bytes: int, idle_bytes: int) -> str:
    """Return why no worker could solve anything, or an empty string."""
    needed_bytes = idle_bytes + SMALL_SOLVE_BYTES
    if not limit_bytes or limit_bytes >= needed_bytes:
        return ""
    return (
        f"PLACER_WORKER_MEMORY_BYTES is {limit_bytes}, but an idle worker needs {idle_bytes} bytes"
        f" and a small solve {SMALL_SOLVE_BYTES} more: set {needed_bytes} or more, or 0 for no"
        " limit"
    )
