"""Chains of ideals for each order of classes of devices, over links that are not alike."""

import itertools
from dataclasses import replace
from random import Random

import pytest
from enumeration import brute_force
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.schema import Cluster, Device, Edge, Link
from placer.solver import costs
from placer.solver.contiguous import class_orders
from placer.solver.contiguous.class_orders import ClassOrders
from placer.solver.contiguous.class_windows import Windows
from placer.solver.contiguous.order_search import search_orders
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.solve import Portfolio

SETTINGS = examples(80)
SPEEDS, LATENCIES = (1e3, 2.5e3, 1e4), (0.0, 1e-4, 1e-3)


@st.composite
def on_hosts(draw):
    """Return a small request whose devices are on two hosts: alike on each, but not on both.

    With links of four kinds.
    """
    request = draw(small_requests(objectives=("throughput",))).model_copy(
        update={"transfers": "added"}
    )
    random = Random(draw(st.integers(0, 2**64 - 1)))
    host = [random.choice([0, 0, 1]) for _ in request.devices]
    types = sorted({device.type for device in request.devices})
    of_host = [
        {
            "type": random.choice(types),
            "memory_bytes": request.devices[0].memory_bytes + random.choice([0, 7]),
        }
        for _ in (0, 1)
    ]
    kinds = [
        {"bandwidth_bytes_per_s": random.choice(SPEEDS), "latency_s": random.choice(LATENCIES)}
        for _ in range(4)
    ]
    devices = [
        Device(name=device.name, reserve_bytes=2, **of_host[its])
        for device, its in zip(request.devices, host, strict=True)
    ]
    links = [
        Link(source=devices[a].name, target=devices[b].name, **kinds[2 * host[a] + host[b]])
        for a, b in itertools.permutations(range(len(devices)), 2)
    ]
    return request.model_copy(update={"cluster": Cluster(devices=devices, links=links)})


def answers(problem, upper):
    """Return, by order of the classes, what is known of it."""
    given = ClassOrders(problem, reduced(problem), upper)
    found = {order: given.best(order, lambda: False) for order in class_orders.orders(problem)}
    assert None not in found.values()
    return found


@SETTINGS
@given(request=st.one_of(on_hosts(), small_requests(objectives=("throughput",))))
def test_no_assignment_is_below_the_bound_of_all_orders(request):
    problem = Problem.from_request(request)
    nodes = reduced(problem)
    assume(class_orders.applies(problem, nodes) and all(nodes.allowed))
    best = brute_force(request, True)
    assume(best)
    for upper in (best, 1.4 * best):
        assert min(chain.bound for chain in answers(problem, upper).values()) <= best * (1 + 1e-9)


@SETTINGS
@given(request=on_hosts())
def test_a_search_by_orders_keeps_its_bound_below_the_best_and_ends_with_it(
    request,
):
    problem = replace(Problem.from_request(request), contiguous=True)
    nodes = reduced(problem)
    assume(class_orders.applies(problem, nodes) and all(nodes.allowed))
    best = brute_force(request, True)
    assume(best)
    search = Portfolio(problem)
    search.request, search.nodes = problem.request, nodes
    search.offer(
        next(devices for devices in every_map(problem, nodes) if costs.judged(problem, devices)),
        "given",
    )
    assert search_orders(search)
    assert search.bound <= best * (1 + 1e-9)
    assert search.value >= best * (1 - 1e-9)
    apart = all(len(value.readers) == 1 for value in problem.values) and len(problem.devices) == 2
    asked_less = problem.least_devices > 1 or problem.most_layers is not None
    if apart and not asked_less and min(device.usable_bytes for device in problem.devices) > 1_000:
        assert search.value == pytest.approx(best)
        assert search.bound == pytest.approx(best, rel=1e-5)


def test_when_time_ends_behind_a_first_look_at_all_orders_it_has_raised_the_bound(
    two_hosts, monkeypatch
):
    problem = replace(Problem.from_request(two_hosts), contiguous=True)
    search = Portfolio(problem)
    search.request, search.nodes = problem.request, reduced(problem)
    for devices in every_map(problem, search.nodes):
        search.offer(devices if costs.judged(problem, devices) else None, "given")
    left, best = iter(range(len(class_orders.orders(problem)))), ClassOrders.best
    monkeypatch.setattr(
        ClassOrders,
        "best",
        lambda *given: None if next(left, None) is None else best(*given),
    )
    assert not search_orders(search)
    assert search.bound == pytest.approx(0.9 * search.value)


def every_map(problem, nodes):
    """Return every way to place the nodes, by layer."""
    for chosen in itertools.product(range(len(problem.devices)), repeat=len(nodes.nodes)):
        yield nodes.spread(list(chosen))


@pytest.fixture
def two_hosts(chain):
    """Six layers of 4 ms on two fast devices and two that take twice as long.

    1 ms inside a host, 5 ms between.
    """
    request = chain([4.0] * 6, value_bytes=1_000)
    layers = [
        layer.model_copy(update={"forward_ms": {"fast": 4.0, "slow": 8.0}, "backward_ms": {}})
        for layer in request.profile.layers
    ]
    kinds = {"a": "fast", "b": "fast", "c": "slow", "d": "slow"}
    cluster = Cluster(
        devices=[Device(name=name, type=kind, memory_bytes=10**6) for name, kind in kinds.items()],
        links=[
            Link(source=a, target=b, bandwidth_bytes_per_s=1e6 if kinds[a] == kinds[b] else 2e5)
            for a, b in itertools.permutations(kinds, 2)
        ],
    )
    profile = request.profile.model_copy(update={"layers": tuple(layers), "cluster": None})
    return request.model_copy(update={"profile": profile, "cluster": cluster})


def test_each_order_is_solved_with_what_its_links_cost(two_hosts):
    problem = Problem.from_request(two_hosts)
    found = answers(problem, 14.0)
    assert min(chain.bound for chain in found.values()) == pytest.approx(
        brute_force(two_hosts, True)
    )
    everywhere_inside = min(
        max(4 * one + 1, 4 * two + 2, 8 * three + 2, 8 * four + 1)
        for one, two, three, four in itertools.product(range(7), repeat=4)
        if one + two + three + four == 6
    )
    # the way between hosts is paid for
    assert found[0, 0, 1, 1].bound > everywhere_inside + 2


def test_windows_hold_what_each_placement_in_their_order_does(two_hosts):
    problem = Problem.from_request(two_hosts)
    given = ClassOrders(problem, reduced(problem), 15.0)
    windows = Windows(given.graph, (0, 0, 1, 1), 15.0)
    windows.narrow()
    assert windows.possible
    narrow = windows.stages_of()
    within = []
    for cut in itertools.combinations_with_replacement(range(7), 3):
        stages = [sum(layer >= begin for begin in cut) for layer in range(6)]
        if costs.judged(problem, stages).objective_value <= 15.0:
            within.append(stages)
    assert within
    assert all(
        first <= stage <= last
        for found in within
        for (first, last), stage in zip(narrow, found, strict=True)
    )
    assert narrow != [(0, 3)] * 6


def test_where_there_is_no_link_nothing_crosses(two_hosts):
    apart = [
        link
        for link in two_hosts.cluster.links
        if {link.source, link.target} in ({"a", "b"}, {"c", "d"})
    ]
    cluster = two_hosts.cluster.model_copy(update={"links": tuple(apart)})
    problem = Problem.from_request(two_hosts.model_copy(update={"cluster": cluster}))
    chains = answers(problem, 14.0)
    # three layers and 1 ms on a and b
    assert min(chain.bound for chain in chains.values()) == pytest.approx(13.0)


def test_more_orders_than_can_be_gone_through_are_left_alone(two_hosts):
    problem = Problem.from_request(two_hosts)
    assert class_orders.applies(problem, reduced(problem))
    assert len(class_orders.orders(problem)) == 6
    kinds = [
        device.model_copy(update={"name": f"{number}"})
        for number in range(5)
        for device in problem.devices
    ]
    nowhere = ((None,) * 20,) * 20
    columns = {
        "forward_ms": tuple(row * 5 for row in problem.forward_ms),
        "backward_ms": tuple(row * 5 for row in problem.backward_ms),
        "allowed": (frozenset(range(20)),) * 6,
    }
    many = replace(problem, devices=tuple(kinds), links=nowhere, most_devices=6, **columns)
    assert len(many.alike_devices()) == 2
    assert class_orders.applies(many, reduced(problem))
    many = replace(many, most_devices=7)
    assert not class_orders.applies(many, reduced(problem))


def test_a_value_is_sent_to_every_stage_that_reads_it(two_hosts):
    profile = two_hosts.profile
    for_all = Edge(source="l0", targets=[layer.name for layer in profile.layers[1:]], bytes=3_000)
    profile = profile.model_copy(update={"edges": (*profile.edges, for_all)})
    four = two_hosts.constraints.model_copy(
        update={"pinned": {"l0": "a", "l2": "b", "l3": "b", "l4": "c", "l5": "d"}}
    )
    request = two_hosts.model_copy(update={"profile": profile, "constraints": four})
    problem = Problem.from_request(request)
    best = brute_force(request, True)
    chain = min(answers(problem, best * 1.01).values(), key=lambda chain: chain.bound)
    assert chain.bound == pytest.approx(best)
    result = costs.judged(problem, chain.devices)
    # which sends to the three others
    assert max(result.load_ms) == result.load_ms[0]
