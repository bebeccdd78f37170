"""Prometheus metrics of ``/metrics``.

Each application has a registry of its own, so that two can run in one process.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("placer_server")

# Paths that are requested every few seconds, and therefore not logged.
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})

# Route of all paths that the service does not have; unlimited labels would fill the memory.
UNKNOWN = "unknown"

# Number of characters of an unknown path that are logged.
LONGEST_PATH = 200

MEDIA_TYPE = CONTENT_TYPE_LATEST

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_SOLVE_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
_GAP_BUCKETS = (0.0, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
_REQUEST_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters, gauges and histograms of the service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "placer_requests", "HTTP requests answered", ["method", "route", "status"]
        )
        self.request_seconds = histogram(
            "placer_request_seconds",
            "Time to answer a request, in seconds",
            ["route"],
            buckets=_REQUEST_BUCKETS,
        )
        self.solves = counter("placer_solves", "Solves that ended, by outcome", ["status"])
        self.solve_seconds = histogram(
            "placer_solve_seconds",
            "Time from a solve's start to its end, in seconds",
            buckets=_SOLVE_BUCKETS,
        )
        self.solve_gap = histogram(
            "placer_solve_gap", "Relative gap of placements, from 0 to 1", buckets=_GAP_BUCKETS
        )
        self.cache_hits = counter("placer_cache_hits", "Requests answered from the store")
        self.rejections = counter("placer_rejections", "Requests rejected because a queue was full")
        self.running = gauge("placer_solves_running", "Solves that are running")
        self.queued = gauge("placer_solves_queued", "Solves that wait for a worker")
        self.profiles = counter(
            "placer_profiles", "Graphs that were measured, by outcome", ["status"]
        )
        gpu = ["uuid", "name"]
        self.gpu_memory_used = gauge("placer_gpu_memory_used_bytes", "Memory in use, in bytes", gpu)
        self.gpu_memory_total = gauge("placer_gpu_memory_bytes", "Memory of the GPU, in bytes", gpu)
        self.gpu_busy = gauge(
            "placer_gpu_busy", "Share of time in which a kernel ran, from 0 to 1", gpu
        )
        self.gpu_celsius = gauge("placer_gpu_celsius", "Temperature in degrees Celsius", gpu)

    def count_unread(self, status: int) -> None:
        """Count a rejected request whose head was not read completely, so its method is unknown."""
        self.requests.labels("other", UNKNOWN, str(status)).inc()

    def forget_gpus(self) -> None:
        """Remove the state of the GPUs, which is no longer known."""
        for gauge in (self.gpu_memory_used, self.gpu_memory_total, self.gpu_busy, self.gpu_celsius):
            gauge.clear()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class RequestMetrics:
    """Middleware that counts and times requests by method, route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and record its outcome."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        # The status if the application fails without an answer.
        status = 500

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, record_status)
        finally:
            method = scope["method"] if scope["method"] in METHODS else "other"
            route = getattr(scope.get("route"), "path", UNKNOWN)
            seconds = time.perf_counter() - started
            self._metrics.requests.labels(method, route, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(seconds)
            if route not in QUIET and log.isEnabledFor(logging.INFO):
                # A quoted path cannot forge a line of the log.
                shown = quote(scope["path"][:LONGEST_PATH]) if route == UNKNOWN else route
                about = {"method": method, "route": shown, "status": status}
                about["ms"] = round(1e3 * seconds, 1)
                client = scope.get("placer.client", "")
                log.info("%s %s %d %.1f ms", *about.values(), extra={**about, "client": client})
