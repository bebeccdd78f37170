"""Objective ``step`` against every micro-batch size, schedule and assignment, on a clock."""

import math
from unittest.mock import patch

import pytest
from every_step import Steps, requests
from hypothesis import given
from hypothesis import strategies as st
from rows import row
from small_requests import examples

from placer.errors import InputError, PlacementError
from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import costs, every_map
from placer.solver.check import check
from placer.solver.contiguous import order_search
from placer.solver.referee.step import StepReading
from placer.solver.solve import Portfolio, solve
from placer.solver.step import step_bounds
from placer.solver.step.choices import bounded, choice_of, questions, work_alone
from placer.solver.step.step_search import StepSearch

SETTINGS = examples(30)


def hold_against_every_answer(request, placement):
    """Nothing is better than what was found, if anything was, and the bound holds."""
    best = min(Steps(request).all(), default=None)
    if best is None:
        assert not placement.layer_devices
        return
    assert placement.status != "infeasible" and placement.bound <= best * (1 + 1e-9)
    assert placement.objective_value is None or placement.objective_value >= best * (1 - 1e-9)


@SETTINGS
@given(request=requests())
def test_no_choice_and_no_assignment_is_better_and_the_bound_holds(request):
    placement = solve(request)
    best = min(Steps(request).all(), default=None)
    if best is None:
        assert not placement.layer_devices
        return
    assert placement.objective_value >= best * (1 - 1e-9)
    assert placement.bound <= best * (1 + 1e-9)


@SETTINGS
@given(request=requests(), data=st.data())
def test_nothing_is_better_where_devices_must_may_or_must_not_recompute(request, data):
    words = st.sampled_from(["auto", "always", "never"])
    rule = data.draw(st.one_of(words, st.dictionaries(st.sampled_from(["d0", "d1", "*"]), words)))
    limit = data.draw(st.sampled_from([8, 12, 18]))
    devices = tuple(device.model_copy(update={"memory_bytes": limit}) for device in request.devices)
    changes = {"constraints": request.constraints.model_copy(update={"recompute": rule})}
    changes["cluster"] = request.placed_on.model_copy(update={"devices": devices})
    request = request.model_copy(update=changes)
    placement = solve(request)
    hold_against_every_answer(request, placement)


@SETTINGS
@given(request=requests(row=True, contiguous=True), most=st.integers(0, 6))
def test_what_is_said_of_a_row_holds_where_too_many_cuts_are_open(request, most):
    # There were so many of a GPT-2 with untied embeddings that they took all memory of the machine.
    with patch.object(step_bounds, "MOST_OPEN", most), patch.object(step_bounds, "LOOKS", 1):
        hold_against_every_answer(request, solve(request))


@SETTINGS
@given(request=requests(row=True, contiguous=True))
def test_a_row_is_cut_for_the_shortest_step_and_that_is_proven(request):
    placement = solve(request)
    best = min(Steps(request).all(), default=None)
    if best is None:
        assert placement.status == "infeasible"
        return
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(best, rel=2e-6)


@SETTINGS
@given(request=requests(row=True))
def test_of_few_free_maps_the_best_is_proven_too(request):
    placement = solve(request)
    best = min(Steps(request).all(), default=None)
    if best is None:
        assert placement.status == "infeasible" and placement.infeasible.reason
        return
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(best, rel=2e-6)


@SETTINGS
@given(request=requests(contiguous=True))
def test_the_bound_of_contiguous_placements_of_any_graph_holds(request):
    placement = solve(request)
    best = min(Steps(request).all(), default=None)
    if best is not None:
        assert best * (1 - 1e-9) <= placement.objective_value
        assert placement.bound <= best * (1 + 1e-9)


def test_equal_layers_reach_the_closed_form_of_1f1b():
    placement = solve(
        row(
            [1.0] * 4,
            devices=4,
            chunks=8,
            schedule="1f1b",
            constraints=Constraints(contiguous=True),
        )
    )
    assert placement.objective_value == pytest.approx((8 + 3) * 3)
    assert placement.status == "optimal"


def test_interleaving_is_taken_where_it_fills_the_pipeline_sooner():
    placement = solve(row([1.0] * 8, devices=2, chunks=2, schedule="interleaved"))
    assert not placement.contiguous and placement.schedule == "interleaved"
    assert placement.objective_value == pytest.approx(
        2 * 4 * 3 + 3
    )  # one layer a segment: it fills in one layer's time


def test_small_micro_batches_are_taken_where_they_cost_nothing():
    """Half the batch in half the time: the more there are, the less the bubble."""
    large = row(
        [2.0] * 4, size=2, batch_size=8, schedule="auto", constraints=Constraints(contiguous=True)
    )
    small = row([1.0] * 4).profile
    placement = solve(large.model_copy(update={"profiles": (small,)}))
    assert (placement.batch_size, placement.chunks) == (1, 8)


def test_large_micro_batches_are_taken_where_small_ones_take_as_long():
    large = row(
        [1.0] * 4, size=2, batch_size=8, schedule="auto", constraints=Constraints(contiguous=True)
    )
    small = row([1.0] * 4).profile
    placement = solve(large.model_copy(update={"profiles": (small,)}))
    assert (placement.batch_size, placement.chunks) == (2, 4)


MEASURED = {"devices": 4, "saved_bytes": 10, "grad_bytes": 1, "chunks": 8}
"""Four stages of a layer each. The first keeps 12 bytes of each micro-batch: 10, a value sent, and
its gradient."""


def test_zero_bubble_has_the_room_for_which_there_is_memory():
    asked = MEASURED | {"schedule": "auto", "constraints": Constraints(contiguous=True)}
    ample, tight = (solve(row([1.0] * 4, memory_bytes=size, **asked)) for size in (125, 51))
    assert (ample.schedule, ample.in_flight) == ("zero-bubble", (8, 8, 8, 8))
    assert (tight.schedule, tight.in_flight) == ("zero-bubble", (4, 3, 3, 4))
    assert all(placement.step.in_flight == placement.in_flight for placement in (ample, tight))
    plain = solve(row([1.0] * 4, memory_bytes=51, **asked | {"schedule": "1f1b"}))
    assert plain.in_flight == (4, 3, 2, 1)
    assert ample.objective_value < tight.objective_value < plain.objective_value


@pytest.mark.parametrize("objective", ["throughput", "latency", "memory"])
def test_rooms_are_chosen_under_every_objective_and_the_least_where_memory_is_to_be_small(
    objective,
):
    asked = {"schedule": "zero-bubble", "constraints": Constraints(contiguous=True, min_devices=4)}
    request = row([1.0] * 4, memory_bytes=51, **MEASURED | asked).model_copy(
        update={"objective": objective}
    )
    placement = solve(request)
    assert placement.in_flight == ((4, 3, 2, 1) if objective == "memory" else (4, 3, 3, 4))
    short = row([1.0] * 4, memory_bytes=48, **MEASURED | asked).model_copy(
        update={"objective": objective}
    )
    assert solve(short).status == "infeasible"


def test_1f1b_is_taken_where_memory_forbids_what_one_weight_pass_waits_with():
    request = row(
        [1.0] * 4,
        memory_bytes=51,
        **MEASURED,
        schedule="auto",
        constraints=Constraints(contiguous=True),
    )
    layers = tuple(
        layer.model_copy(update={"deferred_bytes": 9}) for layer in request.profile.layers
    )
    waiting = request.profile.model_copy(update={"layers": layers})
    placement = solve(request.model_copy(update={"profile": waiting}))
    assert (placement.schedule, placement.in_flight) == ("1f1b", (4, 3, 2, 1))


def test_layers_without_parameters_to_train_have_no_half_to_put_off():
    # Two equal stages, 4 micro-batches: the halves fill the bubble; without them zero-bubble is
    # 1F1B.
    asked = {
        "devices": 2,
        "chunks": 4,
        "schedule": "zero-bubble",
        "constraints": Constraints(contiguous=True),
    }
    without, with_them = (
        solve(row([1.0] * 2, **asked)),
        solve(row([1.0] * 2, grad_bytes=1, **asked)),
    )
    assert without.objective_value == pytest.approx((4 + 1) * 3)
    assert with_them.objective_value == pytest.approx(4 * 3 + 1)


def two_rows(saved_bytes, memory_bytes, schedule):
    """Two rows of 7 layers of 1 ms on two devices, of which one has little memory.

    4 micro-batches.
    """
    names = [f"{side}{index}" for index in range(7) for side in "ab"]
    times = {"forward_ms": {"t": 0.5}, "backward_ms": {"t": 0.5}}
    layers = [Layer(name=name, param_bytes=10, saved_bytes=saved_bytes, **times) for name in names]
    ends = [(f"{side}{index}", f"{side}{index + 1}") for side in "ab" for index in range(6)]
    edges = [
        Edge(source=source, targets=[target], bytes=1, gradient_bytes=1) for source, target in ends
    ]
    devices = [
        Device(name="d0", type="t", memory_bytes=memory_bytes),
        Device(name="d1", type="t", memory_bytes=10_000),
    ]
    links = [
        Link(source=a, target=b, bandwidth_bytes_per_s=1e9) for a, b in (("d0", "d1"), ("d1", "d0"))
    ]
    return PlacementRequest(
        profile=Profile(layers=layers, edges=edges, training=True),
        cluster=Cluster(devices=devices, links=links),
        objective="step",
        schedule=schedule,
        chunks=4,
        constraints=Constraints(contiguous=True),
        workers=1,
        time_limit_s=10.0,
    )


def test_where_memory_lets_a_device_hold_few_layers_the_work_of_others_is_the_bound():
    """Of all layers one device holds no more than 5: the other does 9 ms a micro-batch."""
    placement = solve(two_rows(saved_bytes=1, memory_bytes=66, schedule="1f1b"))
    assert 4 * 9 * (1 - 1e-5) <= placement.bound <= placement.objective_value < 4 * 9 + 1.1


def test_schedules_that_memory_makes_too_slow_are_proven_to_be():
    # Half the layers fit twice, as 1F1B and zero-bubble may hold them: under fill-drain a device
    # does 9 of 14 ms.
    placement = solve(two_rows(saved_bytes=4, memory_bytes=130, schedule="auto"))
    assert placement.schedule != "fill-drain" and placement.objective_value < 4 * 9
    (slow,) = (choice for choice in placement.step.choices if choice.schedule == "fill-drain")
    assert slow.bound >= placement.objective_value * (1 - 1e-6)


@pytest.mark.parametrize("is_known", [False, True])
def test_that_no_bottleneck_is_enough_is_proven_whatever_is_known(is_known):
    """Return a device of 66 bytes holds 5 of 14 layers: the other does 9 ms."""
    problem = choice_of(
        next(questions(two_rows(saved_bytes=1, memory_bytes=66, schedule="1f1b")))
    ).bottleneck
    best = Portfolio(work_alone(problem)).answer()
    search = Portfolio(work_alone(problem), enough=0.9 * best.objective_value)
    if is_known:
        index = {device.name: number for number, device in enumerate(problem.devices)}
        search.offer([index[device] for device in best.layer_devices.values()], "known")
    assert not order_search.none_in_any_order(search)
    assert search.bound > search.enough == pytest.approx(0.9 * 9, rel=1e-6)


@SETTINGS
@given(request=requests(contiguous=True))
def test_the_bound_holds_where_not_every_map_is_tried(request):
    with patch.object(every_map, "few", lambda *_: None):
        placement = solve(request)
    hold_against_every_answer(request, placement)


def test_a_step_that_is_not_what_is_claimed_is_refused():
    request = row([1.0, 2.0, 3.0], chunks=4, schedule="auto")
    placement = solve(request)
    value = placement.objective_value * 0.9
    with pytest.raises(PlacementError, match="objective_value"):
        check(request, placement.model_copy(update={"objective_value": value, "bound": value}))


def test_a_schedule_that_was_not_asked_for_is_refused():
    request = row([1.0, 2.0, 3.0], chunks=4, schedule="1f1b")
    placement = solve(request)
    with pytest.raises(PlacementError, match="under 'fill-drain' cannot be chosen"):
        check(request, placement.model_copy(update={"schedule": "fill-drain"}))


def test_what_no_choice_can_hold_is_infeasible():
    placement = solve(row([1.0] * 4, saved_bytes=100, memory_bytes=50, chunks=2, schedule="auto"))
    assert placement.status == "infeasible" and placement.infeasible.reason


@pytest.mark.parametrize("work_limit", [0.001, 0.01, None])
def test_what_no_cut_of_a_row_can_hold_is_infeasible_however_little_is_searched(work_limit):
    # Three layers of 3 bytes on two devices of 5: together they fit, and each alone, but two on one
    # device do not.
    asked = {
        "saved_bytes": 3,
        "memory_bytes": 5,
        "chunks": 1,
        "constraints": Constraints(contiguous=True),
    }
    placement = solve(row([1.0] * 3, schedule="fill-drain", work_limit=work_limit, **asked))
    assert placement.status == "infeasible" and "memory" in placement.infeasible.reason


def test_no_free_map_holds_two_micro_batches_where_memory_is_for_one():
    """Return each device could hold its half of one.

    The first of several segments has two in flight.
    """
    asked = {
        "saved_bytes": 10,
        "memory_bytes": 24,
        "chunks": 2,
        "constraints": Constraints(contiguous=False),
    }
    assert solve(row([1.0] * 4, schedule="interleaved", **asked)).status == "infeasible"


def test_a_free_map_with_room_for_micro_batches_in_flight_is_found():
    # The first layer and the last share a device, so no cut of a row will do, and one micro-batch
    # is not the most.
    rules = Constraints(colocated=(("l0", "l13"),))
    asked = {
        "saved_bytes": 10,
        "memory_bytes": 128,
        "chunks": 4,
        "constraints": rules,
        "workers": 1,
    }
    placement = solve(row([1.0] * 14, schedule="interleaved", work_limit=10, **asked))
    assert placement.layer_devices and not placement.contiguous


@pytest.mark.parametrize(("memory_bytes", "held", "step_ms"), [(10_000, 6, 237.0), (100, 4, 239.0)])
def test_a_free_map_holds_as_many_micro_batches_as_it_has_memory_for(memory_bytes, held, step_ms):
    # The first layer and the last share a device; with room for all micro-batches at once that one
    # hardly waits.
    rules = Constraints(colocated=(("l0", "l3"),), pinned={"l0": "d0", "l1": "d1", "l2": "d2"})
    asked = {
        "saved_bytes": 10,
        "memory_bytes": memory_bytes,
        "chunks": 6,
        "constraints": rules,
        "schedule": "interleaved",
    }
    request = row([1.0, 4.0, 4.0, 10.0], devices=3, **asked)
    layers = [
        layer.model_copy(update={"backward_ms": {"t": time}})
        for layer, time in zip(request.profile.layers, (8.0, 8.0, 8.0, 20.0), strict=True)
    ]
    profile = request.profile.model_copy(update={"layers": tuple(layers)})
    placement = solve(request.model_copy(update={"profile": profile}))
    assert max(placement.step.in_flight) == held
    assert placement.objective_value == pytest.approx(step_ms, abs=1e-6)


def test_micro_batches_in_flight_that_no_order_has_are_refused():
    rules = Constraints(colocated=(("l0", "l3"),), pinned={"l0": "d0", "l1": "d1", "l2": "d2"})
    request = row([1.0] * 4, devices=3, chunks=4, constraints=rules, schedule="interleaved")
    placement = solve(request)
    with pytest.raises(PlacementError, match=r"in_flight is \(1, 1, 1, 1\), which no order"):
        check(request, placement.model_copy(update={"in_flight": (1, 1, 1, 1)}))
    claimed = placement.step.model_copy(update={"in_flight": (1, 1, 1, 1)})
    with pytest.raises(PlacementError, match=r"step.in_flight: \(1, 1, 1, 1\) is claimed"):
        check(request, placement.model_copy(update={"step": claimed}))


@pytest.mark.parametrize(
    ("rooms", "message"),
    [
        # too few for gradients to come back
        ((3, 3, 3, 4), "zero-bubble needs .4, 3, 2, 1. or more"),
        ((4, 3, 3, 9), "has no use for more than 8"),
        ((4, 3, 3), "in_flight is .4, 3, 3."),
        ((4, 4, 3, 4), "memory of d1"),
        ((4, 3, 3, 3), "memory of d3"),
    ],
)
def test_room_that_zero_bubble_cannot_have_or_that_takes_other_memory_is_refused(rooms, message):
    request = row(
        [1.0] * 4,
        memory_bytes=51,
        **MEASURED,
        schedule="zero-bubble",
        constraints=Constraints(contiguous=True),
    )
    placement = solve(request)
    assert placement.in_flight == (4, 3, 3, 4)
    step = placement.step.model_copy(update={"in_flight": rooms})
    with pytest.raises(PlacementError, match=message):
        check(request, placement.model_copy(update={"in_flight": rooms, "step": step}))


def test_a_stop_ends_the_search_with_the_best_so_far():
    import threading

    stop = threading.Event()
    stop.set()
    placement = solve(row([1.0] * 30, devices=4, chunks=16, schedule="auto"), stop=stop)
    assert placement.objective_value <= 30 * 3 * 16 and placement.bound <= placement.objective_value


def test_better_placements_are_told_as_they_are_found():
    told = []
    placement = solve(row([1.0] * 8, devices=3, chunks=4, schedule="auto"), progress=told.append)
    values = [incumbent.objective_value for incumbent in told]
    assert values == sorted(values, reverse=True) and values[-1] == placement.objective_value
    assert all(incumbent.bound <= incumbent.objective_value for incumbent in told)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"objective": "throughput", "schedule": "auto"},
            "schedule: only objective 'step' chooses it",
        ),
        (
            {"objective": "throughput", "batch_size": 4},
            "batch_size: only objective 'step' chooses it",
        ),
        (
            {"size": 3, "batch_size": 4},
            "4 samples cannot be divided into micro-batches of 3; give a multiple",
        ),
    ],
)
def test_what_cannot_be_chosen_is_named(change, words):
    with pytest.raises(InputError, match=words):
        PlacementRequest.model_validate(row([1.0], chunks=2).model_dump() | _asked(change))


def _asked(change):
    if "size" in change:
        return {
            "batch_size": change["batch_size"],
            "profile": row([1.0], size=change["size"]).profile.model_dump(),
        }
    return change


def test_profiles_of_other_layers_are_refused():
    request = row([1.0, 1.0], size=2, batch_size=4)
    other = row([1.0, 1.0, 1.0]).profile
    with pytest.raises(InputError, match="the profile of 1 sample has other layers"):
        PlacementRequest.model_validate(request.model_dump() | {"profiles": [other.model_dump()]})


def test_two_profiles_of_one_size_are_refused():
    request = row([1.0, 1.0], size=2, batch_size=4)
    with pytest.raises(InputError, match="'2' is listed twice"):
        PlacementRequest.model_validate(
            request.model_dump() | {"profiles": [request.profile.model_dump()]}
        )


def test_inference_is_a_flow_shop():
    """One micro-batch's way, and the slowest stage for every further one."""
    request = row([1.0, 2.0, 3.0], devices=3, chunks=5, schedule="auto", training=False)
    placement = solve(request)
    assert placement.objective_value == pytest.approx(6 + 4 * 3)
    assert not math.isinf(placement.bound) and placement.status == "optimal"


def test_the_referee_plans_the_step_of_each_map_once():
    # It did so for each device anew: of 500 layers on 8 devices that took three times as long as
    # all else of it.
    request = row(
        [1.0] * 12,
        devices=4,
        chunks=4,
        constraints=Constraints(contiguous=False),
        schedule="interleaved",
    )
    placement = solve(request)
    with patch.object(
        StepReading, "_plan", autospec=True, side_effect=StepReading._plan
    ) as planned:
        check(request, placement)
    assert len(placement.step.in_flight) > 1
    # one device alone as well, under either kind of placement
    assert planned.call_count == 1 + 2


def test_more_micro_batches_than_can_be_simulated_are_refused_with_the_way_out():
    """Return a million of three layers took longer than 300 s, whatever the time limit."""
    row([1.0] * 3, chunks=10_000, schedule="auto")
    with pytest.raises(
        InputError, match=r"10,001 micro-batches of 1 sample, stages x 10,001 .* give larger"
    ):
        row([1.0] * 3, chunks=10_001, schedule="auto")


def test_many_small_micro_batches_of_one_of_several_profiles_are_refused_too():
    large = row([2.0] * 4, size=2, batch_size=20_000)
    with pytest.raises(InputError, match=r"chunks: a batch is 20,000 micro-batches of 1 sample"):
        PlacementRequest.model_validate(
            large.model_dump() | {"profiles": [row([1.0] * 4).profile.model_dump()]}
        )


def searching(request):
    """Return the search of a request at its beginning, and a list of the maps that it evaluates."""

    def no_bottleneck(problem, *_):
        raise AssertionError("there is no time to look for one")

    search = StepSearch(request, search=no_bottleneck)
    search.choices = list(map(choice_of, questions(request)))
    search.best = search.choices[0]
    return search, patch.object(costs, "evaluate", side_effect=costs.evaluate)


def test_when_the_time_is_over_no_further_choice_is_begun():
    # Each choice was: of the maps of the others, of the smallest bottleneck and of all rounds,
    # seconds each.
    search, _ = searching(row([1.0] * 12, devices=4, chunks=4, schedule="auto", time_limit_s=1e-9))
    placement = search.answer()
    assert (placement.method, placement.schedule, placement.bound) == ("one device", "1f1b", 0.0)
    assert [choice.devices is not None for choice in search.choices] == [True, False, False, False]


def test_alike_devices_are_tried_once_alone():
    search, watched = searching(
        row([1.0] * 12, devices=4, chunks=4, schedule="auto", time_limit_s=60.0)
    )
    with watched as evaluate:
        search._offer_one_device()
    assert [call.args[1] for call in evaluate.call_args_list] == [[0] * 12] * len(search.choices)


def test_no_map_is_simulated_that_there_is_no_time_to_tell_of():
    # Of 10,000 micro-batches a map of twelve segments alone takes seconds to be simulated, told of
    # and checked.
    search, watched = searching(
        row([1.0] * 12, chunks=10_000, schedule="interleaved", time_limit_s=10.0)
    )
    free = next(choice for choice in search.choices if not choice.problem.contiguous)
    with watched as evaluate:
        search._offer(free, [0] * 12, "one device")
        search._offer(free, [0, 1] * 6, "rounds")
        search._offer(free, [0] * 6 + [1] * 6, "rounds")
    assert [call.args[1] for call in evaluate.call_args_list] == [[0] * 12, [0] * 6 + [1] * 6]


def test_a_bound_without_time_is_the_trivial_one_and_with_less_time_no_higher():
    choice = choice_of(
        next(
            questions(
                row([1.0, 2.0, 3.0], grad_bytes=1, optimizer_ms=0.5, chunks=4, schedule="1f1b")
            )
        )
    )
    asked = []

    def after(most):
        asked.clear()

        def over():
            asked.append(None)
            return len(asked) > most

        return bounded(choice, over).bound

    found = [after(most) for most in range(6)]
    assert found[0] == 0.0 and found == sorted(found) and found[-1] == bounded(choice).bound > 0
