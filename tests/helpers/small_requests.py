"""Small random requests for the solver, and how hypothesis draws them."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile

MS = st.sampled_from([0.0, 0.25, 1.0, 1.5, 2.0, 3.1, 7.3])
SIZE = st.sampled_from([0, 1, 2, 3, 5, 8])


def examples(count):
    """As many drawn examples, the same in every run; a slow draw, or one that is filtered, is no fault."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@st.composite
def small_requests(draw, objectives=("throughput", "latency", "memory")):
    """A request of 3 to 6 layers on 2 or 3 devices, with any features together."""
    device_count = draw(st.integers(2, 3))
    count = draw(st.integers(3, 6 if device_count == 2 else 5))
    names = [f"l{i}" for i in range(count)]
    training = draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from("ab"), min_size=device_count, max_size=device_count))
    layers = [draw(small_layers(name, training, sorted(set(kinds)))) for name in names]
    edges = draw(small_edges(names, training))
    cluster = draw(small_clusters(kinds))
    devices = [device.name for device in cluster.devices]
    groups = st.lists(st.sampled_from(names), min_size=2, max_size=3).map(tuple)
    banned = st.dictionaries(
        st.sampled_from([*names, "*"]), st.lists(st.sampled_from(devices), max_size=2).map(tuple), max_size=2
    )

    def rarely(strategy, default):
        return draw(strategy) if draw(st.integers(0, 3)) == 0 else default

    numbers = {"max_devices": rarely(st.integers(1, 3), None), "max_layers": rarely(st.integers(2, count), None)}
    numbers["min_devices"] = rarely(st.integers(1, min(device_count, numbers["max_devices"] or device_count)), None)
    asked = {
        "profile": Profile(
            layers=layers, edges=edges, training=training, cluster=cluster, colocated=rarely(st.tuples(groups), ())
        ),
        "objective": draw(st.sampled_from(objectives)),
        "constraints": Constraints(
            contiguous=draw(st.sampled_from([True, True, False, None])),
            pinned=rarely(st.dictionaries(st.sampled_from(names), st.sampled_from(devices), max_size=2), {}),
            forbidden=rarely(banned, {}),
            colocated=rarely(st.tuples(groups), ()),
            **numbers,
        ),
        "chunks": draw(st.sampled_from([1, 2, 3, 7])),
        "schedule": draw(st.sampled_from(["1f1b", "fill-drain", "zero-bubble", "interleaved"])),
        "transfers": draw(st.sampled_from(["added", "overlapped"])),
        "workers": 1,
        "seed": draw(st.integers(0, 3)),
    }
    try:
        return PlacementRequest(**asked)
    except ValidationError:  # pins that contradict each other are bad input, see test_bad_input.py
        reject()


@st.composite
def small_layers(draw, name, training, kinds):
    """A layer with few distinct sizes, so that ties and exact fits are common."""
    sizes = {
        field: draw(SIZE)
        for field in ("param_bytes", "buffer_bytes", "grad_bytes", "optimizer_bytes", "saved_bytes")
        if training or field in ("param_bytes", "buffer_bytes")
    }
    return Layer(
        name=name,
        forward_ms={kind: draw(MS) for kind in kinds},
        backward_ms={kind: draw(MS) for kind in kinds} if training else {},
        forward_workspace_bytes=draw(SIZE),
        backward_workspace_bytes=draw(SIZE) if training else 0,
        **sizes,
    )


@st.composite
def small_edges(draw, names, training):
    """Values in a random graph; some are read by several layers, some layers make two values."""
    edges = []
    for index, name in enumerate(names[:-1]):
        for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
            far = st.lists(st.sampled_from(names[index + 1 :]), min_size=1, max_size=3, unique=True)
            targets = draw(st.one_of(st.just([names[index + 1]]), far))
            saved_by = draw(st.lists(st.sampled_from([name, *targets]), unique=True)) if training else []
            edges.append(
                Edge(
                    source=name,
                    targets=targets,
                    bytes=draw(SIZE),
                    gradient_bytes=draw(SIZE) if training else 0,
                    saved_by=saved_by,
                )
            )
    return edges


@st.composite
def small_clusters(draw, kinds):
    """Devices whose limits are ample or tight; links alike, unlike, or partly missing."""
    limit = draw(st.sampled_from([15, 25, 40, 80, 10_000]))
    devices = [
        Device(name=f"d{i}", type=kind, memory_bytes=draw(st.sampled_from([limit, limit, limit + 7])), reserve_bytes=2)
        for i, kind in enumerate(kinds)
    ]
    same_links = draw(st.booleans())
    missing = draw(st.integers(0, 5)) == 0
    speed = draw(st.sampled_from([1e3, 2.5e3, 1e4]))
    links = []
    for source, target in itertools.permutations(devices, 2):
        if missing and draw(st.booleans()):
            continue
        if not same_links:
            speed = draw(st.sampled_from([1e3, 2.5e3, 1e4]))
        latency = 1e-4 if same_links else draw(st.sampled_from([0.0, 1e-4, 1e-3]))
        links.append(Link(source=source.name, target=target.name, bandwidth_bytes_per_s=speed, latency_s=latency))
    return Cluster(devices=devices, links=links)
