from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from placer_server.problem import MAX_BYTES, Problem
from placer_server.settings import Settings
from placer_server.web import validation
from placer_server.web.body_reader import BodyReader
from placer_server.web.validation import check

POST = "/v1/placements"
JSON = {"Content-Type": "application/json"}


def problem_of(reply):
    """Check that a reply is a problem, and return its content."""
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert len(reply.content) <= MAX_BYTES
    content = reply.json()
    assert content["status"] == reply.status_code
    assert content["type"].startswith("urn:placer:problem:")
    return content


def with_profile(body, **changes):
    return {**body, "profile": {**body["profile"], **changes}}


def edge(source, target):
    return {"source": source, "targets": [target], "bytes": 1}


BROKEN = {
    "nothing": (b"", 400, "JSON"),
    "not JSON": (b"profile: resnet", 400, "JSON"),
    "cut off": (b'{"profile": {', 400, "JSON"),
    "not UTF-8": (b"\xff\xfe{", 400, "JSON"),
    "deep nesting": (b'{"profile":' * 50_000, 400, "recursion"),
    "deep lists": (b"[" * 100_000, 400, "recursion"),
    "a number of a million digits": (b'{"seed": ' + b"9" * 1_000_000 + b"}", 400, "number"),
    "a list": (b"[]", 422, "object"),
    "an empty object": (b"{}", 422, "profile"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_body_that_is_no_request_is_a_problem_that_says_why(service, name):
    body, status, word = BROKEN[name]
    reply = service.post(POST, content=body, headers=JSON)
    assert problem_of(reply)["status"] == status
    assert word in reply.json()["detail"]


FAULTS = {
    "NaN": (
        lambda b: with_profile(b, layers=[{"name": "a", "forward_ms": {"gpu": float("nan")}}]),
        ["forward_ms", "NaN"],
    ),
    "infinity": (lambda b: {**b, "time_limit_s": float("inf")}, ["time_limit_s", "finite"]),
    "a huge number": (lambda b: with_profile(b, batch_size=10**400), ["batch_size"]),
    "a negative time": (
        lambda b: with_profile(b, layers=[{"name": "a", "forward_ms": {"gpu": -1.5}}]),
        ["profile.layers.0.forward_ms.gpu", "greater than or equal to 0", "-1.5"],
    ),
    "an unknown version": (
        lambda b: {**b, "schema_version": "7"},
        ["schema_version", "'7'", "'1', '2' and '3'"],
    ),
    "an unknown version of the profile": (
        lambda b: with_profile(b, schema_version="0"),
        ["profile.schema_version", "'0'"],
    ),
    "an unknown field": (
        lambda b: {**b, "chunk": 4},
        ["chunk", "no such field", "did you mean 'chunks'?"],
    ),
    "an unknown field of a layer": (
        lambda b: with_profile(
            b, layers=[{"name": "a", "forward_ms": {"gpu": 1}, "parameter_bytes": 5}]
        ),
        ["profile.layers.0.parameter_bytes", "did you mean 'param_bytes'?"],
    ),
    "an unknown field of the constraints": (
        lambda b: {**b, "constraints": {"zzz": 1}},
        ["constraints.zzz", "there are 'contiguous', 'recompute', 'pinned'"],
    ),
    "a cycle": (
        lambda b: with_profile(
            b,
            edges=[edge("embed", "block.0"), edge("block.0", "block.1"), edge("block.1", "embed")],
        ),
        ["cycle", "block.1 -> embed -> block.0 -> block.1"],
    ),
    "an edge to a missing layer": (
        lambda b: with_profile(b, edges=[edge("embed", "tail")]),
        ["'tail'", "no layer"],
    ),
    "two layers of one name": (
        lambda b: with_profile(b, layers=b["profile"]["layers"][:1] * 2),
        ["'embed'", "twice"],
    ),
    "no cluster": (lambda b: {**b, "cluster": None}, ["cluster", "devices"]),
    "a pin to a missing device": (
        lambda b: {**b, "constraints": {"pinned": {"head": "cuda:9"}}},
        ["constraints.pinned", "'cuda:9'"],
    ),
    "no layers": (lambda b: with_profile(b, layers=[]), ["profile.layers"]),
    "a word for a number": (lambda b: {**b, "chunks": "many"}, ["chunks", "'many'"]),
    "a time limit of nothing": (
        lambda b: {**b, "time_limit_s": 0},
        ["time_limit_s", "greater than 0"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_request_is_422_and_names_the_fault(service, request_body, name):
    spoil, words = FAULTS[name]
    reply = service.post(POST, content=json.dumps(spoil(request_body())), headers=JSON)
    assert problem_of(reply)["status"] == 422
    for word in words:
        assert word in reply.json()["detail"]


def test_a_profile_or_a_placement_posted_as_a_request_gets_a_hint(service, request_body):
    answer = service.post(POST, json=request_body()).json()
    for body, hint in (
        (
            request_body()["profile"],
            'the body is a profile, but a request has the profile as a field: {"profile": ...}',
        ),
        (answer, "the body is a placement, which is the answer to a request"),
    ):
        content = problem_of(service.post(POST, json=body))
        assert content["status"] == 422
        assert content["detail"].startswith(hint)


def test_a_fault_is_not_counted_twice(request_body):
    # The first faulty layer ends the list, which is then too short as well.
    body = with_profile(request_body(), layers=[{"name": "a", "forward_ms": {"gpu": -1}}])
    with pytest.raises(Problem) as caught:
        check(json.dumps(body).encode())
    assert [fault["pointer"] for fault in caught.value.faults] == [
        "#/profile/layers/0/forward_ms/gpu"
    ]
    assert "more" not in caught.value.detail


@pytest.mark.covering
@pytest.mark.parametrize(
    "path", [POST, f"{POST}:batch", f"{POST}:evaluate", f"{POST}:compare", "/v1/profiles"]
)
@pytest.mark.parametrize(
    "name", ["constrained-", "function-", "literal[", "[key]", "nullable[int]", "a/b~c"]
)
def test_no_name_in_a_body_is_taken_for_a_name_of_the_validator(service, path, name):
    # It was 500: a name that begins so was left out of the place, and nothing was left of that.
    reply = service.post(path, json={name: None})
    assert problem_of(reply)["status"] == 422
    pointer = name.replace("~", "~0").replace("/", "~1")
    assert f"#/{pointer}" in [fault["pointer"] for fault in reply.json()["errors"]]
    assert f"{name}: there is no such field" in reply.json()["detail"]


def test_a_body_over_the_limit_is_413_and_names_the_setting(serve):
    reply = serve(max_body_bytes=1000).post(POST, content=b" " * 1001, headers=JSON)
    assert problem_of(reply)["status"] == 413
    assert (
        "the body of 1001 bytes is longer than the limit of 1000 bytes (PLACER_MAX_BODY_BYTES)"
        in reply.json()["detail"]
    )


async def read(intake, receive):
    """Return the body that ``receive`` brings."""
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    async with intake.body(Request(scope, receive)) as body:
        return body


def test_a_body_of_unknown_length_is_read_no_further_than_the_limit():
    sizes = []

    async def endless():
        sizes.append(600)
        return {"type": "http.request", "body": b" " * 600, "more_body": True}

    with pytest.raises(Problem) as caught:
        asyncio.run(read(BodyReader(Settings(max_body_bytes=1000)), endless))
    assert (caught.value.status, sum(sizes)) == (413, 1200)
    assert "the body is longer than the limit of 1000 bytes" in caught.value.detail


def test_a_body_that_does_not_come_is_408():
    async def never():
        await asyncio.sleep(60)

    with pytest.raises(Problem) as caught:
        asyncio.run(read(BodyReader(Settings(body_timeout_s=0.05)), never))
    assert caught.value.status == 408


def test_bodies_that_are_too_many_at_once_are_503_and_those_that_are_done_make_room():
    async def at_once():
        return {"type": "http.request", "body": b" " * 600, "more_body": False}

    async def scenario():
        intake = BodyReader(Settings(max_body_bytes=1000, max_bodies_bytes=1000))
        scope = {
            "type": "http",
            "method": "POST",
            "headers": [(b"content-type", b"application/json")],
        }
        async with intake.body(Request(scope, at_once)):
            with pytest.raises(Problem) as caught:
                await read(intake, at_once)
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "1")
        assert len(await read(intake, at_once)) == 600

    asyncio.run(scenario())


def test_a_body_as_large_as_the_limit_is_read(serve, request_body):
    body = json.dumps(request_body()).encode()
    assert serve(max_body_bytes=len(body)).post(POST, content=body, headers=JSON).status_code == 200


def test_a_large_body_is_checked_in_another_process(serve, request_body):
    client = serve()
    spaces = b" " * 300_000
    assert (
        client.post(
            POST, content=json.dumps(request_body()).encode() + spaces, headers=JSON
        ).status_code
        == 200
    )
    assert problem_of(client.post(POST, content=b"{}" + spaces, headers=JSON))["status"] == 422


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(serve, monkeypatch):
    # Sixteen megabytes of them took the process that checks bodies 13 s and 900 MB.
    monkeypatch.setattr(validation.Validator, "_run_in_process", None)
    client = serve()
    for path in (POST, "/v1/placements:batch", "/v1/profiles", "/v1/nodes/a"):
        for value, marks in ((b"1,", 1), (b"[],", 2), (b"{},", 2)):
            content = b"[" + value * (validation.MAX_VALUES // marks) + b"1]"
            reply = client.request(
                "PUT" if "nodes" in path else "POST", path, content=content, headers=JSON
            )
            assert problem_of(reply)["status"] == 413
            assert "the limit is 2000000" in reply.json()["detail"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""]
)
def test_another_content_type_is_415_and_names_the_right_one(service, kind):
    reply = service.post(POST, content=b"{}", headers={"Content-Type": kind})
    assert problem_of(reply)["status"] == 415
    assert "application/json" in reply.json()["detail"]


def test_a_compressed_body_is_415(service):
    reply = service.post(POST, content=b"{}", headers={**JSON, "Content-Encoding": "gzip"})
    assert "gzip" in problem_of(reply)["detail"]


def test_a_content_type_with_a_character_set_is_read(service, request_body):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert (
        service.post(POST, content=json.dumps(request_body()), headers=headers).status_code == 200
    )


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "1e999", "61", "soon", "", "9" * 5000])
def test_a_wait_that_cannot_be_is_422_and_named(service, wait):
    reply = service.post(POST, params={"wait": wait}, content=b"{}", headers=JSON)
    assert problem_of(reply)["status"] == 422
    assert "wait" in reply.json()["detail"]


def test_a_parameter_that_cannot_be_is_told_in_the_words_of_a_body(service):
    # It was "query limit: Input should be a valid integer, unable to parse string as an integer,
    # not 'soon'".
    reply = service.get(POST, params={"limit": "soon"})
    assert problem_of(reply)["detail"] == "limit: should be a valid integer, not 'soon'"


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "BREW"])
def test_a_wrong_method_is_405_and_says_what_is_possible(service, method):
    reply = service.request(method, POST)
    assert problem_of(reply)["status"] == 405
    assert reply.headers["Allow"] == "GET, HEAD, POST"


def test_a_wrong_method_is_told_every_method_of_the_path(service):
    assert service.options(f"{POST}/{'0' * 32}").headers["Allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize(
    "path", ["/v2", "/v2/placements", "/v1/placements/x/y", "/" + "a" * 10_000, "/%ff%00"]
)
def test_an_unknown_path_is_404(service, path):
    assert problem_of(service.get(path))["status"] == 404


@pytest.mark.parametrize("id", ["0" * 32, "x", "0" * 5000, "..%2f..%2fetc", "é"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_id_that_nobody_asked_for_is_404(service, method, id):
    assert problem_of(service.request(method, f"{POST}/{id}"))["status"] == 404


def test_a_million_faults_are_told_in_4_kb(serve):
    client = serve()
    many = json.dumps({"profile": {"layers": [], "versions": {str(i): i for i in range(100_000)}}})
    assert problem_of(client.post(POST, content=many, headers=JSON))["status"] == 422
    many = json.dumps({"profile": {"layers": list(range(1_000_000))}})
    assert problem_of(client.post(POST, content=many, headers=JSON))["status"] == 422


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2000),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=600), inner, max_size=5)
    ),
    max_leaves=20,
)
fields = st.sampled_from(
    ["profile", "cluster", "constraints", "chunks", "seed", "objective", "schema_version", "layers"]
)
hostile = st.dictionaries(fields | st.text(max_size=50), json_values, max_size=6).map(
    lambda v: json.dumps(v).encode()
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(hostile | st.binary(max_size=3000) | json_values.map(lambda v: json.dumps(v).encode()))
def test_every_hostile_body_is_a_problem_of_at_most_4_kb_and_never_a_500(body):
    try:
        check(body)
    except Problem as problem:
        assert problem.status in (400, 422)
        assert len(problem.content()) <= MAX_BYTES
        assert problem.detail
    else:
        pytest.fail("no such body is a request")


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=6000),
    st.lists(
        st.fixed_dictionaries(
            {"pointer": st.text(max_size=3000), "detail": st.text(max_size=3000)}
        ),
        max_size=9,
    ),
)
def test_a_problem_is_valid_json_of_at_most_4_kb_whatever_it_tells(detail, faults):
    content = Problem(422, "x", "X", detail, faults).content()
    assert len(content) <= MAX_BYTES
    assert json.loads(content)["status"] == 422


def test_the_name_of_a_missing_layer_is_told_in_full(request_body):
    body = with_profile(request_body(), edges=[edge("embed", "encoder.layers.11.attention")])
    with pytest.raises(Problem) as caught:
        check(json.dumps(body).encode())
    assert "'encoder.layers.11.attention'" in caught.value.detail


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("wiat=5", ["'wiat'", "did you mean 'wait'?"]),
        ("x" * 5000 + "=1", ["there are 'wait', 'on_disconnect'"]),
    ],
)
def test_an_unknown_parameter_is_422_with_the_nearest_known_name(service, query, words):
    reply = service.post(f"{POST}?{query}", content=b"{}", headers=JSON)
    assert problem_of(reply)["status"] == 422
    for word in words:
        assert word in reply.json()["detail"]
