"""The referee: what is altered in a right answer is caught."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples, small_requests

from placer.errors import PlacementError
from placer.schema import Constraints, Infeasibility
from placer.solver.check import check
from placer.solver.problem import Problem
from placer.solver.solve import Portfolio, solve

SETTINGS = examples(60)
FIGURES = ("compute_ms", "send_ms", "receive_ms", "load_ms", "layers", "limit_bytes")
MEMORY = (
    "param_bytes",
    "buffer_bytes",
    "grad_bytes",
    "optimizer_bytes",
    "activation_bytes",
    "workspace_bytes",
)


@pytest.fixture
def answered(chain):
    """Return a request for four layers on two devices, and its answer."""
    request = chain([3, 1, 1, 3], param_bytes=10, value_bytes=1)
    return request, solve(request)


def with_load(placement, number, **changes):
    loads = list(placement.devices)
    loads[number] = loads[number].model_copy(update=changes)
    return placement.model_copy(update={"devices": tuple(loads)})


def test_a_right_answer_passes(answered):
    check(*answered)


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("number", [0, 1])
def test_a_wrong_figure_of_a_device_is_caught(answered, figure, number):
    request, placement = answered
    wrong = with_load(placement, number, **{figure: getattr(placement.devices[number], figure) + 1})
    with pytest.raises(PlacementError, match=f"{figure}|bottleneck"):
        check(request, wrong)


@pytest.mark.parametrize("kind", MEMORY)
def test_wrong_bytes_of_a_device_are_caught(answered, kind):
    request, placement = answered
    memory = placement.devices[0].memory
    wrong = with_load(
        placement, 0, memory=memory.model_copy(update={kind: getattr(memory, kind) + 1})
    )
    with pytest.raises(PlacementError):
        check(request, wrong)


@pytest.mark.parametrize(
    "changes",
    [
        {"objective_value": 4.0},
        {"objective_value": 6.0},
        {"bound": 6.0},
        {"bound": 1.0},
        {"gap": 0.5},
        {"status": "feasible"},
        {"speedup": 3.0},
        {"id": "0"},
        {"chunks": 2},
        {"training": True},
        {"stages": ("d1", "d0")},
        {"stages": ("d0",)},
        {"objective_value": None},
    ],
    ids=str,
)
def test_a_wrong_claim_is_caught(answered, changes):
    request, placement = answered
    with pytest.raises(PlacementError):
        check(request, placement.model_copy(update=changes))


def test_a_free_placement_that_is_called_contiguous_is_caught(chain):
    """Return its last layer is fed by two devices that feed each other."""
    pinned = {"l0": "d0", "l1": "d1", "l3": "d2"}
    rules = Constraints(pinned=pinned, colocated=(("l0", "l2"),))
    request = chain([1, 1, 1, 1], devices=3, constraints=rules)
    placement = solve(request)
    assert not placement.contiguous
    with pytest.raises(PlacementError, match=r"round between \['d0', 'd1', 'd2'\]"):
        check(request, placement.model_copy(update={"contiguous": True}))


def test_a_wrong_single_device_is_caught(answered):
    request, placement = answered
    single = placement.single_device.model_copy(update={"objective_value": 7.0})
    with pytest.raises(PlacementError, match="single_device"):
        check(request, placement.model_copy(update={"single_device": single}))


def test_a_false_claim_of_infeasibility_is_caught(answered):
    request, placement = answered
    claim = placement.model_copy(
        update={
            "status": "infeasible",
            "infeasible": Infeasibility(reason="no"),
            "layer_devices": {},
            "devices": (),
            "objective_value": None,
            "gap": None,
            "speedup": None,
        }
    )
    with pytest.raises(PlacementError, match="meets every requirement"):
        check(request, claim)


def searched(request):
    """Return the answer, without why there is none."""
    return Portfolio(Problem.from_request(request)).answer()


@SETTINGS
@given(data=st.data())
def test_a_layer_moved_to_another_device_is_caught(data):
    request = data.draw(small_requests())
    placement = searched(request)
    assume(placement.layer_devices)
    layer = data.draw(st.sampled_from(sorted(placement.layer_devices)))
    others = [
        device.name for device in request.devices if device.name != placement.layer_devices[layer]
    ]
    where = placement.layer_devices | {layer: data.draw(st.sampled_from(others))}
    with pytest.raises(PlacementError):
        check(request, placement.model_copy(update={"layer_devices": where}))


@SETTINGS
@given(request=small_requests())
def test_a_placement_with_new_figures_but_a_broken_rule_is_caught(request):
    """Return the answer of a laxer request, its id replaced, breaks a rule or passes."""
    lax = request.model_copy(update={"constraints": type(request.constraints)(contiguous=False)})
    placement = searched(lax)
    rules = request.constraints
    assume(placement.layer_devices and rules.contiguous is False)
    where = placement.layer_devices
    banned = {
        (x, d)
        for key, ds in rules.forbidden.items()
        for d in ds
        for x in (where if key == "*" else [key])
    }
    broken = (
        not rules.pinned.items() <= where.items()
        or banned & set(where.items())
        or any(len({where[x] for x in group}) > 1 for group in rules.colocated)
        or len(set(where.values())) > (rules.max_devices or 99)
        or len(set(where.values())) < (rules.min_devices or 1)
        or max(list(where.values()).count(d) for d in where.values()) > (rules.max_layers or 99)
    )
    moved = placement.model_copy(update={"id": request.content_hash()})
    if broken:
        with pytest.raises(PlacementError):
            check(request, moved)
    else:
        check(request, moved)
