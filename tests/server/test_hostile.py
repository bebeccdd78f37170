"""Hostile requests get well-formed answers: never a 5xx, and no error over 4 KB."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from placer.schema import Constraints, Layer, PlacementRequest
from placer_server.openapi import examples
from placer_server.problem import MAX_BYTES

IDS = st.sampled_from(["0" * 32, "x", "..", "%00", "%ff", "é", "a" * 3000]) | st.text(max_size=40)
PATHS = st.sampled_from(
    [
        "/v1/placements",
        "/v1/placements/{id}",
        "/v1/placements/{id}/events",
        "/v1/placements/{id}/request",
        "/v1/placements/{id}/timeline",
        "/v1/placements/{id}/trace",
        "/v1/placements/{id}/report",
        "/v1/placements/{id}/export",
        "/v1/placements:together",
        "/v1/placements:batch",
        "/v1/placements:evaluate",
        "/v1/placements:compare",
        "/v1/profiles",
        "/v1/estimates",
        "/v1/nodes",
        "/v1/nodes/{id}",
        "/v1/profiles/{id}",
        "/page/{id}",
        "/",
        "/metrics",
        "/openapi.json",
        "/{id}",
    ]
)
NAMES = st.sampled_from(
    [
        *("q", "limit", "cursor", "status", "objective", "wait", "on_disconnect", "id", "best"),
        *("format", "node", "x"),
    ]
)
VALUES = st.sampled_from(
    [
        "",
        "-1",
        "nan",
        "1e999",
        "stop",
        "%",
        "_",
        "!",
        "'; DROP TABLE placements; --",
        "\0",
        "9" * 400,
    ]
)
QUERIES = st.dictionaries(NAMES, VALUES | st.text(max_size=50), max_size=4)
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "Authorization",
            "If-None-Match",
            "Accept-Encoding",
            "X-Request-Id",
            "Accept",
            "Content-Encoding",
        ]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=100)
    | st.sampled_from(["*", "gzip;q=0", "W/"]),
    max_size=3,
)
BODIES = st.binary(max_size=200) | st.dictionaries(
    st.text(max_size=9), st.none() | st.integers()
).map(lambda value: json.dumps(value).encode())


EXAMPLES = [
    ("POST", path, example["value"])
    for path, found in (
        ("/v1/placements?wait=20", examples.requests()),
        ("/v1/placements:together?wait=20", examples.joint_requests()),
        ("/v1/placements:batch?wait=20", examples.batches()),
        ("/v1/placements:evaluate", examples.evaluations()),
        ("/v1/placements:evaluate?best=true", examples.evaluations()),
        ("/v1/placements:compare", examples.comparisons()),
    )
    for example in found.values()
]
EXAMPLES += [("PUT", "/v1/nodes/one", examples.clusters()["two devices"]["value"])]
FIELDS = [*PlacementRequest.model_fields, *Constraints.model_fields, *Layer.model_fields, "runs"]
WRONG = [None, True, 0, -1, 0.5, 3, 1e300, 2**60, 2**63, 10**400, "", "0", "\0", "é" * 50]
WRONG += ["a" * 20_000, [], {}, [[]], {"x": 1}, "auto", "step", "memory", "cuda:1", "block.0"]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value within decoded JSON."""
    if at:
        yield at
    inner: dict[Any, Any] = value if isinstance(value, dict) else {}
    if isinstance(value, list):
        inner = dict(enumerate(value))
    for name, one in inner.items():
        yield from places(one, (*at, name))


@st.composite
def altered(draw: Any) -> tuple[str, str, bytes]:
    """Return the method, path and body of an example with up to three wrong, missing or new
    values."""
    method, path, value = draw(st.sampled_from(EXAMPLES))
    body = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        *folders, name = draw(st.sampled_from([*places(body)] or [("x",)]))
        inner = body
        for folder in folders:
            inner = inner[folder]
        kind = draw(st.sampled_from(["wrong", "missing", "new"]))
        if kind == "missing":
            inner.pop(name, None) if isinstance(inner, dict) else inner.pop(name)
        elif kind == "new" and isinstance(inner, dict):
            inner[draw(st.sampled_from(FIELDS))] = copy.deepcopy(draw(st.sampled_from(WRONG)))
        else:
            inner[name] = copy.deepcopy(draw(st.sampled_from(WRONG)))
    for asked in (body, body.get("shared"), body.get("request")):
        if isinstance(asked, dict):
            asked["time_limit_s"] = 1  # the limit itself has tests of its own
    return method, path, json.dumps(body).encode()


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    from fastapi.testclient import TestClient

    from placer_server.app import create_app
    from placer_server.settings import Settings

    database = str(tmp_path_factory.mktemp("hostile") / "p.db")
    app = create_app(Settings(database=database, workers=1, log_level="error"))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        while client.get("/readyz").status_code != 200:
            pass
        yield client


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"]),
    PATHS,
    IDS,
    QUERIES,
    HEADERS,
    BODIES,
)
def test_every_request_is_answered_in_form(client, method, path, id, query, headers, body):
    headers = {"Content-Type": "application/json", **headers}
    where = path.replace("{id}", quote(id, safe="%.", errors="replace"))
    reply = client.request(
        method, f"{where}?{urlencode(query, errors='replace')}", headers=headers, content=body
    )
    assert reply.status_code < 500
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    if reply.status_code >= 400:
        assert reply.headers["Content-Type"] == "application/problem+json"
        assert len(reply.content) <= MAX_BYTES
        assert method == "HEAD" or reply.json()["status"] == reply.status_code


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(altered())
def test_altered_examples_are_answered_or_refused(client, altered):
    method, path, body = altered
    reply = client.request(method, path, headers={"Content-Type": "application/json"}, content=body)
    assert reply.status_code in (200, 400, 413, 422), (reply.text, body)
    found = reply.json()
    assert all(answer["status"] in (200, 400, 422) for answer in found.get("answers", ()))
    if path.startswith("/v1/placements?") and reply.status_code == 200:
        for shown in ("timeline", "trace", "report", "request", "export?format=vllm"):
            shown_reply = client.get(f"/v1/placements/{found['id']}/{shown}")
            assert shown_reply.status_code in (200, 422), (shown, shown_reply.text, body)


def test_no_path_is_redirected_to_the_host_that_the_client_names(client):
    """``GET /v1/placements/`` redirected to the path without the slash on any named host."""
    paths = {
        path.replace("{id}", "0" * 32).replace("{name}", "node")
        for path in client.get("/openapi.json").json()["paths"]
    }
    paths |= {"/openapi.json", "/page/main.js", "/nothing"}
    for path in sorted(paths):
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
            for host in ("127.0.0.1", "evil.example"):
                reply = client.request(
                    method, f"{path}/", headers={"Host": host}, follow_redirects=False
                )
                assert not reply.has_redirect_location and reply.status_code >= 400, (
                    method,
                    path,
                    host,
                )
                assert "evil.example" not in json.dumps(dict(reply.headers)), (method, path)
    assert client.get("/v1/placements").status_code == 200
