"""The manifests against Kubernetes' own schemas, and against what the image needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

FOLDER = Path(__file__).parents[2] / "docker"
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))
DOCUMENTS = [
    pytest.param(document, id=f"{document['kind']}-{document['metadata']['name']}")
    for path in MANIFESTS
    for document in yaml.safe_load_all(path.read_text())
]


def pods():
    return [
        d.values[0]["spec"]["template"]["spec"]
        for d in DOCUMENTS
        if "template" in d.values[0]["spec"]
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_manifest_is_valid_by_the_schemas_of_kubernetes(document):
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    schemas.validate(document, schemas.latest_version(), strict=True)


@pytest.mark.parametrize(
    "spoil", [lambda d: d["spec"].update(replica=1), lambda d: d["spec"].pop("selector")]
)
def test_a_manifest_with_a_fault_is_not_valid(spoil):
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    (document,) = yaml.safe_load_all((FOLDER / "kubernetes" / "nodes.yaml").read_text())
    spoil(document)
    with pytest.raises(Exception, match=r"replica|selector"):
        schemas.validate(document, schemas.latest_version(), strict=True)


@pytest.mark.parametrize("pod", pods(), ids=["node", "solver"])
def test_a_pod_is_not_root_cannot_write_its_image_and_is_probed(pod):
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    assert {"cpu", "memory"} <= set(container["resources"]["limits"])
    assert not pod["automountServiceAccountToken"]


def test_what_the_pods_mount_is_where_the_image_looks():
    image = (FOLDER / "Dockerfile").read_text()
    data = re.search(r"PLACER_DATABASE=(\S+)/", image)
    keys = re.search(r"PLACER_KEYS_FILE=(\S+)", image)
    assert data and keys
    for pod in pods():
        mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert {data.group(1), keys.group(1), "/tmp"} <= mounts


def test_what_the_workers_may_take_fits_in_the_solvers_limit():
    solver = pods()[1]["containers"][0]
    given = {entry["name"]: int(entry["value"]) for entry in solver["env"]}
    assert given["PLACER_WORKERS"] * given["PLACER_WORKER_MEMORY_BYTES"] < 4 * 2**30
    assert solver["resources"]["limits"]["memory"] == "4Gi"


def test_the_image_starts_with_keys_alone():
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    assert "placer_keys" in compose["services"]["solver"]["secrets"]
    assert compose["services"]["solver"]["read_only"]


def test_a_node_registers_at_the_service_that_solves():
    node = pods()[0]["containers"][0]
    given = {entry["name"]: entry for entry in node["env"]}
    services = [d.values[0] for d in DOCUMENTS if d.values[0]["kind"] == "Service"]
    (port,) = services[0]["spec"]["ports"]
    assert (
        given["PLACER_REGISTER_URL"]["value"]
        == f"http://{services[0]['metadata']['name']}:{port['port']}"
    )
    assert int(given["PLACER_PROFILE_MEMORY_BYTES"]["value"]) < 16 * 2**30
    assert node["resources"]["limits"]["memory"] == "16Gi"
