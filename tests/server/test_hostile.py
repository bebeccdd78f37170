"""Hostile requests get well-formed answers: never a 5xx, and no error over 4 KB."""

from __future__ import annotations

import json
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from placer_server.problem import MAX_BYTES

IDS = st.sampled_from(["0" * 32, "x", "..", "%00", "%ff", "é", "a" * 3000]) | st.text(max_size=40)
PATHS = st.sampled_from(
    [
        "/v1/placements",
        "/v1/placements/{id}",
        "/v1/placements/{id}/events",
        "/v1/placements/{id}/request",
        "/v1/profiles/{id}",
        "/page/{id}",
        "/",
        "/metrics",
        "/openapi.json",
        "/{id}",
    ]
)
NAMES = st.sampled_from(
    ["q", "limit", "cursor", "status", "objective", "wait", "on_disconnect", "id", "x"]
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


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    from fastapi.testclient import TestClient

    from placer_server.app import create_app
    from placer_server.settings import Settings

    database = str(tmp_path_factory.mktemp("hostile") / "p.db")
    app = create_app(Settings(database=database, workers=1))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        while client.get("/readyz").status_code != 200:
            pass
        yield client


@settings(max_examples=160, deadline=None, suppress_health_check=list(HealthCheck))
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
