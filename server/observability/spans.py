"""OpenTelemetry spans, if ``opentelemetry-api`` is installed and a tracer provider is set.

    POST /v1/placements ──▶ placer.solve (queued, then in a worker), possibly long after the 202

The spans of requests come from FastAPI, or from ``opentelemetry-instrumentation-asgi`` for versions
without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

try:
    from opentelemetry import trace
except ImportError:
    trace = None  # type: ignore[assignment]

Attributes = Mapping[str, str | int | float | bool]


def current_context() -> Any:
    """Return the context of the current span for a later span; None without OpenTelemetry."""
    if trace is None:
        return None
    return trace.set_span_in_context(trace.get_current_span())


@contextmanager
def span(
    name: str, attributes: Attributes, parent: Any = None
) -> Iterator[dict[str, str | int | float | bool]]:
    """Open a span for the duration of the context.

    Args:
        name: Name, such as ``placer.solve``.
        attributes: Attributes that are known at the start.
        parent: Context from ``current_context``; the current span if None.

    Yields:
        A dictionary for attributes that are known at the end. ``error`` marks the span as failed,
            with
        its value as the reason.
    """
    found: dict[str, str | int | float | bool] = {}
    if trace is None:
        yield found
        return
    tracer = trace.get_tracer("placer_server")
    with tracer.start_as_current_span(name, context=parent, attributes=dict(attributes)) as current:
        try:
            yield found
        finally:
            if "error" in found:
                current.set_status(trace.StatusCode.ERROR, str(found.pop("error")))
            current.set_attributes(found)
