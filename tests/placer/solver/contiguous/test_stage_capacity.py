"""The memory of stages in chains of ideals, against the cost model and all assignments."""

import itertools
from random import Random

import numpy as np
import pytest
from enumeration import brute_force
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.schema import Constraints
from placer.solver import costs
from placer.solver.check import check
from placer.solver.contiguous import class_orders
from placer.solver.contiguous.class_orders import ClassOrders, StageCapacity
from placer.solver.contiguous.order_search import find_any
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.solve import Portfolio, solve

RULES = st.sampled_from(["never", "never", "auto", "always"])


@st.composite
def trained(draw):
    """Return a contiguous training request, with limits of memory that bind more often than not."""
    request = draw(small_requests(objectives=("throughput",)))
    assume(request.is_training)
    limit = draw(st.sampled_from([20, 30, 45, 70]))
    devices = [device.model_copy(update={"memory_bytes": limit}) for device in request.devices]
    cluster = request.placed_on.model_copy(update={"devices": tuple(devices)})
    rules = request.constraints.model_copy(update={"contiguous": True, "recompute": draw(RULES)})
    return request.model_copy(update={"constraints": rules, "cluster": cluster})


def placements(problem, nodes):
    """Return every way to place the nodes that runs forwards, with its order of stages."""
    for chosen in itertools.product(range(len(problem.devices)), repeat=len(nodes.nodes)):
        result = costs.evaluate(problem, nodes.spread(list(chosen)))
        if result is not None and costs.allowed(problem, nodes.spread(list(chosen))):
            yield np.array(chosen), result


def in_orders(request):
    """Return a request's problem with its nodes, if the search over orders applies to it."""
    problem = Problem.from_request(request)
    nodes = reduced(problem)
    assume(class_orders.applies(problem, nodes) and all(nodes.allowed))
    return problem, nodes


@examples(150)
@given(request=trained(), seed=st.integers(0, 99))
def test_stages_have_what_the_cost_model_says_and_sums_are_no_more(request, seed):
    problem = Problem.from_request(request)
    nodes = reduced(problem)
    room = StageCapacity(problem, nodes)
    some = list(placements(problem, nodes))
    for chosen, result in Random(seed).sample(some, min(20, len(some))):
        for place, device in enumerate(result.stages):
            members = chosen == device
            flight = problem.flight(len(result.stages) - place)
            use = result.least_memory[device].total_bytes
            assert (
                room.least(device, flight)[members].sum() <= use <= room.most(flight)[members].sum()
            )
            more_ms = room.more_ms(device, flight, members)
            fits = use <= problem.devices[device].usable_bytes
            assert (more_ms < np.inf) == fits
            if fits and problem.recompute[device] == "auto":
                again = sum(
                    problem.forward_ms[layer][device]
                    for node in np.flatnonzero(members)
                    for layer in nodes.nodes[node]
                )
                assert more_ms == pytest.approx(again if device in result.recompute else 0.0)


@examples(100)
@given(request=trained())
def test_chains_of_all_orders_are_no_worse_than_any_assignment_that_fits(request):
    problem, nodes = in_orders(request)
    fitting = [
        result.objective_value
        for _, result in placements(problem, nodes)
        if costs.fits(problem, result)
    ]
    assume(fitting)
    for upper in (min(fitting), 2 * min(fitting)):
        given = ClassOrders(problem, nodes, upper)
        found = [given.best(order, lambda: False) for order in class_orders.orders(problem)]
        assert min(chain.bound for chain in found) <= min(fitting) * (1 + 1e-9)


@examples(60)
@given(request=trained())
def test_the_solver_proves_the_best_or_that_there_is_none(request):
    placement = solve(request)
    check(request, placement)
    if request.constraints.recompute != "never":
        return
    best = brute_force(request, True)
    if best is None:
        assert placement.status == "infeasible"
    else:
        assert placement.objective_value == pytest.approx(best, rel=2e-6)
        assert placement.status == "optimal"


@examples(80)
@given(request=trained())
def test_where_no_order_has_a_chain_nothing_fits(request):
    problem, nodes = in_orders(request)
    search = Portfolio(problem)
    search.request, search.nodes = problem.request, nodes
    none = find_any(search)
    fits = any(costs.fits(problem, result) for _, result in placements(problem, nodes))
    assert not (none and fits)
    assert search.best is None or fits
    linked = all(
        link is not None
        for a, row in enumerate(problem.links)
        for b, link in enumerate(row)
        if a != b
    )
    # than chains account for
    asks_more = problem.least_devices > 1 or problem.most_layers is not None or not linked
    assert search.best is not None or none or asks_more


def test_a_first_stage_that_keeps_more_micro_batches_gets_fewer_layers(chain):
    # Of 4 stages the first has 4 micro-batches in flight: in 45 bytes it keeps 10 of one layer of
    # each.
    request = chain(
        [1.0] * 8, devices=4, memory_bytes=45, constraints=Constraints(contiguous=True), chunks=8
    )
    layers = [layer.model_copy(update={"saved_bytes": 10}) for layer in request.profile.layers]
    layers = [layer.model_copy(update={"backward_ms": {"t": 1.0}}) for layer in layers]
    profile = request.profile.model_copy(update={"layers": tuple(layers), "training": True})
    placement = solve(request.model_copy(update={"profile": profile}))
    check(request.model_copy(update={"profile": profile}), placement)
    places = list(placement.layer_devices.values())
    assert placement.status == "optimal"
    assert [places.count(device) for device in dict.fromkeys(places)] == [1, 1, 2, 4]
