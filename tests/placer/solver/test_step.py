"""Objective ``step`` against trying every micro-batch size, schedule and assignment, each played by a clock."""

import itertools
import math
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from step_clock import StepClock

from placer.errors import PlacementError
from placer.schedule import Pipeline, Transfer, plan
from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.check import check
from placer.solver.solve import solve

SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.25])
SIZE = st.sampled_from([0, 1, 2, 3, 5])


@st.composite
def profiles(draw, training, row, kinds, count, size):
    """A few layers measured at one micro-batch size; in a row each reads from the one before, and gradients return."""
    names = [f"l{i}" for i in range(count)]
    times = st.fixed_dictionaries({kind: MS for kind in kinds})
    layers = [
        Layer(
            name=name,
            forward_ms=draw(times),
            backward_ms=draw(times) if training else {},
            weights_ms=draw(times) if training and draw(st.booleans()) else {},
            optimizer_ms=draw(times) if training and draw(st.booleans()) else {},
            param_bytes=draw(SIZE),
            saved_bytes=draw(SIZE) if training else 0,
            backward_workspace_bytes=draw(SIZE) if training else 0,
        )
        for name in names
    ]
    edges = []
    for source, name in enumerate(names[:-1]):
        targets = draw(st.sets(st.sampled_from(names[source + 1 :]))) | ({names[source + 1]} if row else set())
        size_of_gradient = draw(SIZE) + row if training else 0
        kept = [name] if training and draw(st.booleans()) else []
        if targets:
            edges.append(
                Edge(
                    source=name,
                    targets=sorted(targets),
                    bytes=draw(SIZE),
                    gradient_bytes=size_of_gradient,
                    saved_by=kept,
                )
            )
    return Profile(layers=layers, edges=edges, training=training, batch_size=size)


@st.composite
def requests(draw, row=False, contiguous=None):
    """2 to 4 layers on 2 or 3 devices, a batch of up to 4 samples in micro-batches of 1 and 2."""
    training = draw(st.booleans()) or draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from("ab"), min_size=2, max_size=3))
    count = draw(st.integers(2, 4 if len(kinds) == 2 else 3))
    sizes = draw(st.sampled_from([(1,), (2,), (2, 1), (1, 2)]))
    made = [draw(profiles(training, row, sorted(set(kinds)), count, size)) for size in sizes]
    limit = draw(st.sampled_from([12, 25, 10_000]))
    devices = [Device(name=f"d{i}", type=kind, memory_bytes=limit) for i, kind in enumerate(kinds)]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=draw(st.sampled_from([1e3, 4e3])))
        for a, b in itertools.permutations(devices, 2)
    ]
    return PlacementRequest(
        profile=made[0],
        profiles=made[1:],
        cluster=Cluster(devices=devices, links=links),
        objective="step",
        schedule=draw(st.sampled_from(["auto", "auto", "1f1b", "zero-bubble", "fill-drain", "interleaved"])),
        batch_size=draw(st.sampled_from([2, 4])),
        constraints=Constraints(contiguous=contiguous),
        workers=1,
    )


class Steps:
    """Every answer that there could be."""

    def __init__(self, request, enumeration):
        self.request, self.enumeration = request, enumeration

    def all(self):
        """The step of each assignment, for each way to run it, that meets every requirement."""
        names = [layer.name for layer in self.request.profile.layers]
        for asked, contiguous in self.ways():
            every = self.enumeration(asked, contiguous)
            for choice in itertools.product([device.name for device in every.devices], repeat=len(names)):
                where = dict(zip(names, choice, strict=True))
                if every.obeys_rules(where) and every.can_pass(where):
                    yield from self.steps(every, where)

    def ways(self):
        asked, training = self.request.schedule, self.request.is_training
        every = ["1f1b", "zero-bubble", "fill-drain"] if training else ["fill-drain"]
        kinds = [(order, True) for order in (every if asked == "auto" else [asked])]
        if training and asked in ("auto", "interleaved") and self.request.constraints.contiguous is not True:
            kinds.append(("interleaved", False))
        for profile in (self.request.profile, *self.request.profiles):
            chunks, rest = divmod(self.request.batch_size, profile.batch_size)
            for order, contiguous in kinds if not rest else []:
                yield (
                    self.request.model_copy(update={"profile": profile, "chunks": chunks, "schedule": order}),
                    contiguous,
                )

    def steps(self, every, where):
        """By order of the stages: one if they are a row, or segments."""
        used = sorted(set(where.values()))
        orders = itertools.permutations(used) if every.contiguous else [None]
        for order in orders:
            place = {device: stage for stage, device in enumerate(order or ())}
            if order and not all(place[a] < place[b] for _, a, b in every.sends(where)):
                continue
            if order:
                stages, stage_of = list(order), {layer: place[device] for layer, device in where.items()}
            else:
                runs = [(device, list(names)) for device, names in itertools.groupby(where, key=where.get)]
                stages = [device for device, _ in runs]
                stage_of = {name: stage for stage, (_, names) in enumerate(runs) for name in names}
            pipeline = self.pipeline(every, where, stages, stage_of)
            times = {name: getattr(pipeline, name) for name in ("forward_ms", "backward_ms", "weights_ms")}
            found = plan(
                every.request.schedule, pipeline.places, every.request.chunks, training=every.training, **times
            )
            if self.fits(every, where, stage_of, found):
                yield StepClock(pipeline, found).play() + self.optimizer(every, where)

    def pipeline(self, every, where, stages, stage_of):
        kind = {device.name: device.type for device in every.devices}
        totals = {"forward": [0.0] * len(stages), "backward": [0.0] * len(stages), "weights": [0.0] * len(stages)}
        for layer in every.layers:
            here, back = kind[where[layer.name]], layer.backward_ms.get(kind[where[layer.name]], 0.0)
            totals["forward"][stage_of[layer.name]] += layer.forward_ms[here]
            totals["backward"][stage_of[layer.name]] += back
            totals["weights"][stage_of[layer.name]] += min(back, layer.weights_ms.get(here, back / 2))
        there, back = Counter(), Counter()
        for number, a, b in every.sends(where):
            edge = every.request.profile.edges[number]
            first = min(stage_of[name] for name in edge.targets if where[name] == b)
            there[stage_of[edge.source], first] += self.hop(every, a, b, edge.bytes)
            if edge.gradient_bytes:
                back[stage_of[edge.source], first] += self.hop(every, b, a, edge.gradient_bytes)
        transfers = tuple(Transfer(*pair, time, back.get(pair)) for pair, time in sorted(there.items()))
        places = tuple([device.name for device in every.devices].index(name) for name in stages)
        return Pipeline(places, *(tuple(totals[name]) for name in ("forward", "backward", "weights")), transfers)

    @staticmethod
    def hop(every, a, b, size):
        return 1000 * (every.link[a, b].latency_s + size / every.link[a, b].bandwidth_bytes_per_s)

    @staticmethod
    def optimizer(every, where):
        kind = {device.name: device.type for device in every.devices}
        total = defaultdict(float)
        for layer in every.layers:
            total[where[layer.name]] += layer.optimizer_ms.get(kind[where[layer.name]], 0.0)
        return max(total.values())

    @staticmethod
    def fits(every, where, stage_of, found):
        for device in every.devices:
            use = every.use(where, device.name, 1)
            mine = [layer for layer in every.layers if where[layer.name] == device.name]
            for layer in mine if every.training else ():
                use += (found.in_flight[stage_of[layer.name]] - 1) * layer.saved_bytes
            for edge in every.request.profile.edges if every.training else ():
                held = [found.in_flight[stage_of[name]] for name in edge.saved_by if where[name] == device.name]
                use += (max(held) - 1) * edge.bytes if held else 0
            if use > device.memory_bytes - device.reserve_bytes:
                return False
        return True


@SETTINGS
@given(request=requests())
def test_no_choice_and_no_assignment_is_better_and_the_bound_holds(request, enumeration):
    placement = solve(request)
    best = min(Steps(request, enumeration).all(), default=None)
    if best is None:
        assert not placement.layer_devices
        return
    assert placement.objective_value >= best * (1 - 1e-9)
    assert placement.bound <= best * (1 + 1e-9)


@SETTINGS
@given(request=requests(row=True, contiguous=True))
def test_a_row_is_cut_for_the_shortest_step_and_that_is_proven(request, enumeration):
    placement = solve(request)
    best = min(Steps(request, enumeration).all(), default=None)
    if best is None:
        assert placement.status == "infeasible"
        return
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(best, rel=2e-6)


@SETTINGS
@given(request=requests(contiguous=True))
def test_the_bound_of_contiguous_placements_of_any_graph_holds(request, enumeration):
    placement = solve(request)
    best = min(Steps(request, enumeration).all(), default=None)
    if best is not None:
        assert best * (1 - 1e-9) <= placement.objective_value
        assert placement.bound <= best * (1 + 1e-9)


def row(times_ms, devices=2, memory_bytes=10**9, saved_bytes=0, **asked):
    """Layers in a row of so many ms forwards and twice that backwards, alike devices, transfers of next to nothing."""
    names = [f"l{i}" for i in range(len(times_ms))]
    layers = [
        Layer(name=name, forward_ms={"t": time}, backward_ms={"t": 2 * time}, saved_bytes=saved_bytes)
        for name, time in zip(names, times_ms, strict=True)
    ]
    edges = [Edge(source=a, targets=[b], bytes=1, gradient_bytes=1) for a, b in itertools.pairwise(names)]
    places = [f"d{i}" for i in range(devices)]
    cluster = Cluster(
        devices=[Device(name=name, type="t", memory_bytes=memory_bytes) for name in places],
        links=[Link(source=a, target=b, bandwidth_bytes_per_s=1e15) for a, b in itertools.permutations(places, 2)],
    )
    profile = Profile(layers=layers, edges=edges, training=True, batch_size=asked.pop("size", 1))
    return PlacementRequest(profile=profile, cluster=cluster, objective="step", **asked)


def test_equal_layers_reach_the_closed_form_of_1f1b():
    placement = solve(row([1.0] * 4, devices=4, chunks=8, schedule="1f1b", constraints=Constraints(contiguous=True)))
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
    large = row([2.0] * 4, size=2, batch_size=8, schedule="auto", constraints=Constraints(contiguous=True))
    small = row([1.0] * 4).profile
    placement = solve(large.model_copy(update={"profiles": (small,)}))
    assert (placement.batch_size, placement.chunks) == (1, 8)


def test_large_micro_batches_are_taken_where_small_ones_take_as_long():
    large = row([1.0] * 4, size=2, batch_size=8, schedule="auto", constraints=Constraints(contiguous=True))
    small = row([1.0] * 4).profile
    placement = solve(large.model_copy(update={"profiles": (small,)}))
    assert (placement.batch_size, placement.chunks) == (2, 4)


def test_1f1b_is_taken_where_memory_forbids_the_room_of_zero_bubble():
    """4 stages of a layer each that saves 10 bytes: the first holds 4 micro-batches under 1F1B, 7 under zero-bubble."""
    asked = {"devices": 4, "saved_bytes": 10, "chunks": 8, "constraints": Constraints(contiguous=True)}
    ample = solve(row([1.0] * 4, schedule="auto", memory_bytes=100, **asked))
    tight = solve(row([1.0] * 4, schedule="auto", memory_bytes=50, **asked))
    assert (ample.schedule, tight.schedule) == ("zero-bubble", "1f1b")


def test_the_answer_says_what_was_looked_at():
    placement = solve(row([1.0] * 4, chunks=4, schedule="auto"))
    step = placement.step
    assert {choice.schedule for choice in step.choices} == {"1f1b", "zero-bubble", "fill-drain", "interleaved"}
    assert step.samples_per_s == pytest.approx(1e3 * 4 / placement.objective_value)
    busy = 4 * 4 * 3.0
    assert step.bubble == pytest.approx(1 - busy / (2 * placement.objective_value))


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


def test_a_stop_ends_the_search_with_the_best_so_far():
    import threading

    stop = threading.Event()
    stop.set()
    placement = solve(row([1.0] * 30, devices=4, chunks=16, schedule="auto"), stop=stop)
    assert placement.objective_value <= 30 * 3 * 16 and placement.bound <= placement.objective_value


def test_better_placements_are_told_as_they_are_found():
    told = []
    placement = solve(row([1.0] * 12, devices=4, chunks=8, schedule="auto"), progress=told.append)
    values = [incumbent.objective_value for incumbent in told]
    assert values == sorted(values, reverse=True) and values[-1] == placement.objective_value
    assert all(incumbent.bound <= incumbent.objective_value for incumbent in told)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objective": "throughput", "schedule": "auto"}, "schedule: only objective 'step' chooses it"),
        ({"objective": "throughput", "batch_size": 4}, "batch_size: only objective 'step' chooses it"),
        ({"break_ties": True}, "objective 'step' breaks none"),
        ({"size": 3, "batch_size": 4}, r"4 samples are no whole number of \[3\]"),
    ],
)
def test_what_cannot_be_chosen_is_named(change, words):
    with pytest.raises(ValidationError, match=words):
        PlacementRequest.model_validate(row([1.0], chunks=2).model_dump() | _asked(change))


def _asked(change):
    if "size" in change:
        return {"batch_size": change["batch_size"], "profile": row([1.0], size=change["size"]).profile.model_dump()}
    return change


def test_profiles_of_other_layers_are_refused():
    request = row([1.0, 1.0], size=2, batch_size=4)
    other = row([1.0, 1.0, 1.0]).profile
    with pytest.raises(ValidationError, match="the one of 1 samples has other layers"):
        PlacementRequest.model_validate(request.model_dump() | {"profiles": [other.model_dump()]})


def test_two_profiles_of_one_size_are_refused():
    request = row([1.0, 1.0], size=2, batch_size=4)
    with pytest.raises(ValidationError, match="'2' is listed twice"):
        PlacementRequest.model_validate(request.model_dump() | {"profiles": [request.profile.model_dump()]})


def test_inference_is_a_flow_shop():
    """One micro-batch's way, and the slowest stage for every further one."""
    request = row([1.0, 2.0, 3.0], devices=3, chunks=5, schedule="auto", training=False)
    placement = solve(request)
    assert placement.objective_value == pytest.approx(6 + 4 * 3)
    assert not math.isinf(placement.bound) and placement.status == "optimal"
