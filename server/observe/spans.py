"""OpenTelemetry spans, where ``opentelemetry-api`` is installed and a tracer provider is set; else
nothing.

    POST /v1/placements ──▶ placer.solve (queued, then a worker), also where the request has long
    been answered 202

The spans of requests come from FastAPI, or from ``opentelemetry-instrumentation-asgi`` for versions
without.
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


def here() -> Any:
    """The span that runs now, for one that is begun later; None without OpenTelemetry."""
    if trace is None:
        return None
    return trace.set_span_in_context(trace.get_current_span())


@contextmanager
def span(
    name: str, attributes: Attributes, parent: Any = None
) -> Iterator[dict[str, str | int | float | bool]]:
    """A span around what is done in the context.

    Args:
        name: such as ``placer.solve``.
        attributes: known at its begin.
        parent: from ``here``; the span that runs now if None.

    Yields:
        Attributes to be added to at its end; ``error`` says that it failed, and why.
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
