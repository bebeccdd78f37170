"""HEAD requests get the headers of GET without the body."""

from __future__ import annotations

import pytest

from placer_server.openapi import examples


@pytest.mark.parametrize(
    "path", ["/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/placements", "/v1/nodes"]
)
def test_head_is_get_without_its_body(service, path):
    # Load balancers and curl -I were told 405.
    got, head = service.get(path), service.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Type"] == got.headers["Content-Type"]


def test_head_of_a_placement_has_its_tag_and_its_length(serve, request_body):
    client = serve()
    where = f"/v1/placements/{client.post('/v1/placements', json=request_body()).json()['id']}"
    plain = {"Accept-Encoding": "identity"}
    got, head = client.get(where, headers=plain), client.head(where, headers=plain)
    assert head.headers["ETag"] == got.headers["ETag"]
    assert int(head.headers["Content-Length"]) == len(got.content)


@pytest.mark.parametrize("path", ["/nothing", f"/v1/placements/{'0' * 32}"])
def test_head_of_what_is_not_there_is_404(service, path):
    reply = service.head(path)
    assert (reply.status_code, reply.content) == (404, b"")


def test_head_of_a_stream_of_events_is_405(serve, solvers):
    # Its body tells when it ends, so the head alone would wait for that.
    client = serve(solvers.until_stopped)
    id = client.post(
        "/v1/placements?wait=0", json=examples.requests()["throughput"]["value"]
    ).json()["id"]
    reply = client.head(f"/v1/placements/{id}/events")
    assert (reply.status_code, reply.headers["Allow"]) == (405, "GET")


def test_head_is_counted_as_such_by_its_route(serve):
    client = serve()
    client.head("/healthz")
    assert (
        'placer_requests_total{method="HEAD",route="/healthz",status="200"} 1.0'
        in client.get("/metrics").text
    )
