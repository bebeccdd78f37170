"""Registration of nodes, and placements that span them."""

from __future__ import annotations

import copy
import json

import pytest

from placer.schema import Cluster, Placement
from placer_server.app import background
from placer_server.openapi import examples
from placer_server.settings import Settings
from placer_server.workers.solving import default_solver

NODE = examples.clusters()["two devices"]["value"]


def with_ports():
    """Return devices with measured transfers to and from their host's memory."""
    node = copy.deepcopy(NODE)
    for device in node["devices"]:
        device["to_host"] = {"bandwidth_bytes_per_s": 4e9, "latency_s": 1e-5}
        device["from_host"] = {"bandwidth_bytes_per_s": 2e9, "latency_s": 2e-5}
    return node


def test_a_node_is_registered_listed_and_forgotten(serve):
    client = serve()
    assert client.put("/v1/nodes/a", json=NODE).json()["devices"] == ["cuda:0", "cuda:1"]
    (listed,) = client.get("/v1/nodes").json()["nodes"]
    assert (listed["name"], listed["types"]) == ("a", ["gpu"])
    assert client.delete("/v1/nodes/a").status_code == 204
    assert client.get("/v1/nodes").json() == {"nodes": []}
    assert client.delete("/v1/nodes/a").status_code == 404


@pytest.mark.integration
def test_a_node_outlives_the_service_and_is_seen_by_replicas(serve, database):
    serve(database=database).put("/v1/nodes/a", json=NODE)
    assert [node["name"] for node in serve(database=database).get("/v1/nodes").json()["nodes"]] == [
        "a"
    ]


def test_registering_again_is_an_update(serve):
    client = serve()
    client.put("/v1/nodes/a", json=NODE)
    client.put("/v1/nodes/a", json={"devices": NODE["devices"][:1]})
    assert client.get("/v1/nodes").json()["nodes"][0]["devices"] == ["cuda:0"]


def test_a_cluster_of_several_nodes_has_all_their_devices_and_a_link_for_each_pair(serve):
    client = serve()
    for name in "ab":
        client.put(f"/v1/nodes/{name}", json=with_ports())
    reply = client.get(
        "/v1/cluster",
        params={"node": ["a", "b"], "network_bytes_per_s": 1e9, "network_latency_s": 1e-3},
    )
    cluster = Cluster.model_validate_json(reply.content)
    assert [device.name for device in cluster.devices] == [
        "a/cuda:0",
        "a/cuda:1",
        "b/cuda:0",
        "b/cuda:1",
    ]
    assert len(cluster.links) == 4 * 3
    across = cluster.link("a/cuda:0", "b/cuda:1")
    # Device to memory, network, memory to device, one after the other.
    size = 10**9
    expected_s = (size / 4e9 + 1e-5) + (size / 1e9 + 1e-3) + (size / 2e9 + 2e-5)
    assert across.transfer_ms(size) == pytest.approx(1e3 * expected_s)
    within = cluster.link("a/cuda:0", "a/cuda:1")
    assert within.bandwidth_bytes_per_s == NODE["links"][0]["bandwidth_bytes_per_s"]


def test_a_placement_spans_hosts_where_no_node_alone_holds_the_model(serve, request_body):
    client = serve(default_solver)
    for name in "ab":
        small = copy.deepcopy(NODE)
        for device in small["devices"]:
            device["memory_bytes"] = 5 * 2**30
        client.put(f"/v1/nodes/{name}", json=small)
    alone = client.get("/v1/cluster", params={"node": "a"}).json()
    joined = client.get(
        "/v1/cluster", params={"node": ["a", "b"], "network_bytes_per_s": 1e10}
    ).json()
    body = request_body(training=True, time_limit_s=5)
    assert (
        client.post("/v1/placements?wait=30", json={**body, "cluster": alone}).json()["status"]
        == "infeasible"
    )
    placed = Placement.model_validate(
        client.post("/v1/placements?wait=30", json={**body, "cluster": joined}).json()
    )
    assert {name.partition("/")[0] for name in placed.layer_devices.values()} == {"a", "b"}


def test_the_devices_of_one_node_need_no_network(serve):
    client = serve()
    client.put("/v1/nodes/a", json=NODE)
    assert client.get("/v1/cluster?node=a").json()["devices"][0]["name"] == "a/cuda:0"


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ("node=a&node=b", 422, "network_bytes_per_s"),
        ("node=c", 404, "node 'c' is not registered"),
        ("node=a&network_bytes_per_s=0", 422, "network_bytes_per_s"),
        ("node=a&network_bytes_per_s=nan", 422, "network_bytes_per_s"),
        ("node=a&node=b&network_bytes_per_s=5e-324", 422, "network_bytes_per_s"),
        ("node=a&node=b&network_bytes_per_s=1&network_latency_s=1e6", 422, "network_latency_s"),
    ],
)
def test_what_cannot_be_joined_is_said(service, query, status, said):
    for name in "ab":
        service.put(f"/v1/nodes/{name}", json=NODE)
    reply = service.get(f"/v1/cluster?{query}")
    assert reply.status_code == status and said in reply.json()["detail"]


def test_nodes_with_more_devices_than_can_be_joined_are_refused_before_they_are(serve):
    # Each pair of devices is a link: a thousand devices would be a million of them.
    client = serve()
    node = {
        "devices": [
            {"name": f"cuda:{number}", "type": "t", "memory_bytes": 1} for number in range(64)
        ]
    }
    for name in "abcde":
        assert client.put(f"/v1/nodes/{name}", json=node).status_code == 200
    query = "&".join(f"node={name}" for name in "abcde")
    reply = client.get(f"/v1/cluster?{query}&network_bytes_per_s=1e9")
    assert reply.status_code == 422 and "320 devices" in reply.json()["detail"]


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("a%2Fb", NODE, 404),
        ("x" * 65, NODE, 404),
        ("a", {}, 422),
        ("a", {"devices": [{"name": "b/cuda:0", "type": "t", "memory_bytes": 1}]}, 422),
        (
            "a",
            {
                "devices": [
                    {"name": f"cuda:{number}", "type": "t", "memory_bytes": 1}
                    for number in range(65)
                ]
            },
            422,
        ),
    ],
)
def test_what_is_no_node_is_refused(service, name, body, status):
    assert service.put(f"/v1/nodes/{name}", json=body).status_code == status


def one_device(name="cuda:0", bandwidth=1e9, latency=0.0):
    ways = {
        way: {"bandwidth_bytes_per_s": bandwidth, "latency_s": latency}
        for way in ("to_host", "from_host")
    }
    return {"devices": [{"name": name, "type": "t", "memory_bytes": 1, **ways}]}


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (one_device(name="x" * 65), "65 characters"),
        (one_device(bandwidth=5e-324), "to_host.bandwidth_bytes_per_s is 4.94066e-324"),
        (one_device(latency=2e5), "to_host.latency_s is 200000"),
    ],
)
def test_a_node_of_which_no_link_could_be_made_is_refused_when_it_registers(service, node, said):
    # Its devices were taken, and each GET /v1/cluster that joined them to others was a 500.
    reply = service.put("/v1/nodes/a", json=node)
    assert reply.status_code == 422 and said in reply.json()["detail"]


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (one_device(bandwidth=5e-324), "to_host.bandwidth_bytes_per_s is 4.94066e-324"),
        ({"devices": [{"name": "cuda:0", "type": "t", "memory_bytes": 1, "cores": 1}]}, "cores"),
    ],
    ids=["a value of today's limits", "a field of another version"],
)
def test_a_node_that_was_kept_with_what_is_refused_nowadays_is_left_out_and_logged(
    serve, service_log, kept, said
):
    # Nodes are read back from the store: the list of them, and each cluster with it, were a 500
    # until it registered.
    client = serve()
    client.put("/v1/nodes/a", json=NODE)
    client.app.state.service.store.put_node("old", json.dumps(kept).encode())
    assert [node["name"] for node in client.get("/v1/nodes").json()["nodes"]] == ["a"]
    assert "node old is ignored" in service_log.text and said in service_log.text
    assert client.get("/v1/cluster?node=a").status_code == 200
    reply = client.get("/v1/cluster?node=a&node=old&network_bytes_per_s=1e9")
    assert (
        reply.status_code == 404
        and "'old'" in reply.json()["detail"]
        and said in reply.json()["detail"]
    )
    client.put("/v1/nodes/old", json=NODE)
    assert client.get("/v1/cluster?node=a&node=old&network_bytes_per_s=1e9").status_code == 200


def test_the_slowest_nodes_that_register_are_joined_by_the_slowest_network(serve):
    client = serve()
    for name in ("a" * 64, "b" * 64):
        node = one_device(name="x" * 64, bandwidth=1.0, latency=1e5)
        assert client.put(f"/v1/nodes/{name}", json=node).status_code == 200
    query = f"node={'a' * 64}&node={'b' * 64}&network_bytes_per_s=1&network_latency_s=1e5"
    (link, _) = Cluster.model_validate_json(client.get(f"/v1/cluster?{query}").content).links
    assert link.transfer_ms(1) == pytest.approx(1e3 * (3e5 + 3))


def test_a_node_that_is_named_twice_counts_once(serve):
    client = serve()
    client.put("/v1/nodes/a", json=NODE)
    reply = client.get("/v1/cluster?node=a&node=a&network_bytes_per_s=1e9")
    assert [device["name"] for device in reply.json()["devices"]] == ["a/cuda:0", "a/cuda:1"]


def test_a_service_registers_its_own_devices_at_another(serve, solvers, wait_until, monkeypatch):
    from placer_server import app
    from placer_server.node.cluster import NodeCluster

    with background(Settings(port=0, database=":memory:", log_level="error")) as url:
        monkeypatch.setattr(
            app, "NodeCluster", lambda settings: NodeCluster(settings, solvers.cluster_of_one)
        )
        serve(register_url=url, node_name="gpu-node")
        import httpx

        wait_until(lambda: httpx.get(f"{url}/v1/nodes").json()["nodes"] != [])
        (node,) = httpx.get(f"{url}/v1/nodes").json()["nodes"]
    assert (node["name"], node["devices"]) == ("gpu-node", ["cpu:0"])


def test_the_cluster_is_measured_again_when_asked(serve, solvers, monkeypatch):
    from placer_server import app
    from placer_server.node.cluster import NodeCluster

    measured = []

    def count(settings):
        cluster = NodeCluster(settings, solvers.cluster_of_one)
        inner = cluster._measure

        async def measure():
            measured.append(1)
            return await inner()

        cluster._measure = measure
        return cluster

    monkeypatch.setattr(app, "NodeCluster", count)
    client = serve()
    for _ in range(2):
        client.get("/v1/cluster")
    assert len(measured) == 1
    assert client.post("/v1/cluster:measure").json()["devices"][0]["name"] == "cpu:0"
    assert len(measured) == 2
