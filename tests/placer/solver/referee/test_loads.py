"""The referee's times of all devices, against each device by itself."""

import itertools
from random import Random

import pytest

from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.referee.loads import times_of


def drawn(random, transfers):
    """3 to 8 layers in training on three unlike devices over unlike links, and a map."""
    names = [f"l{index}" for index in range(random.randint(3, 8))]
    types = ("t", "u")
    layers = [
        Layer(
            name=name,
            forward_ms={kind: random.choice((0, 1, 2)) for kind in types},
            backward_ms={kind: random.choice((0, 1, 4)) for kind in types},
        )
        for name in names
    ]
    edges = [
        Edge(
            source=source,
            targets=random.sample(
                names[index + 1 :], random.randint(1, min(3, len(names) - index - 1))
            ),
            bytes=random.choice((0, 1, 8)),
            gradient_bytes=random.choice((0, 1, 8)),
        )
        for index, source in enumerate(names[:-1])
    ]
    devices = [
        Device(name=f"d{index}", type=types[index % 2], memory_bytes=1) for index in range(3)
    ]
    links = [
        Link(
            source=a.name,
            target=b.name,
            bandwidth_bytes_per_s=random.choice((1e3, 5e2)),
            latency_s=1e-3,
        )
        for a, b in itertools.permutations(devices, 2)
    ]
    cluster = Cluster(devices=devices, links=links)
    profile = Profile(layers=layers, edges=edges, training=True, cluster=cluster)
    request = PlacementRequest(profile=profile, training=random.random() < 0.7, transfers=transfers)
    return request, {name: random.choice(devices).name for name in names}


def alone(request, where, device):
    """Compute, send and receive time of one device, from what it has to do with each other one."""
    layers = [layer for layer in request.profile.layers if where[layer.name] == device.name]
    compute = sum(
        la.forward_ms[device.type] + request.is_training * la.backward_ms[device.type]
        for la in layers
    )
    send = receive = 0.0
    for edge, other in itertools.product(request.profile.edges, request.devices):
        made, read = where[edge.source], {where[name] for name in edge.targets}
        out, back = (
            request.placed_on.link(device.name, other.name),
            request.placed_on.link(other.name, device.name),
        )
        gradient = request.is_training and edge.gradient_bytes
        if device.name != other.name == made and device.name in read:
            receive += back.transfer_ms(edge.bytes)
            send += out.transfer_ms(edge.gradient_bytes) if gradient else 0.0
        if device.name == made != other.name and other.name in read:
            send += out.transfer_ms(edge.bytes)
            receive += back.transfer_ms(edge.gradient_bytes) if gradient else 0.0
    return compute, send, receive


@pytest.mark.parametrize(("transfers", "join"), [("added", sum), ("overlapped", max)])
@pytest.mark.parametrize("seed", range(5))
def test_each_device_does_what_it_has_to_do_with_each_other_one(seed, transfers, join):
    random = Random(seed)
    for _ in range(40):
        request, where = drawn(random, transfers)
        times = times_of(request, where)
        for device in request.devices:
            parts, found = alone(request, where, device), times[device.name]
            assert (found.compute_ms, found.send_ms, found.receive_ms) == pytest.approx(parts)
            assert found.load_ms(request) == pytest.approx(join(parts))
