"""What the image leaves out is not needed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from placer.errors import ServerError
from placer_server import healthcheck
from placer_server.app import background
from placer_server.keys import make
from placer_server.settings import Settings

DOCKER = Path(__file__).parents[2] / "docker"


def test_placements_are_solved_with_what_stands_in_for_pandas():
    code = (
        "import pandas\n"
        "from placer.schema import PlacementRequest\n"
        "from placer.solver.solve import solve\n"
        "from placer_server.openapi import examples\n"
        "given = [one['value'] for one in examples.requests().values()]\n"
        "requests = [PlacementRequest.model_validate(value) for value in given]\n"
        "print(pandas.__file__, *(solve(request).status for request in requests))"
    )
    path = os.pathsep.join([str(DOCKER / "without"), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, env=given
    )
    assert done.stdout.split() == [
        str(DOCKER / "without" / "pandas.py"),
        "optimal",
        "optimal",
        "optimal",
        "infeasible",
    ], done.stderr


def test_the_build_compiles_the_modules_that_are_installed(tmp_path):
    # It named a module that had moved, so no image could be built. It also compiled the sources in
    # the working directory, so each start compiled the installed modules again.
    if find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed")
    before, _, rest = (DOCKER / "install.sh").read_text().partition(" <<'END'\n")
    code = rest.partition("\nEND\n")[0]
    flags = before.splitlines()[-1].partition("/bin/python ")[2].split()
    (tmp_path / "placer").mkdir()
    (tmp_path / "placer" / "__init__.py").write_text("raise ImportError('the sources')")
    done = subprocess.run(
        [sys.executable, *flags],
        input=code,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert code and done.returncode == 0, done.stderr


@pytest.fixture
def health():
    """Return ``health(url, **environment)``: the exit code of the image's health check."""
    text = (DOCKER / "Dockerfile").read_text().partition("HEALTHCHECK")[2]
    words = json.loads(text.partition("CMD ")[2].splitlines()[0])
    assert words[0] == "python3"

    def run(url: str, **environment: str) -> int:
        given = {**os.environ, "PLACER_PORT": url.rpartition(":")[2], **environment}
        command = [sys.executable, "-P", *words[1:]]
        return subprocess.run(command, capture_output=True, timeout=60, env=given).returncode

    return run


def test_the_health_check_tells_a_service_that_lives_from_none(health):
    # By way of a proxy, and under TLS, every service was told to be ill.
    with background(Settings(port=0, database=":memory:", log_level="error")) as url:
        assert health(url) == 0
        assert health(url, http_proxy="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9") == 0
    assert health(url) != 0


def test_the_health_check_speaks_tls_where_the_service_does(health, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=here",
        "-days",
        "1",
    ]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    settings = Settings(
        port=0, database=":memory:", tls_cert=str(cert), tls_key=str(key), log_level="error"
    )
    with background(settings) as url:
        assert health(url, PLACER_TLS_CERT=str(cert)) == 0


@pytest.mark.parametrize("host", ["127.0.0.3", "::1", "localhost"])
def test_the_health_check_asks_at_the_services_host(health, host):
    # It asked 127.0.0.1, whatever PLACER_HOST said.
    settings = Settings(host=host, port=0, database=":memory:", log_level="error")
    try:
        with background(settings) as url:
            assert health(url, PLACER_HOST=host) == 0
    except ServerError as error:
        pytest.skip(str(error))


@pytest.mark.integration
@pytest.mark.parametrize("host", ["127.0.0.3", "0.0.0.0", "::"])
def test_the_health_check_finds_a_service_whose_options_say_where_it_listens(
    health, tmp_path, host
):
    """Docker gives the check the container's environment, not the options of its command."""
    keys = tmp_path / "keys"
    keys.write_text(make("someone")[1])
    environment = {
        "PLACER_HOST": "0.0.0.0",
        "PLACER_PORT": "1",
        "PLACER_KEYS_FILE": str(keys),
        "TMPDIR": str(tmp_path),
    }
    command = [
        sys.executable,
        "-P",
        "-m",
        "placer",
        "serve",
        "--host",
        host,
        "--port",
        str(free_port(host)),
    ]
    command += ["--database", ":memory:", "--log-level", "error"]
    with subprocess.Popen(command, env={**os.environ, **environment}) as serving:
        try:
            deadline = time.monotonic() + 30
            while health("http://0.0.0.0:1", **environment) != 0:
                assert serving.poll() is None and time.monotonic() < deadline
            # it holds its port, and answers nobody
            os.kill(serving.pid, signal.SIGSTOP)
            assert health("http://0.0.0.0:1", **environment) != 0
            os.kill(serving.pid, signal.SIGCONT)
            assert health("http://0.0.0.0:1", **environment) == 0
            # another one's environment
            assert health("http://0.0.0.0:1", **environment | {"PLACER_PORT": "2"}) != 0
        finally:
            serving.send_signal(signal.SIGCONT)
            serving.send_signal(signal.SIGTERM)
    assert serving.returncode == 0
    assert health("http://0.0.0.0:1", **environment) != 0
    assert [*tmp_path.glob("placer-service-*")] == []


def test_what_a_killed_service_wrote_down_is_not_believed_and_taken_away(tmp_path, monkeypatch):
    monkeypatch.setattr(healthcheck, "_prefix", lambda: f"{tmp_path}/placer-service-")
    address = healthcheck.Address("127.0.0.1", 1, False)
    with healthcheck.record_address(address, {}):
        (file,) = tmp_path.iterdir()
        assert healthcheck._recorded_address({}) == address
        assert healthcheck._recorded_address({"PLACER_PORT": "9"}) is None
        with subprocess.Popen(["true"]) as ended:
            pass
        dead = tmp_path / f"placer-service-{ended.pid}.json"
        dead.write_text(file.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {ended.pid}'))
        os.utime(dead, (2**31, 2**31))  # the newest
        assert healthcheck._recorded_address({}) == address
    with healthcheck.record_address(address, {}):
        assert not dead.exists()


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as free:
            return int(free.getsockname()[1])
    except OSError as error:
        pytest.skip(f"this machine has no {host}: {error}")


def test_the_image_has_every_folder_that_its_build_copies():
    copied = [
        line.split()[1]
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
    ]
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    for source in copied:
        if source.startswith("docker/"):
            assert f"!{source}" in allowed
            assert (DOCKER.parent / source).exists()
