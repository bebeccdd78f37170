from __future__ import annotations

import hmac
import json
import logging
import subprocess
import sys
from functools import partial

import pytest

from placer.errors import InputError, ServerError
from placer_server import keys as module
from placer_server.app import background, create_app
from placer_server.keys import Keys, TokenBucket, make
from placer_server.observability.logs import JsonFormatter
from placer_server.settings import Settings

PLACEMENTS = "/v1/placements"


@pytest.fixture
def secured(serve, tmp_path):
    """Return ``secured(name=scopes, ...)``: a service with keys, and the headers of each."""
    return partial(start, serve, tmp_path / "keys")


@pytest.fixture(scope="module")
def stranger(serve_module, tmp_path_factory):
    """Return a client without a key of a service that asks for one."""
    client, _ = start(serve_module, tmp_path_factory.mktemp("keys") / "keys", ci="read,solve")
    return client


def start(serve, file, rate="", **names):
    made = {name: make(name, scopes) for name, scopes in names.items()}
    file.write_text("# who may ask\n" + "".join(f"{line} {rate}\n" for _, line in made.values()))
    client = serve(keys_file=str(file))
    return client, {name: {"Authorization": f"Bearer {key}"} for name, (key, _) in made.items()}


def problem_of(reply):
    assert reply.headers["Content-Type"] == "application/problem+json"
    return reply.json()["type"].removeprefix("urn:placer:problem:")


def test_a_key_is_good_for_its_scopes_alone(secured, request_body):
    client, headers = secured(ci="read,solve", dashboard="read", prometheus="metrics")

    def ask(name):
        replies = [
            client.get(PLACEMENTS, headers=headers[name]),
            client.post(PLACEMENTS, json=request_body(), headers=headers[name]),
            client.get("/metrics", headers=headers[name]),
        ]
        return [reply.status_code for reply in replies]

    assert [ask("ci"), ask("dashboard"), ask("prometheus")] == [
        [200, 200, 403],
        [200, 403, 403],
        [403, 403, 200],
    ]


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer placer_x",
        "Basic dXNlcjpwYXNz",
        "bearer é",
        "Bearer " + "x" * 7000,
    ],
)
def test_without_a_known_key_everything_but_health_is_401(stranger, header):
    headers = [(b"authorization", header.encode("latin-1"))] if header else []
    for path in (PLACEMENTS, f"{PLACEMENTS}/{'0' * 32}", "/v1/cluster", "/metrics", "/nothing"):
        reply = stranger.get(path, headers=headers)
        assert (reply.status_code, problem_of(reply)) == (401, "no-key")
        assert reply.headers["WWW-Authenticate"].startswith("Bearer")
        assert len(reply.content) <= 4096
    for path in ("/healthz", "/readyz", "/openapi.json"):
        assert stranger.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("", "no key was given"),
        ("Basic dXNlcjpwYXNz", "the authorization is not of type Bearer"),
        ("placer_x", "the authorization is not of type Bearer"),
        ("Bearer placer_x", "the given key is unknown"),
    ],
)
def test_a_401_says_what_was_wrong_and_what_to_send_without_what_was_sent(stranger, header, told):
    detail = stranger.get(PLACEMENTS, headers={"Authorization": header} if header else {}).json()[
        "detail"
    ]
    assert detail.startswith(f"{told}; send 'Authorization: Bearer KEY'")
    assert "dXNlcjpwYXNz" not in detail and "placer_x" not in detail


def test_a_key_is_compared_in_constant_time_with_every_key(tmp_path, monkeypatch):
    made = [make(name) for name in ("a", "b", "c")]
    file = tmp_path / "keys"
    file.write_text("\n".join(line for _, line in made))
    keys, compared = Keys(Settings(keys_file=str(file))), []

    equal = hmac.compare_digest

    def counting(one, other):
        compared.append(one)
        return equal(one, other)

    monkeypatch.setattr(module.hmac, "compare_digest", counting)
    assert [keys.find(key).name for key, _ in made] == ["a", "b", "c"]
    assert len(compared) == 9


def test_a_key_that_asks_too_often_is_429_and_others_are_not(secured):
    client, headers = secured(rate="0.5", loud="read", quiet="read")
    replies = [client.get(PLACEMENTS, headers=headers["loud"]) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 429]
    assert problem_of(replies[1]) == "too-often"
    # of the two seconds, some may have gone by on the way
    assert replies[1].headers["Retry-After"] in ("1", "2")
    assert client.get(PLACEMENTS, headers=headers["quiet"]).status_code == 200


def test_a_rate_fills_again_as_time_goes_by(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    rate = TokenBucket(2.0)
    assert [rate.take() for _ in range(5)] == [0, 0, 0, 0, 1]
    now[0] += 0.5
    assert [rate.take(), rate.take()] == [0, 1]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "placer.example"])
def test_a_service_that_others_can_reach_does_not_start_without_keys(host):
    with pytest.raises(InputError, match="PLACER_KEYS_FILE"):
        create_app(Settings(host=host, database=":memory:"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_a_service_needs_no_keys(host):
    assert not Keys(Settings(host=host))


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1:80@evil", "x" * 5000]
)
def test_a_service_without_keys_refuses_names_that_are_not_this_machines(service, host):
    # Else a page of another site could ask it, by giving its own name this machine's address.
    reply = service.get(PLACEMENTS, headers={"Host": host})
    assert (reply.status_code, problem_of(reply)) == (421, "strange-host")
    assert len(reply.content) <= 4096


@pytest.mark.parametrize("host", ["LOCALHOST", "Localhost:8080", "127.0.0.1:8080", "[::1]:8080"])
def test_a_service_without_keys_answers_to_this_machines_names_however_they_are_written(
    service, host
):
    assert service.get(PLACEMENTS, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example:8080", "x" * 5000]
)
def test_a_service_without_keys_does_nothing_for_a_page_of_another_site(service, origin):
    # A browser lets every page send a POST without a body to this machine.
    reply = service.post("/v1/cluster:measure", headers={"Origin": origin})
    assert (reply.status_code, problem_of(reply)) == (403, "strange-origin")
    assert len(reply.content) <= 4096


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8080", "https://localhost", "http://[::1]:9"])
def test_a_service_without_keys_answers_its_own_page(service, origin):
    assert service.get(PLACEMENTS, headers={"Origin": origin}).status_code == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no keys"),
        ("ci read", "line 1"),
        ("ci read placer_secretsecret", "line 1"),
        ("ci reed " + "0" * 64, "read, solve, metrics"),
        ("c/i read " + "0" * 64, "line 1"),
        ("ci read " + "0" * 64 + " fast", "rate"),
        ("ci read " + "0" * 64 + " -1", "rate"),
        ("ci read " + "0" * 64 + " 5 more", "line 1"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_an_error_that_does_not_show_a_key(
    tmp_path, text, words
):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        Keys(Settings(keys_file=str(file)))
    assert "secret" not in str(caught.value)


def test_a_file_of_keys_that_is_missing_is_an_error_that_names_it(tmp_path):
    with pytest.raises(InputError, match=r"PLACER_KEYS_FILE .*absent"):
        Keys(Settings(keys_file=str(tmp_path / "absent")))


def test_a_key_made_on_the_command_line_is_taken(tmp_path):
    command = [sys.executable, "-P", "-m", "placer_server.keys", "ci", "read"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    (tmp_path / "keys").write_text(result.stdout)
    key = result.stderr.split()[-1]
    found = Keys(Settings(keys_file=str(tmp_path / "keys"))).find(key)
    assert (found.name, found.scopes) == ("ci", {"read"})
    assert key not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["a b"], "'a b' is not a valid name of a key"),
        (["ci", "read,fly"], "'fly' is not a scope; use some of read,solve,metrics"),
    ],
)
def test_what_no_key_can_be_made_of_is_named(capsys, arguments, told):
    # The message described the form of the file instead of the arguments.
    assert module.main(arguments) == 2
    assert told in capsys.readouterr().err


def test_help_on_making_keys_is_no_error(capsys):
    assert module.main(["--help"]) == 0
    assert "NAME [read,solve,metrics] >> FILE" in capsys.readouterr().out


def test_no_key_is_in_a_reply_or_the_log(secured, service_log):
    client, headers = secured(ci="read")
    key = headers["ci"]["Authorization"].split()[1]
    replies = [
        client.get(PLACEMENTS, headers=headers["ci"]),
        client.post(PLACEMENTS, content=b"{", headers=headers["ci"]),
        client.get(PLACEMENTS, headers={"Authorization": f"Bearer {key}x"}),
    ]
    assert [reply.status_code for reply in replies] == [200, 403, 401]
    told = "".join(reply.text + str(reply.headers) for reply in replies)
    assert service_log.text
    assert key not in told + service_log.text


def test_every_response_has_security_headers_and_a_request_id(serve):
    client = serve()
    for path in ("/healthz", "/nothing", PLACEMENTS):
        headers = client.get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert len(headers["X-Request-Id"]) == 16


@pytest.mark.parametrize(
    ("given", "kept"), [("trace-1.a_b", True), ("a b", False), ("x" * 65, False), ("é", False)]
)
def test_a_request_id_of_the_client_is_kept_if_it_is_a_plain_word(service, given, kept):
    reply = service.get("/healthz", headers=[(b"x-request-id", given.encode("latin-1"))])
    assert (reply.headers["X-Request-Id"] == given) == kept


def logged_lines(of_requests):
    """Capture the lines of the JSON log while requests are made."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(json.loads(JsonFormatter().format(record)))

    logger, handler = logging.getLogger("placer_server"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        of_requests()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


def test_a_line_of_the_json_log_has_the_request(serve, request_body):
    client, asked = serve(), {"json": request_body(), "headers": {"X-Request-Id": "abc"}}
    lines = logged_lines(lambda: client.post(PLACEMENTS, **asked))
    (line,) = [line for line in lines if line.get("route") == PLACEMENTS]
    assert (line["request_id"], line["method"], line["status"], line["level"]) == (
        "abc",
        "POST",
        200,
        "info",
    )
    assert line["ms"] > 0


def test_a_path_that_there_is_not_is_logged_and_makes_no_line_or_counter_of_its_own(serve):
    client = serve()
    lines = logged_lines(lambda: client.get("/v2/no%0Athing" + "g" * 300))
    (line,) = [line for line in lines if line.get("status") == 404]
    assert line["route"].startswith("/v2/no%0Athingg") and len(line["route"]) < 210
    assert (
        "no%0Athing" not in client.get("/metrics").text
        and 'route="unknown"' in client.get("/metrics").text
    )


def test_what_the_guard_refuses_is_logged_and_counted(secured):
    # It was in no line and no metric, so that nobody saw who guesses keys.
    client, headers = secured(ci="read", prometheus="metrics")
    asked = [
        ("guess-1", {"Authorization": "Bearer guess"}, "GET", 401),
        ("post-1", headers["ci"], "POST", 403),
    ]

    def ask():
        for request_id, key, method, status in asked:
            reply = client.request(method, PLACEMENTS, headers={**key, "X-Request-Id": request_id})
            assert reply.status_code == status

    lines = [
        (line["request_id"], line["route"], line["status"], line["client"])
        for line in logged_lines(ask)
    ]
    assert lines == [("guess-1", PLACEMENTS, 401, ""), ("post-1", PLACEMENTS, 403, "ci")]
    counted = client.get("/metrics", headers=headers["prometheus"]).text
    for _, _, method, status in asked:
        assert (
            f'placer_requests_total{{method="{method}",route="unknown",status="{status}"}} 1.0'
            in counted
        )


def test_clients_are_told_apart_by_their_keys_in_the_queue(tmp_path, serve, solvers, request_body):
    made = [make(name) for name in ("a", "b")]
    file = tmp_path / "keys"
    file.write_text("\n".join(line for _, line in made))
    client = serve(solvers.until_stopped, queue=2, client_share=0.5, keys_file=str(file))

    def post(who, seed):
        headers = {"Authorization": f"Bearer {made[who][0]}"}
        return client.post(
            f"{PLACEMENTS}?wait=0", json=request_body(seed=seed), headers=headers
        ).status_code

    assert [post(0, 1), post(0, 2), post(0, 3), post(1, 4)] == [202, 202, 429, 202]


def test_the_client_sends_its_key(tmp_path, solvers, request_body, monkeypatch):
    from placer.schema import PlacementRequest
    from placer_client import Client

    key, line = make("ci")
    (tmp_path / "keys").write_text(line)
    settings = Settings(
        port=0, database=":memory:", log_level="error", keys_file=str(tmp_path / "keys")
    )
    request = PlacementRequest.model_validate(request_body())
    with background(settings, solver=solvers.quick) as url:
        with pytest.raises(ServerError, match="no key was given"), Client(url) as client:
            client.place(request)
        with Client(url, key=key) as client:
            assert client.place(request).status == "optimal"
        monkeypatch.setenv("PLACER_KEY", key)
        with Client(url) as client:
            assert client.place(request).status == "optimal"
