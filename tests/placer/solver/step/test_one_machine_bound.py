"""The bound by one device's passes, against every order of them and every map."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import costs
from placer.solver.step import one_machine_bound
from placer.solver.step.choices import bounded, choice_of

MS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.25])


def in_order(passes):
    """When the last is done, and what follows it, by an order of them."""
    time = end = 0.0
    for head, length, tail in passes:
        time = max(time, head) + length
        end = max(end, time + tail)
    return end


@examples(80)
@given(passes=st.lists(st.tuples(MS, MS, MS), min_size=1, max_size=3), times=st.integers(1, 2))
def test_no_order_of_the_passes_ends_sooner(passes, times):
    soonest = min(map(in_order, itertools.permutations(passes * times)))
    assert one_machine_bound.one_machine(passes, times) <= soonest


@examples(80)
@given(passes=st.lists(st.tuples(MS, MS, MS), min_size=1, max_size=6), times=st.integers(1, 3))
def test_the_bound_is_the_largest_bound_of_all_subsets_of_the_passes(passes, times):
    subsets = itertools.chain.from_iterable(
        itertools.combinations(passes, size) for size in range(1, len(passes) + 1)
    )
    bounds = [
        min(heads) + times * sum(lengths) + min(tails)
        for heads, lengths, tails in (zip(*subset, strict=True) for subset in subsets)
    ]
    assert one_machine_bound.one_machine(passes, times) == max(bounds)


def test_of_many_passes_the_way_back_of_all_but_weight_halves_counts_too():
    # Twice 1 there, 20 of each layer both ways, 5 back; of the weight halves, that nobody waits
    # for, all or none.
    passes = [(1.0, 10.0, 50.0 + i) for i in range(9)] + [(1.0, 10.0, 5.0 + i) for i in range(9)]
    weights = [(1.0, 0.125, 0.0)] * 9
    assert one_machine_bound.one_machine(passes + weights, 2) == 1 + 2 * 180 + 5
    assert one_machine_bound.one_machine(passes + 40 * weights, 2) == 1 + 2 * (180 + 45)


@st.composite
def tied(draw):
    """Return layers of any graph, some of which must be on one device."""
    count, devices = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    names = [f"l{i}" for i in range(count)]
    times = st.lists(MS, min_size=count, max_size=count)
    forward, awaited, weights = draw(times), draw(times), draw(times)
    layers = [
        Layer(name=name, forward_ms={"a": f}, backward_ms={"a": b + w}, weight_grad_ms={"a": w})
        for name, f, b, w in zip(names, forward, awaited, weights, strict=True)
    ]
    pairs = list(itertools.combinations(names, 2))
    arcs = {*draw(st.lists(st.sampled_from(pairs), unique=True)), *itertools.pairwise(names)}
    contiguous = draw(st.booleans())
    placed = [Device(name=f"d{i}", type="a", memory_bytes=100) for i in range(devices)]
    return PlacementRequest(
        profile=Profile(
            training=True,
            layers=layers,
            edges=[
                Edge(source=a, targets=[b], bytes=1, gradient_bytes=draw(st.integers(0, 1)))
                for a, b in arcs
            ],
        ),
        cluster=Cluster(
            devices=placed,
            links=[
                Link(source=a.name, target=b.name, bandwidth_bytes_per_s=1e9)
                for a, b in itertools.permutations(placed, 2)
            ],
        ),
        objective="step",
        chunks=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(["1f1b", "zero-bubble", "fill-drain"]))
        if contiguous
        else "interleaved",
        constraints=Constraints(
            contiguous=contiguous,
            colocated=[draw(st.lists(st.sampled_from(names), min_size=2, unique=True))],
        ),
    )


@examples(80)
@given(request=tied())
def test_no_map_takes_less_than_the_passes_of_a_node(request):
    choice = bounded(choice_of(request))
    for where in itertools.product(
        range(len(choice.problem.devices)), repeat=len(choice.problem.layers)
    ):
        result = (
            costs.evaluate(choice.problem, list(where))
            if costs.allowed(choice.problem, where)
            else None
        )
        assert result is None or result.objective_value >= choice.bound * (1 - 1e-9)


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_device_of_tied_layers_waits_for_what_is_between_them_and_for_its_way_back(chunks):
    # Free maps of a row of three whose ends are tied: 1 + 10 there, then 20 and 40 for each, and 10
    # and 2 back.
    times = {"l0": (1.0, 2.0), "l1": (10.0, 10.0), "l2": (20.0, 40.0)}
    layers = [
        Layer(name=name, forward_ms={"a": f}, backward_ms={"a": b})
        for name, (f, b) in times.items()
    ]
    edges = [
        Edge(source=f"l{i}", targets=[f"l{i + 1}"], bytes=0, gradient_bytes=1) for i in range(2)
    ]
    placed = [Device(name=f"d{i}", type="a", memory_bytes=100) for i in range(2)]
    links = [Link(source=f"d{i}", target=f"d{1 - i}", bandwidth_bytes_per_s=1e18) for i in range(2)]
    request = PlacementRequest(
        profile=Profile(training=True, layers=layers, edges=edges),
        cluster=Cluster(devices=placed, links=links),
        objective="step",
        chunks=chunks,
        schedule="interleaved",
        constraints=Constraints(contiguous=False, colocated=[["l0", "l2"]]),
    )
    choice = bounded(choice_of(request))
    assert choice.bound == pytest.approx(1 + 10 + chunks * (20 + 40) + 10 + 2)
    if chunks == 1:
        assert costs.evaluate(choice.problem, [0, 1, 0]).objective_value == pytest.approx(
            choice.bound
        )
