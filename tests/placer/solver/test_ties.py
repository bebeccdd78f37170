"""Of placements with as small an objective: less transfer, then better balance."""

import itertools

import pytest
from enumeration import Enumeration
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.errors import PlacementError
from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.check import check
from placer.solver.cpsat import ties
from placer.solver.cpsat.runner import Limits
from placer.solver.problem import Problem
from placer.solver.solve import solve

SETTINGS = examples(60)


def assert_ties_are_broken(placement, ranks):
    """Against the ranks of all that are as good.

    The least transfer, then the least spread among those.
    """
    transfer = min(ranks)[0]
    assert placement.tie_breaks.proven
    assert placement.tie_breaks.transfer_ms == pytest.approx(transfer, abs=1e-4)
    spread = min(spread for other, spread in ranks if other <= transfer + 1e-9)
    assert placement.tie_breaks.imbalance_ms == pytest.approx(spread, abs=1e-4)


@SETTINGS
@given(data=st.data())
def test_no_placement_as_good_has_a_smaller_rank(data):
    request = data.draw(small_requests()).model_copy(update={"break_ties": True})
    placement = solve(request)
    assume(placement.layer_devices)
    every = Enumeration(request, placement.contiguous)
    most = placement.objective_value * (1 + 1e-9)
    as_good = (
        where
        for where in every.maps()
        if (value := every.value(where)) is not None and value <= most
    )
    assert_ties_are_broken(placement, [every.rank(where) for where in as_good])


def test_rounding_makes_no_transfer_less(unlike_sums):
    # l0 on the quick device is as good, and in balance; what it sends, added in another order, is
    # 4e-15 ms more
    placement = solve(unlike_sums)
    assert placement.tie_breaks.proven
    assert placement.tie_breaks.imbalance_ms == pytest.approx(6.55)


@pytest.fixture
def unlike_sums():
    """Return three layers on three devices, one unlike, all used, for the least memory."""
    sizes = {"grad_bytes": 5, "optimizer_bytes": 3, "buffer_bytes": 5}
    layers = [
        Layer(
            name="l0",
            forward_ms={"a": 0.0, "b": 7.3},
            backward_ms={"a": 1.0, "b": 7.3},
            buffer_bytes=8,
        ),
        Layer(
            name="l1", forward_ms={"a": 1.0, "b": 1.0}, backward_ms={"a": 1.0, "b": 1.0}, **sizes
        ),
        Layer(
            name="l2",
            forward_ms={"a": 1.0, "b": 0.25},
            backward_ms={"a": 3.1, "b": 7.3},
            buffer_bytes=5,
        ),
    ]
    edges = [
        Edge(source="l0", targets=["l1"], bytes=1, gradient_bytes=5),
        Edge(source="l1", targets=["l2"], bytes=3, gradient_bytes=3),
    ]
    devices = [Device(name=f"d{i}", type=kind, memory_bytes=10_000) for i, kind in enumerate("bba")]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=1e3, latency_s=1e-4)
        for a, b in itertools.permutations(devices, 2)
    ]
    profile = Profile(
        layers=layers, edges=edges, training=True, cluster=Cluster(devices=devices, links=links)
    )
    return PlacementRequest(
        profile=profile,
        objective="memory",
        constraints=Constraints(min_devices=3),
        transfers="overlapped",
        workers=1,
        break_ties=True,
    )


def test_a_long_layer_leaves_the_others_in_balance(chain):
    # l0 is the bottleneck; whatever else is cut, one device has 9 and the others share 3 + 3
    request = chain([9, 3, 3], devices=3, constraints=Constraints(min_devices=3), break_ties=True)
    assert sorted(load.compute_ms for load in solve(request).devices) == [3, 3, 9]


def test_a_wrong_tie_is_caught(chain):
    request = chain([9, 3, 3], break_ties=True)
    placement = solve(request)
    ties = placement.tie_breaks.model_copy(
        update={"transfer_ms": placement.tie_breaks.transfer_ms + 1}
    )
    with pytest.raises(PlacementError, match=r"tie_breaks\.transfer_ms"):
        check(request, placement.model_copy(update={"tie_breaks": ties}))


def test_ties_are_left_alone_unless_it_is_asked_for(chain):
    assert solve(chain([9, 3, 3])).tie_breaks is None


@SETTINGS
@given(data=st.data())
def test_no_placement_on_as_few_devices_has_a_smaller_rank(data):
    asked = data.draw(small_requests(objectives=("throughput",)))
    most_ms = data.draw(st.sampled_from([4.1, 8.0, 12.0, 20.0, 40.0]))
    placement = solve(
        asked.model_copy(
            update={"objective": "devices", "bottleneck_ms": most_ms, "break_ties": True}
        )
    )
    assume(placement.layer_devices)
    every = Enumeration(asked, placement.contiguous)
    as_few = [
        where for where in every.maps() if len(set(where.values())) <= placement.objective_value
    ]
    as_good = (
        where for where in as_few if (value := every.value(where)) is not None and value <= most_ms
    )
    assert_ties_are_broken(placement, [every.rank(where) for where in as_good])


def test_as_few_devices_share_the_work_evenly(chain):
    request = chain([1] * 8, devices=4, objective="devices", bottleneck_ms=6, break_ties=True)
    placement = solve(request)
    assert (
        sorted(load.compute_ms for load in placement.devices) == [0, 0, 4, 4]
        and placement.tie_breaks.proven
    )


def test_of_as_short_steps_the_best_balanced_is_taken(chain):
    # inference: the way through all and 3 times the longest stage, l0; the others are shared as
    # evenly as can be
    request = chain([9, 3, 3], devices=3, objective="step", chunks=4, break_ties=True)
    rules = Constraints(min_devices=3)
    placement = solve(request.model_copy(update={"constraints": rules}))
    assert (
        sorted(load.compute_ms for load in placement.devices) == [3, 3, 9]
        and placement.tie_breaks.proven
    )


def test_no_program_for_ties_is_written_down_when_the_time_is_over(chain, monkeypatch):
    monkeypatch.setattr("placer.solver.cpsat.ties._TieModel", lambda *_: pytest.fail("a program"))
    problem = Problem.from_request(chain([1.0] * 4))
    broken = ties.broken(problem, [0, 0, 1, 1], lambda work: Limits(0.0), lambda devices: devices)
    assert not broken.proven
