"""Routes of the nodes that registered their devices, so that a placement can span hosts.

node a ── PUT /v1/nodes/a ──▶ store ◀── PUT /v1/nodes/b ── node b
                                │
          GET /v1/cluster?node=a&node=b&network_bytes_per_s=... ──▶ a/cuda:0, a/cuda:1, b/cuda:0
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from placer.errors import InputError
from placer.schema import Cluster, Device, Node, NodeList

from ..node.cluster import join
from ..problem import Problem, clip, invalid_parameter, invalid_request, no_such
from ..settings import NODE_NAME
from ..web.replies import json_reply
from ..web.validation import read_cluster
from .service import Serving

router = APIRouter()
log = logging.getLogger("placer_server")

MAX_NODES = 256

# Largest number of devices of one node.
MAX_DEVICES = 64

# Largest number of devices in a cluster of several nodes: each pair of devices is a link.
MAX_JOINED = 256

# Longest name of a device in characters; each link repeats the names of both ends.
MAX_NAME_LENGTH = 64

MIN_BYTES_PER_S = 1.0

# Largest latency of the network, and of the transfers between a device and its host. The sum of
# these latencies must still be valid for a link.
MAX_LATENCY_S = 1e5

Nodes = Annotated[
    list[str],
    Query(
        max_length=MAX_NODES,
        description="Join the devices of the registered nodes with these names.",
    ),
]
Network = Annotated[
    float | None,
    Query(
        ge=MIN_BYTES_PER_S,
        le=1e18,
        allow_inf_nan=False,
        description="Assume this bandwidth between two nodes, in bytes per second. It is required"
        " for several nodes.",
    ),
]
Latency = Annotated[
    float,
    Query(
        ge=0,
        le=MAX_LATENCY_S,
        allow_inf_nan=False,
        description="Assume this latency of a transfer between two nodes, in seconds.",
    ),
]


@router.put("/v1/nodes/{name}", response_model=Node)
async def put_node(request: Request, name: str, service: Serving) -> Response:
    """Register a node with its devices, as its own `GET /v1/cluster` returns them.

    Registering a known name updates the node.
    """
    _check_name(name)
    async with service.body_reader.body(request) as body:
        cluster = await service.validator.run(read_cluster, body)
    for fault in _faults(cluster):
        raise invalid_request(fault)
    nodes = await service.store.call(service.store.nodes)
    if name not in nodes and len(nodes) >= MAX_NODES:
        detail = (
            f"{len(nodes)} nodes are registered, which is the limit of this service; DELETE one"
        )
        raise Problem(422, "too-many-nodes", "There are too many nodes", detail)
    created_s = await asyncio.to_thread(
        service.store.put_node, name, cluster.model_dump_json().encode()
    )
    return json_reply(request, _summary(name, created_s, cluster).model_dump_json().encode())


@router.get("/v1/nodes", response_model=NodeList)
async def list_nodes(request: Request, service: Serving) -> Response:
    """List the registered nodes by name."""
    found = await service.store.call(service.store.nodes)
    nodes = await asyncio.to_thread(_node_list, found)
    return json_reply(request, nodes.model_dump_json().encode(), tagged=True)


@router.delete("/v1/nodes/{name}", status_code=204)
async def delete_node(name: str, service: Serving) -> Response:
    """Delete a node."""
    _check_name(name)
    if not await asyncio.to_thread(service.store.delete_node, name):
        raise _no_node(name, [])
    return Response(status_code=204)


@router.get("/v1/cluster", response_model=Cluster)
async def get_cluster(
    request: Request,
    service: Serving,
    node: Nodes = [],  # noqa: B006
    network_bytes_per_s: Network = None,
    network_latency_s: Latency = 0.0,
) -> Response:
    """Return this node's devices and links, or the devices of registered nodes.

    This node's devices are measured once. Devices of several nodes are named `NODE/cuda:0`, as
    `placer.distributed` expects, and linked by the network.
    """
    if not node:
        return json_reply(request, await service.cluster.get(), tagged=True)
    if len(node) > 1 and network_bytes_per_s is None:
        detail = (
            "several nodes are connected by a network: give network_bytes_per_s, its measured"
            " bandwidth"
        )
        raise invalid_parameter(detail)
    known = await service.store.call(service.store.nodes)
    chosen: dict[str, Cluster] = {}
    for name in node:
        if name not in known:
            raise _no_node(name, list(known))
        try:
            chosen[name] = _read_registered(name, known[name][1])
        except InputError as error:
            detail = (
                f"node {name!r} registered devices that this version does not accept: {error};"
                " let it register again"
            )
            raise no_such("node", detail) from error
    if (count := sum(len(cluster.devices) for cluster in chosen.values())) > MAX_JOINED:
        detail = (
            f"these nodes have {count} devices, each pair of which is a link; name nodes with at"
            f" most {MAX_JOINED} devices"
        )
        raise Problem(422, "too-many-devices", "There are too many devices", detail)
    cluster = await asyncio.to_thread(join, chosen, network_bytes_per_s or 1.0, network_latency_s)
    content = await asyncio.to_thread(cluster.model_dump_json)
    return json_reply(request, content.encode(), tagged=True)


@router.post("/v1/cluster:measure", response_model=Cluster)
async def measure_again(request: Request, service: Serving) -> Response:
    """Measure this node's devices and links again."""
    return json_reply(request, await service.cluster.measure_again())


def _faults(cluster: Cluster) -> Iterator[str]:
    if len(cluster.devices) > MAX_DEVICES:
        yield f"the node has {len(cluster.devices)} devices; at most {MAX_DEVICES} are allowed"
    for device in cluster.devices:
        name = clip(device.name, 80)
        if "/" in device.name:
            yield (
                f"device {name!r} belongs to another node; register the node's own devices, whose"
                " names have no '/', such as cuda:0"
            )
        if len(device.name) > MAX_NAME_LENGTH:
            yield (
                f"device {name!r}: the name has {len(device.name)} characters; at most"
                f" {MAX_NAME_LENGTH} are allowed"
            )
        yield from (f"device {name!r}: {fault}" for fault in _slow_transfers(device))


def _slow_transfers(device: Device) -> Iterator[str]:
    for way in ("to_host", "from_host", "from_disk"):
        rate = getattr(device, way)
        if rate is not None and rate.bandwidth_bytes_per_s < MIN_BYTES_PER_S:
            bytes_per_s = rate.bandwidth_bytes_per_s
            yield (
                f"{way}.bandwidth_bytes_per_s is {bytes_per_s:g}; it must be"
                f" {MIN_BYTES_PER_S:g} or more"
            )
        if rate is not None and rate.latency_s > MAX_LATENCY_S:
            yield f"{way}.latency_s is {rate.latency_s:g}; it must be {MAX_LATENCY_S:g} or less"


def _node_list(found: dict[str, tuple[float, bytes]]) -> NodeList:
    nodes = []
    for name, (created_s, content) in found.items():
        with suppress(InputError):
            nodes.append(_summary(name, created_s, _read_registered(name, content)))
    return NodeList(nodes=tuple(nodes))


def _read_registered(name: str, content: bytes) -> Cluster:
    """Return the devices of a node.

    Another version of Placer may have accepted devices that this version rejects.

    Raises:
        InputError: This version rejects them; the log names the node and the reason.
    """
    try:
        cluster = Cluster.model_validate_json(content)
        for fault in _faults(cluster):
            raise InputError(fault)
    except InputError as error:
        log.warning("node %s is ignored until it registers again: %s", name, error)
        raise
    return cluster


def _summary(name: str, created_s: float, cluster: Cluster) -> Node:
    types = tuple(dict.fromkeys(device.type for device in cluster.devices))
    devices = tuple(device.name for device in cluster.devices)
    return Node(name=name, created_s=created_s, devices=devices, types=types)


def _check_name(name: str) -> None:
    if not NODE_NAME.fullmatch(name):
        detail = (
            f"{clip(name, 80)!r} is not a valid name of a node; use 1 to 64 letters, digits, '.',"
            " '_' and '-'"
        )
        raise no_such("node", detail)


def _no_node(name: str, known: list[str]) -> Problem:
    there = f"; registered are {clip(json.dumps(known), 200)}" if known else ""
    detail = f"node {clip(name, 80)!r} is not registered{there}"
    return no_such("node", detail)
