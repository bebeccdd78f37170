"""OpenTelemetry spans of solves and measurements, below the spans of their requests."""

from __future__ import annotations

import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from placer_server.observability import spans


@pytest.fixture
def exported(monkeypatch):
    """Return the ended spans by name."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))
    return lambda name: [span for span in exporter.get_finished_spans() if span.name == name]


def test_a_solve_is_a_span_that_says_how_it_ended(exported, serve, request_body, wait_until):
    client = serve()
    key = client.post("/v1/placements?wait=30", json=request_body()).json()["id"]
    wait_until(lambda: exported("placer.solve"))
    (span,) = exported("placer.solve")
    expected = {
        "placer.id": key,
        "placer.objective": "throughput",
        "placer.ended": "answered",
        "placer.starts": 1,
    }
    assert dict(span.attributes) == expected
    assert span.status.is_ok


def test_a_solve_that_fails_is_a_span_with_an_error(
    exported, serve, solvers, request_body, wait_until, capfd
):
    serve(solvers.failing).post("/v1/placements?wait=30", json=request_body())
    wait_until(lambda: exported("placer.solve"))
    (span,) = exported("placer.solve")
    assert (span.status.status_code, span.status.description) == (
        trace.StatusCode.ERROR,
        "The solver failed",
    )


def test_a_span_is_under_the_one_that_was_there_when_it_was_asked_for(exported):
    with spans.span("outer", {}):
        asked = spans.current_context()
    with spans.span("inner", {"n": 1}, asked) as told:
        told["more"] = True
    (outer,), (inner,) = exported("outer"), exported("inner")
    assert inner.parent.span_id == outer.context.span_id
    assert dict(inner.attributes) == {"n": 1, "more": True}


def test_without_opentelemetry_nothing_is_told_and_nothing_fails(monkeypatch):
    monkeypatch.setattr(spans, "trace", None)
    with spans.span("x", {}, spans.current_context()) as told:
        told["error"] = "lost"


def test_opentelemetry_is_not_needed():
    import subprocess

    code = (
        "import sys; sys.modules['opentelemetry'] = None;"
        " import placer_server.observability.spans as s; print(s.trace)"
    )
    said = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "None"
