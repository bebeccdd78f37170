"""Responses of the REST service: status and body, without what changes from run to run.

Texts for people (titles, details, reasons) are left out: they may be reworded. A problem's type,
its status and the fields that it points at stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from public_api import Service, question

LEFT_OUT = frozenset(
    {
        "best_id",
        "bound",
        "change",
        "created_s",
        "detail",
        "gap",
        "id",
        "instance",
        "location",
        "method",
        "next",
        "reason",
        "requirements",
        "solve_time_s",
        "time_s",
        "title",
        "version",
        "versions",
        "what",
    }
)
"""Fields that differ from run to run, proofs that depend on the search, and texts for people."""

LAYER_DEVICES = {f"l{index}": f"d{index // 3}" for index in range(8)}
UNKNOWN_ID = "0" * 32


def placeable(**fields: Any) -> dict[str, Any]:
    """Return a request with one optimal placement; the edges fork and join."""
    edges = ((0, (1, 2)), (1, (3,)), (2, (3,)), (3, (4,)))
    return question(**{"edges": edges, "chunks": 3, "kinds": ("a", "b"), **fields})


def kept(content: Any) -> Any:
    """Return a body without the fields that are left out."""
    if isinstance(content, dict):
        return {name: kept(value) for name, value in content.items() if name not in LEFT_OUT}
    return [kept(item) for item in content] if isinstance(content, list) else content


def reply(response: Any) -> dict[str, Any]:
    """Return the status of a response, its type and what is kept of its body."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    is_json = kind.endswith("json") and response.content
    return {
        "status": response.status_code,
        "type": kind,
        "body": kept(response.json()) if is_json else len(response.content) > 0,
    }


def placed(service: Service) -> str:
    """Return the path of a placement that is solved."""
    response = service.client.post("/v1/placements?wait=60", json=placeable(seed=1))
    return f"/v1/placements/{response.json()['id']}"


def placements(service: Service) -> dict[str, Any]:
    """Solve requests that are feasible and one that is not, and ask for each again."""
    post = service.client.post
    small = placeable(devices={"memory_mib": 8})
    again = service.client.get(placed(service))
    return {
        "feasible": reply(post("/v1/placements?wait=60", json=placeable())),
        "the same by its id": reply(again),
        "latency": reply(
            post(
                "/v1/placements?wait=60",
                json=question(training=False, objective="latency", kinds=("a", "b")),
            )
        ),
        "step": reply(
            post(
                "/v1/placements?wait=60",
                json=placeable(objective="step", schedule="1f1b"),
            )
        ),
        "infeasible": reply(post("/v1/placements?wait=60", json=small)),
    }


def refused(service: Service) -> dict[str, Any]:
    """Send requests that cannot be used."""
    post = service.client.post
    json_type = {"Content-Type": "application/json"}
    no_profile = {name: value for name, value in placeable().items() if name != "profile"}
    cycle = placeable()
    cycle["profile"]["edges"].append({"source": "l4", "targets": ["l0"], "bytes": 8})
    return {
        "unknown field": reply(post("/v1/placements", json=placeable(chunk=3))),
        "negative size": reply(post("/v1/placements", json=placeable(chunks=-2))),
        "no profile": reply(post("/v1/placements", json=no_profile)),
        "cycle": reply(post("/v1/placements", json=cycle)),
        "unknown device": reply(
            post("/v1/placements", json=placeable(constraints={"pinned": {"l0": "d7"}}))
        ),
        "objective": reply(post("/v1/placements", json=placeable(objective="fastest"))),
        "time limit": reply(post("/v1/placements", json=placeable(time_limit_s=80_000))),
        "not JSON": reply(post("/v1/placements", content="{", headers=json_type)),
        "form": reply(post("/v1/placements", data={"profile": "x"})),
        "version": reply(
            post("/v1/placements", json=placeable(), headers={"Placer-Schema-Version": "77"})
        ),
    }


def not_found(service: Service) -> dict[str, Any]:
    """Ask for what is not there, and use methods that paths do not have."""
    client = service.client
    return {
        "placement": reply(client.get(f"/v1/placements/{UNKNOWN_ID}")),
        "malformed id": reply(client.get("/v1/placements/abc")),
        "timeline": reply(client.get(f"/v1/placements/{UNKNOWN_ID}/timeline")),
        "profile": reply(client.get(f"/v1/profiles/{UNKNOWN_ID}")),
        "node": reply(client.delete("/v1/nodes/nobody")),
        "path": reply(client.get("/v2/placements")),
        "method": reply(client.put("/v1/placements", json={})),
        "deletion": reply(client.delete(f"/v1/placements/{UNKNOWN_ID}")),
    }


def judged(service: Service) -> dict[str, Any]:
    """Evaluate maps of our own, with faults and without, and compare two."""
    post, request = service.client.post, question(chunks=3)
    other = {name: "d0" if device == "d1" else device for name, device in LAYER_DEVICES.items()}
    faulty = LAYER_DEVICES | {"l2": "d9", "l9": "d0"}
    apart = LAYER_DEVICES | {"l7": "d0"}
    return {
        "valid": reply(
            post(
                "/v1/placements:evaluate",
                json={"request": request, "layer_devices": LAYER_DEVICES},
            )
        ),
        "unknown names": reply(
            post("/v1/placements:evaluate", json={"request": request, "layer_devices": faulty})
        ),
        "not contiguous": reply(
            post("/v1/placements:evaluate", json={"request": request, "layer_devices": apart})
        ),
        "two maps": reply(
            post(
                "/v1/placements:compare",
                json={"request": request, "maps": {"one": LAYER_DEVICES, "other": other}},
            )
        ),
        "no map": reply(post("/v1/placements:evaluate", json={"request": request})),
    }


def batch(service: Service) -> dict[str, Any]:
    """Send three requests that share a profile, one of them unusable."""
    shared = placeable()
    pinned = {"pinned": {"l0": "d0"}}
    requests = [
        {"chunks": 2},
        {"objective": "memory", "constraints": pinned},
        {"chunks": 0},
    ]
    body = {"shared": shared, "requests": requests}
    return {"answers": reply(service.client.post("/v1/placements:batch?wait=60", json=body))}


def of_a_placement(service: Service) -> dict[str, Any]:
    """Ask for all that there is of a stored placement."""
    path, client = placed(service), service.client
    request, again = client.get(f"{path}/request").json(), client.get(path).json()
    return {
        "request asks the same": client.post("/v1/placements", json=request).json() == again,
        "timeline": reply(client.get(f"{path}/timeline")),
        "report": reply(client.get(f"{path}/report")),
        "head": reply(client.head(path)),
        "list": {
            "status": client.get("/v1/placements?status=optimal&limit=1").status_code,
            "fields": sorted(
                client.get("/v1/placements?status=optimal&limit=1").json()["placements"][0]
            ),
        },
        "profile": client.get(f"/v1/profiles/{path.rpartition('/')[2]}").status_code,
        "stop": reply(client.delete(path)),
    }


def nodes(service: Service) -> dict[str, Any]:
    """Register a node, list it, ask for it as a cluster of two, and remove it."""
    client = service.client
    devices = placeable()["cluster"]
    found = {
        "put": reply(client.put("/v1/nodes/one", json=devices)),
        "second": reply(client.put("/v1/nodes/two", json=devices)),
        "list": reply(client.get("/v1/nodes")),
        "cluster": reply(
            client.get("/v1/cluster?node=one&node=two&network_bytes_per_s=1000000000")
        ),
        "wrong": reply(client.put("/v1/nodes/three", json={"devices": []})),
    }
    return found | {name: reply(client.delete(f"/v1/nodes/{name}")) for name in ("one", "two")}


def health(service: Service) -> dict[str, Any]:
    """Ask whether the service lives and is ready."""
    get = service.client.get
    names = {
        line.split()[2] for line in get("/metrics").text.splitlines() if line.startswith("# TYPE")
    }
    return {
        "healthz": reply(get("/healthz"))["status"],
        # The library of metrics adds the times at which they were created.
        "metrics": sorted(name for name in names if not name.endswith("_created")),
    }


def openapi(service: Service) -> dict[str, Any]:
    """Return the paths of the document with their methods and statuses, and every component."""
    document = service.client.get("/openapi.json").json()
    paths = {
        f"{method} {path}": sorted(operation["responses"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    components = {
        name: sorted(schema.get("properties", schema.get("enum", [])))
        for name, schema in document["components"]["schemas"].items()
    }
    return {"paths": paths, "components": components}


RESPONSES: dict[str, Callable[[Service], dict[str, Any]]] = {
    "placements": placements,
    "refused requests": refused,
    "what is not there": not_found,
    "judged maps": judged,
    "batch": batch,
    "of a placement": of_a_placement,
    "nodes": nodes,
    "health": health,
    "openapi": openapi,
}
