from __future__ import annotations

import gzip

import pytest

from placer.schema import PlacementRequest, Profile


@pytest.fixture(scope="module")
def filled(serve_module, request_body):
    """Return the ids of five stored placements, oldest first, and a client of their service."""
    return fill(serve_module(), request_body)


def fill(client, request_body):
    ids = []
    for seed in range(5):
        body = request_body(seed=seed, objective="latency" if seed == 3 else "throughput")
        body["profile"]["model"] = f"Model{seed} 100%"
        ids.append(client.post("/v1/placements", json=body).json()["id"])
    return client, ids


def ids_of(reply):
    return [row["id"] for row in reply.json()["placements"]]


def test_placements_are_listed_newest_first_with_what_they_are(filled):
    client, ids = filled
    reply = client.get("/v1/placements")
    assert ids_of(reply) == ids[::-1]
    first = reply.json()["placements"][0]
    assert (first["model"], first["layers"], first["devices"], first["status"]) == (
        "Model4 100%",
        4,
        2,
        "optimal",
    )
    assert reply.json()["next"] is None


def test_pages_follow_one_another_without_gap_or_overlap(filled):
    client, ids = filled
    seen, where = [], "/v1/placements?limit=2"
    while where:
        reply = client.get(where)
        seen += ids_of(reply)
        where = reply.links.get("next", {}).get("url")
        assert (where is None) == (reply.json()["next"] is None)
    assert seen == ids[::-1]


def test_a_new_placement_does_not_shift_the_next_page(serve, request_body):
    client, ids = fill(serve(), request_body)
    first = client.get("/v1/placements?limit=2")
    client.post("/v1/placements", json=request_body(seed=99))
    assert ids_of(client.get(first.links["next"]["url"])) == [ids[2], ids[1]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("q=model3", [3]),
        ("q=MODEL", [4, 3, 2, 1, 0]),
        ("q=%25", [4, 3, 2, 1, 0]),
        ("q=_odel", []),
        ("objective=latency", [3]),
        ("status=optimal&objective=throughput", [4, 2, 1, 0]),
        ("status=infeasible", []),
    ],
)
def test_placements_are_found_by_text_status_and_objective(filled, query, expected):
    client, ids = filled
    assert ids_of(client.get(f"/v1/placements?{query}")) == [ids[number] for number in expected]


def test_a_placement_is_found_by_the_start_of_its_id(filled):
    client, ids = filled
    assert ids_of(client.get(f"/v1/placements?q={ids[1][:12]}")) == [ids[1]]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1000", "cursor=x", "cursor=" + "f" * 90, "status=good", "pages=2"]
)
def test_a_list_that_cannot_be_is_422(service, query):
    reply = service.get(f"/v1/placements?{query}")
    assert (reply.status_code, reply.headers["Content-Type"]) == (422, "application/problem+json")


def test_the_question_of_a_placement_is_kept_and_has_its_id(filled, request_body):
    client, ids = filled
    request = PlacementRequest.model_validate_json(
        client.get(f"/v1/placements/{ids[0]}/request").content
    )
    assert request.content_hash() == ids[0]


def test_placements_of_one_profile_share_it(serve, request_body):
    client = serve()
    for chunks in (1, 2):
        client.post("/v1/placements", json=request_body(chunks=chunks))
    (key,) = {row["profile_id"] for row in client.get("/v1/placements").json()["placements"]}
    profile = Profile.model_validate_json(client.get(f"/v1/profiles/{key}").content)
    assert profile == PlacementRequest.model_validate(request_body()).profile


def test_a_profile_goes_with_the_last_placement_of_it(serve, request_body):
    client = serve(keep=1)
    client.post("/v1/placements", json=request_body())
    (old,) = client.get("/v1/placements").json()["placements"]
    body = request_body(seed=1)
    body["profile"]["model"] = "Another"
    client.post("/v1/placements", json=body)
    assert client.get(f"/v1/profiles/{old['profile_id']}").status_code == 404


@pytest.mark.parametrize(
    "path", ["/v1/profiles/x", f"/v1/profiles/{'0' * 32}", f"/v1/placements/{'0' * 32}/request"]
)
def test_what_was_never_asked_is_404(service, path):
    reply = service.get(path)
    assert (reply.status_code, reply.headers["Content-Type"]) == (404, "application/problem+json")


def test_an_answer_that_the_client_has_is_304_without_a_body(filled):
    client, ids = filled
    for path in (f"/v1/placements/{ids[0]}", "/v1/placements", f"/v1/placements/{ids[0]}/request"):
        tag = client.get(path).headers["ETag"]
        again = client.get(path, headers={"If-None-Match": f'"other", {tag}'})
        assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
        assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_a_list_that_has_changed_has_another_etag(serve, request_body):
    client = serve()
    before = client.get("/v1/placements").headers["ETag"]
    client.post("/v1/placements", json=request_body(seed=99))
    assert client.get("/v1/placements", headers={"If-None-Match": before}).status_code == 200


@pytest.mark.parametrize(
    ("takes", "compressed"),
    [
        ("gzip", True),
        ("br;q=1, gzip;q=0.5", True),
        ("*", True),
        ("", False),
        ("identity", False),
        ("gzip;q=0", False),
    ],
)
def test_a_reply_is_compressed_where_the_client_takes_it(filled, takes, compressed):
    client, ids = filled
    with client.stream(
        "GET", f"/v1/placements/{ids[0]}/request", headers={"Accept-Encoding": takes}
    ) as reply:
        raw = b"".join(reply.iter_raw())
    assert (reply.headers.get("Content-Encoding") == "gzip") == compressed
    assert reply.headers["Vary"] == "Accept-Encoding"
    plain = gzip.decompress(raw) if compressed else raw
    assert plain == client.get(f"/v1/placements/{ids[0]}/request").content


def test_a_large_reply_is_compressed_without_holding_up_others(filled, monkeypatch):
    client, ids = filled
    path, takes = f"/v1/placements/{ids[0]}/request", {"Accept-Encoding": "gzip"}
    small = client.get(path, headers=takes)
    monkeypatch.setattr("placer_server.web.replies.LARGE_BYTES", 1)
    with client.stream("GET", path, headers=takes) as large:
        raw = b"".join(large.iter_raw())
    assert gzip.decompress(raw) == small.content
    assert dict(large.headers) == {**small.headers, "x-request-id": large.headers["x-request-id"]}
    assert int(large.headers["Content-Length"]) == len(raw)
