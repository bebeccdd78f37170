"""What the image leaves out is not needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from placer_server.app import background
from placer_server.settings import Settings

DOCKER = Path(__file__).parents[2] / "docker"


def test_placements_are_solved_with_what_stands_in_for_pandas():
    code = (
        "import pandas\n"
        "from placer.schema import PlacementRequest\n"
        "from placer.solver.solve import solve\n"
        "from placer_server.openapi import examples\n"
        "requests = [PlacementRequest.model_validate(one['value']) for one in examples.requests().values()]\n"
        "print(pandas.__file__, *(solve(request).status for request in requests))"
    )
    given = {**os.environ, "PYTHONPATH": str(DOCKER / "without")}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, env=given)
    assert done.stdout.split() == [str(DOCKER / "without" / "pandas.py"), "optimal", "optimal", "infeasible"], (
        done.stderr
    )


@pytest.fixture
def health():
    """``health(url, **environment)`` is the exit code of the image's health check on that service."""
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
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=here", "-days", "1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    settings = Settings(port=0, database=":memory:", tls_cert=str(cert), tls_key=str(key), log_level="error")
    with background(settings) as url:
        assert health(url, PLACER_TLS_CERT=str(cert)) == 0


def test_the_image_has_every_folder_that_its_build_copies():
    copied = [line.split()[1] for line in (DOCKER / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")]
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    for source in copied:
        if source.startswith("docker/"):
            assert f"!{source}" in allowed
            assert (DOCKER.parent / source).exists()
