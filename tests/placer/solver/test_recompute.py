"""Recompute against trying every cut with every set of devices that recompute."""

import itertools

import pytest
from enumeration import Enumeration
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples

from placer.errors import InputError, PlacementError
from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.check import check
from placer.solver.solve import solve

SETTINGS = examples(75)
MS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.25])
SIZE = st.sampled_from([0, 1, 2, 3, 5])


@st.composite
def requests(draw, row):
    """3 to 5 layers on 2 or 3 devices whose limits bind."""
    kinds = draw(st.lists(st.sampled_from("ab"), min_size=2, max_size=3))
    names = [f"l{i}" for i in range(draw(st.integers(3, 5 if len(kinds) == 2 else 4)))]
    times = st.fixed_dictionaries({kind: MS for kind in set(kinds)})
    layers = [
        Layer(
            name=name,
            forward_ms=draw(times),
            backward_ms=draw(times),
            param_bytes=draw(SIZE),
            saved_bytes=draw(SIZE),
            forward_workspace_bytes=draw(SIZE),
            backward_workspace_bytes=draw(SIZE),
            recorded_workspace_bytes=draw(SIZE),
            deferred_bytes=draw(SIZE),
            input_grad_workspace_bytes=draw(SIZE),
            weight_grad_workspace_bytes=draw(SIZE),
        )
        for name in names
    ]
    edges = []
    for index, name in enumerate(names[:-1]):
        targets = draw(st.sets(st.sampled_from(names[index + 1 :]), min_size=0 if row else 1))
        targets |= {names[index + 1]} if row else set()
        keepers = draw(st.sets(st.sampled_from(sorted({name, *targets}))))
        edges.append(
            Edge(
                source=name,
                targets=sorted(targets),
                bytes=draw(SIZE),
                gradient_bytes=draw(SIZE),
                saved_by=sorted(keepers),
                retained_bytes=draw(SIZE) if len(targets) > 1 else 0,
            )
        )
    limit = draw(st.sampled_from([12, 18, 25, 40]))
    devices = [Device(name=f"d{i}", type=kind, memory_bytes=limit) for i, kind in enumerate(kinds)]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=2e3)
        for a, b in itertools.permutations(devices, 2)
    ]
    return PlacementRequest(
        profile=Profile(layers=layers, edges=edges, training=True),
        cluster=Cluster(devices=devices, links=links),
        objective=draw(st.sampled_from(["throughput", "memory", "latency"])),
        constraints=Constraints(
            contiguous=True, recompute=draw(recompute_rules([device.name for device in devices]))
        ),
        chunks=draw(st.sampled_from([1, 2, 4])),
        schedule=draw(st.sampled_from(["1f1b", "fill-drain", "zero-bubble"])),
        workers=1,
    )


def recompute_rules(devices):
    """One word for all devices, or one for some and one for all others."""
    words = st.sampled_from(["auto", "auto", "never", "always"])
    return st.one_of(
        st.just("auto"), words, st.dictionaries(st.sampled_from([*devices, "*"]), words)
    )


class Recomputed:
    """Every cut of a request with every set of devices that recompute."""

    def __init__(self, request):
        self.request, self.plain = request, Enumeration(request, True)

    def best(self):
        """Return the smallest objective of all that fits; None if nothing does."""
        found = []
        for where in self.plain.maps():
            for order in itertools.permutations(sorted(set(where.values()))):
                place = {device: stage for stage, device in enumerate(order)}
                if all(place[a] < place[b] for _, a, b in self.plain.sends(where)):
                    found += self.values(where, order)
        return min(found, default=None)

    def values(self, where, order):
        for size in range(len(order) + 1):
            for again in itertools.combinations(order, size):
                if not all(
                    self.rule(device) in ("auto", ("never", "always")[device in again])
                    for device in order
                ):
                    continue
                use = {device: self.use(where, order, device, device in again) for device in order}
                if any(use[d.name] > d.memory_bytes for d in self.plain.devices if d.name in use):
                    continue
                yield (
                    float(max(use.values()))
                    if self.request.objective == "memory"
                    else self.time(where, again)
                )

    def rule(self, device):
        asked = self.request.constraints.recompute
        return asked if isinstance(asked, str) else asked.get(device) or asked.get("*") or "never"

    def use(self, where, order, device, again):
        chunks = self.request.chunks
        stages = len(order)
        fewest = stages - order.index(device)
        flight = chunks if self.request.schedule == "fill-drain" else min(chunks, fewest)
        if not again:
            return self.plain.use(where, device, flight)
        entering = {number for number, _, target in self.plain.sends(where) if target == device}
        size = sum(self.request.profile.edges[number].bytes for number in entering)
        alone, _ = self.plain.need(
            frozenset(name for name, place in where.items() if place == device)
        )
        return alone + (flight - 1) * size

    def time(self, where, again):
        """Return the objective if layers on some devices take their forward time twice."""
        kind = {device.name: device.type for device in self.plain.devices}
        layers = tuple(
            layer.model_copy(
                update={
                    "backward_ms": {
                        k: ms + layer.forward_ms[k] for k, ms in layer.backward_ms.items()
                    }
                }
            )
            if where[layer.name] in again
            else layer
            for layer in self.plain.layers
        )
        assert kind
        profile = self.request.profile.model_copy(update={"layers": layers})
        slower = type(self.plain)(self.request.model_copy(update={"profile": profile}), True)
        return (
            slower.latency(where)
            if self.request.objective == "latency"
            else slower.bottleneck(where)
        )


@SETTINGS
@given(request=requests(row=True))
def test_a_row_is_cut_and_recomputed_as_well_as_it_can_be(request):
    placement = solve(request)
    best = Recomputed(request).best()
    if best is None:
        assert not placement.layer_devices
    elif request.objective == "throughput" and request.schedule != "zero-bubble":
        assert placement.status == "optimal"
        assert placement.objective_value == pytest.approx(best, rel=2e-6)
    else:
        assert placement.objective_value is None or placement.objective_value >= best * (1 - 1e-9)
        assert placement.bound <= best * (1 + 1e-9)


def test_few_maps_are_all_tried_where_stages_that_may_recompute_leave_a_gap():
    # On one device it fits recomputed alone, in 2 ms, which stages do not know: bounds said 1.5 ms,
    # and no more.
    rows = [
        ((0.0, 0.0), (0.0, 0.0)),
        ((0.0, 0.0), (0.5, 0.0)),
        ((0.0, 1.0), (0.0, 0.0)),
        ((0.0, 0.0), (2.0, 0.0)),
    ]
    times = [[dict(zip("ab", pair, strict=True)) for pair in row] for row in rows]
    layers = [
        Layer(
            name=f"l{i}",
            forward_ms=there,
            backward_ms=back,
            forward_workspace_bytes=3 if i == 3 else 0,
        )
        for i, (there, back) in enumerate(times)
    ]
    edges = [
        Edge(source="l0", targets=["l1"], bytes=5, gradient_bytes=5),
        Edge(source="l1", targets=["l2", "l3"], bytes=0, gradient_bytes=2),
        Edge(source="l2", targets=["l3"], bytes=0, gradient_bytes=1),
    ]
    devices = [Device(name=f"d{i}", type=kind, memory_bytes=12) for i, kind in enumerate("aab")]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=2e3)
        for a, b in itertools.permutations(devices, 2)
    ]
    request = PlacementRequest(
        profile=Profile(
            layers=layers, edges=edges, training=True, cluster=Cluster(devices=devices, links=links)
        ),
        constraints=Constraints(contiguous=True, recompute="auto"),
        chunks=4,
        schedule="fill-drain",
    )
    placement = solve(request)
    assert (placement.status, placement.objective_value, placement.recompute) == (
        "optimal",
        2.0,
        ("d2",),
    )


@SETTINGS
@given(request=requests(row=False))
def test_nothing_is_better_than_what_recomputing_allows_and_the_bound_holds(request):
    placement = solve(request)
    best = Recomputed(request).best()
    if best is None:
        assert not placement.layer_devices
    else:
        assert placement.status != "infeasible"
        assert placement.objective_value is None or placement.objective_value >= best * (1 - 1e-9)
        assert placement.bound <= best * (1 + 1e-9)


def row(memory_bytes, recompute="auto", layers=4, devices=4, **asked):
    """Return layers in a row of 1 ms forwards and 2 backwards that save 10 bytes each.

    What passes between them is 1 byte.
    """
    names, places = [f"l{i}" for i in range(layers)], [f"d{i}" for i in range(devices)]
    profile = Profile(
        training=True,
        layers=[
            Layer(name=name, forward_ms={"t": 1.0}, backward_ms={"t": 2.0}, saved_bytes=10)
            for name in names
        ],
        edges=[
            Edge(source=a, targets=[b], bytes=1, gradient_bytes=1)
            for a, b in itertools.pairwise(names)
        ],
    )
    cluster = Cluster(
        devices=[Device(name=name, type="t", memory_bytes=memory_bytes) for name in places],
        links=[
            Link(source=a, target=b, bandwidth_bytes_per_s=1e15)
            for a, b in itertools.permutations(places, 2)
        ],
    )
    rules = Constraints(contiguous=True, recompute=recompute)
    return PlacementRequest(profile=profile, cluster=cluster, constraints=rules, chunks=8, **asked)


def test_nothing_is_recomputed_where_memory_is_ample():
    placement = solve(row(1000, schedule="fill-drain"))
    assert placement.recompute == () and placement.objective_value == pytest.approx(3.0)


def test_what_memory_forbids_otherwise_is_recomputed():
    # Of 8 micro-batches in flight only one is kept whole, so a layer takes 10 bytes and 7 that come
    # in, not 80.
    assert solve(row(30, recompute="never", schedule="fill-drain")).status == "infeasible"
    placement = solve(row(30, schedule="fill-drain"))
    assert set(placement.recompute) == set(placement.stages)
    assert placement.objective_value == pytest.approx(4.0) and placement.status == "optimal"


def test_only_the_stages_that_need_it_recompute():
    # Under 1F1B the stages hold 4, 3, 2 and 1 micro-batches: with room for 30 bytes the first two
    # are over.
    placement = solve(row(30, schedule="1f1b"))
    assert placement.recompute == ("d0", "d1") == placement.stages[:2]


def test_a_step_takes_the_recomputed_passes_longer():
    """4 equal stages under fill-drain.

    A forward, and a forward and a backward pass, 8 + 3 times.
    """
    placement = solve(row(30, objective="step", schedule="fill-drain"))
    assert placement.objective_value == pytest.approx((8 + 3) * (1 + 1 + 2))
    assert placement.recompute


def test_under_objective_step_a_schedule_that_fits_is_weighed_against_recomputing():
    """Room for 55 bytes: 1F1B fits as it is, zero-bubble and fill-drain only recomputed."""
    placement = solve(row(55, objective="step", schedule="auto"))
    assert placement.schedule == "1f1b" and placement.recompute == ()
    assert placement.objective_value == pytest.approx((8 + 3) * 3)


def test_recomputing_that_was_not_asked_for_is_refused():
    request = row(1000, recompute="never")
    placement = solve(request)
    with pytest.raises(PlacementError, match="'d0' recomputes, which was not asked for"):
        check(request, placement.model_copy(update={"recompute": ("d0",)}))


def test_recomputing_that_is_not_reckoned_is_refused():
    request = row(1000)
    placement = solve(request)
    with pytest.raises(PlacementError, match="compute_ms of d0"):
        check(request, placement.model_copy(update={"recompute": ("d0",)}))


def test_a_device_that_always_recomputes_does_so_where_memory_is_ample():
    placement = solve(row(1000, recompute={"d1": "always"}, schedule="1f1b", layers=5))
    assert placement.recompute == ("d1",)
    # 5 layers on 4 devices: one has two, 6 ms, and it is not d1, which takes 4 for each
    assert placement.objective_value == pytest.approx(6.0) and placement.status == "optimal"


def test_a_device_that_never_recomputes_keeps_all_while_the_others_need_not():
    """Of 8 micro-batches in flight a device keeps 80 bytes; those that recompute do with 30."""
    rules = {"d2": "never", "*": "auto"}
    placement = solve(row(30, recompute=rules, schedule="fill-drain"))
    assert "d2" not in placement.stages and set(placement.recompute) == set(placement.stages)


def test_of_a_step_with_a_device_that_always_recomputes_stages_are_contiguous():
    placement = solve(
        row(1000, recompute="always", objective="step", schedule="auto", devices=2, layers=2)
    )
    assert {choice.contiguous for choice in placement.step.choices} == {True}
    assert set(placement.recompute) == set(placement.stages)


def test_a_device_that_does_not_recompute_though_it_must_is_caught():
    request = row(1000, recompute="always")
    placement = solve(request)
    with pytest.raises(PlacementError, match="does not recompute, which was asked for"):
        check(request, placement.model_copy(update={"recompute": ()}))


def test_a_rule_for_a_device_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"constraints.recompute: there is no device 'd9'"):
        row(1000, recompute={"d9": "always"})


def test_what_fits_as_it_is_is_not_called_too_large_where_recomputing_takes_more():
    # Under zero-bubble the input half works in 1 byte beside 13 forwards; recomputed, all of it in
    # 5 beside 12.
    sizes = {
        "saved_bytes": 12,
        "forward_workspace_bytes": 1,
        "backward_workspace_bytes": 5,
        "input_grad_workspace_bytes": 1,
    }
    layer = Layer(name="l", forward_ms={"t": 1.0}, backward_ms={"t": 2.0}, **sizes)
    cluster = Cluster(devices=[Device(name="d", type="t", memory_bytes=15)])
    asked = PlacementRequest(
        profile=Profile(training=True, layers=[layer]),
        cluster=cluster,
        constraints=Constraints(recompute="auto"),
        schedule="zero-bubble",
    )
    placement = solve(asked)
    assert placement.status == "optimal" and placement.recompute == ()
    assert placement.devices[0].memory.total_bytes == 14
