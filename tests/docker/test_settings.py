"""What the image, docker compose and Kubernetes set: the service's settings, with valid values."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from placer_server.app import create_app
from placer_server.keys import make
from placer_server.settings import Settings

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

FOLDER = Path(__file__).parents[2] / "docker"
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))


def image_environment():
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("ENV ")]
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line)[1:])


def compose_environment(name):
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    pattern = re.compile(r"\$\{\w+:-([^}]*)\}")
    return {
        variable: pattern.sub(r"\1", str(value))
        for variable, value in services[name]["environment"].items()
    }


def containers(path):
    for document in yaml.safe_load_all(path.read_text()):
        yield from document["spec"].get("template", {}).get("spec", {}).get("containers", [])


def pod_environment(container):
    return {entry["name"]: entry.get("value", "node-1") for entry in container["env"]}


ENVIRONMENTS = {
    "image": image_environment(),
    "compose solver": compose_environment("solver"),
    "compose gpu": compose_environment("gpu"),
    **{
        path.stem: pod_environment(container)
        for path in MANIFESTS
        for container in containers(path)
    },
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_variable_is_a_setting_with_a_valid_value(name, monkeypatch):
    given = {key: value for key, value in ENVIRONMENTS[name].items() if key.startswith("PLACER_")}
    known = {f"PLACER_{field}".upper(): field for field in Settings.model_fields}
    assert given and given.keys() <= known.keys()
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    settings = Settings()
    for variable in given:
        assert known[variable] in settings.model_fields_set


def test_the_port_is_the_same_in_the_image_compose_and_the_pods():
    port = image_environment()["PLACER_PORT"]
    assert f"EXPOSE {port}\n" in (FOLDER / "Dockerfile").read_text()
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert {services[name]["ports"][0].rpartition(":")[2] for name in ("solver", "gpu")} == {port}
    for path in MANIFESTS:
        for container in containers(path):
            assert [str(one["containerPort"]) for one in container["ports"]] == [port]


def test_the_service_has_the_paths_that_the_pods_are_probed_at():
    paths = set(create_app(Settings(database=":memory:")).openapi()["paths"])
    probed = {
        container[probe]["httpGet"]["path"]
        for path in MANIFESTS
        for container in containers(path)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert probed and probed <= paths


@pytest.mark.parametrize(
    "path",
    [
        FOLDER / "Dockerfile",
        FOLDER / "compose.yaml",
        FOLDER / "kubernetes" / "solver.yaml",
        FOLDER.parent / "docs" / "guides" / "docker.md",
    ],
    ids=lambda path: path.name,
)
def test_the_commands_that_make_keys_can_be_used(path):
    commands = re.findall(r"-m placer_server\.keys +(\w+)(?: +([a-z,]+))?", path.read_text())
    assert commands
    for name, scopes in commands:
        make(*filter(None, [name, scopes]))
