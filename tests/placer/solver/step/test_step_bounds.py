"""Bounds on steps against every cut of a row, and against closed forms."""

import itertools
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import costs
from placer.solver.replicas.replication import ExchangeTime, Replication
from placer.solver.step import fill_bound, step_bounds
from placer.solver.step.choices import bounded, choice_of

SETTINGS = examples(80)
MS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.25])
GRADIENTS = st.sampled_from([0, 10**6, 3 * 10**7, 10**8, 10**9])


def asked(
    forward,
    backward,
    devices,
    chunks,
    schedule,
    weights=None,
    edges=None,
    kinds=None,
    optimizer=None,
    gradients=None,
    **options,
):
    """Return a step of layers in a row, or with other edges; bytes take 1 ms each."""
    names = [f"l{i}" for i in range(len(forward))]
    kinds = kinds or ["a"] * devices
    layers = [
        Layer(
            name=name,
            forward_ms={"a": there, "b": 2 * there},
            backward_ms={"a": back, "b": back},
            weight_grad_ms={} if weights is None else {"a": weights[index], "b": weights[index]},
            optimizer_ms={} if optimizer is None else {"a": optimizer[index], "b": 1.0},
            grad_bytes=0 if gradients is None else gradients[index],
        )
        for index, (name, there, back) in enumerate(zip(names, forward, backward, strict=True))
    ]
    edges = edges or [(i, i + 1, 0) for i in range(len(names) - 1)]
    links = [f"d{i}" for i in range(devices)]
    return PlacementRequest(
        profile=Profile(
            training=True,
            layers=layers,
            edges=[
                Edge(source=names[a], targets=[names[b]], bytes=size, gradient_bytes=size + 1)
                for a, b, size in edges
            ],
        ),
        cluster=Cluster(
            devices=[
                Device(name=name, type=kind, memory_bytes=100)
                for name, kind in zip(links, kinds, strict=True)
            ],
            links=[
                Link(source=a, target=b, bandwidth_bytes_per_s=1e3)
                for a, b in itertools.permutations(links, 2)
            ],
        ),
        objective="step",
        chunks=chunks,
        schedule=schedule,
        constraints=Constraints(contiguous=True),
        **options,
    )


@st.composite
def rows(draw):
    count, devices = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    times = st.lists(MS, min_size=count, max_size=count)
    edges = [(i, i + 1, draw(st.integers(0, 2))) for i in range(count - 1)]
    edges += [(0, count - 1, 1)] * draw(st.booleans()) if count > 2 else []
    return asked(
        draw(times),
        draw(times),
        devices,
        draw(st.integers(1, 6)),
        draw(st.sampled_from(["1f1b", "zero-bubble", "fill-drain"])),
        weights=draw(st.one_of(st.none(), times)),
        edges=edges,
        kinds=draw(st.lists(st.sampled_from("ab"), min_size=devices, max_size=devices)),
        optimizer=draw(st.one_of(st.none(), times)),
        step_kind=draw(st.sampled_from(["isolated", "steady-state"])),
        training=draw(st.sampled_from([True, True, False])),
    )


def table_of(request):
    choice = bounded(choice_of(request))
    return choice, step_bounds.table(choice.problem, choice.nodes, choice.bottleneck)


@SETTINGS
@given(request=rows())
def test_no_cut_takes_less_than_its_bound_and_the_lowest_come_first(request):
    choice, table = table_of(request)
    before = choice.bound
    lowest = table.fill()[0]
    for bound, devices in table.cuts():
        assert bound >= lowest - 1e-9
        lowest = max(lowest, bound)
        assert bound == lowest
        value = costs.evaluate(choice.problem, devices).objective_value
        assert value >= bound * (1 - 1e-9) and value >= before * (1 - 1e-9)


@SETTINGS
@given(request=rows())
def test_no_free_map_takes_less_than_what_is_said_of_every_placement(request):
    free = {
        "constraints": Constraints(contiguous=False),
        "schedule": "interleaved",
        "training": True,
    }
    choice = bounded(choice_of(request.model_copy(update=free)))
    count, devices = len(choice.problem.layers), range(len(choice.problem.devices))
    for where in itertools.islice(itertools.product(devices, repeat=count), 250):
        result = costs.evaluate(choice.problem, list(where))
        assert result.objective_value >= choice.bound * (1 - 1e-9)


@pytest.mark.parametrize(("layers", "devices"), [(2, 2), (5, 3), (6, 4), (7, 1)])
def test_every_cut_comes_once(layers, devices):
    _, table = table_of(asked([1.0] * layers, [2.0] * layers, devices, 4, "1f1b"))
    cuts = [tuple(found) for _, found in table.cuts()]
    assert (
        len(cuts)
        == len(set(cuts))
        == sum(comb(layers - 1, stages - 1) for stages in range(1, devices + 1))
    )


@pytest.mark.parametrize(("devices", "chunks"), [(2, 4), (4, 8), (4, 16)])
def test_the_bound_of_equal_stages_is_the_step_of_1f1b(devices, chunks):
    # Without transfers equal stages take (chunks + stages - 1) passes both ways, and no cut takes
    # less.
    _, table = table_of(asked([1.0] * devices, [2.0] * devices, devices, chunks, "1f1b"))
    bound_of = {tuple(found): bound for bound, found in table.cuts()}
    # gradients of a byte, of which a stage's bound knows its own two cuts
    transfers = 2 * (devices - 1)
    assert (
        3 * (chunks + devices - 1) * (1 - 1e-6)
        <= bound_of[tuple(range(devices))]
        <= 3 * (chunks + devices - 1) + transfers
    )


@pytest.mark.parametrize(("devices", "chunks"), [(2, 2), (4, 8), (8, 16)])
def test_filling_takes_what_the_geometric_sum_says(devices, chunks):
    # Each stage can take 1 / chunks of what its way there leaves: fine layers, X (1 - (1 - 1/n)^K)
    # = work.
    layers = 512
    request = asked([3.0] * layers, [0.0] * layers, devices, chunks, "1f1b", training=False)
    choice = bounded(choice_of(request))
    found = fill_bound.filling(choice.problem, choice.nodes, choice.problem.backward_ms)
    wanted = 3 * layers / (1 - (1 - 1 / chunks) ** devices)
    assert wanted * 0.98 <= found <= wanted


@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 0.98), ("fill-drain", 0.995)])
@pytest.mark.parametrize(("layers", "devices", "chunks"), [(96, 4, 8), (96, 4, 16), (128, 8, 16)])
def test_filling_knows_how_long_stages_wait(layers, devices, chunks, schedule, share):
    # Fine layers without transfers take (chunks + stages - 1) passes both ways of an equal share by
    # both schedules.
    choice = bounded(choice_of(asked([1.0] * layers, [2.0] * layers, devices, chunks, schedule)))
    found = fill_bound.filling(choice.problem, choice.nodes, choice.problem.backward_ms)
    equal = 3 * (chunks + devices - 1) * layers / devices
    assert equal * share <= found <= equal
    assert (
        found
        <= costs.evaluate(
            choice.problem, [i * devices // layers for i in range(layers)]
        ).objective_value
    )


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_layer_waits_for_the_way_to_it_with_all_micro_batches_and_then_for_the_way_back(
    contiguous,
):
    request = asked(
        [1.0, 1.0, 5.0, 1.0], [2.0, 2.0, 9.0, 2.0], 4, 6, "1f1b" if contiguous else "interleaved"
    )
    request = request.model_copy(update={"constraints": Constraints(contiguous=contiguous)})
    choice = bounded(choice_of(request))
    transfers = 0.004
    assert choice.bound == pytest.approx(1 + 1 + 6 * (5 + 9) + 2 + 2, rel=1e-6)
    assert (
        choice.bound
        <= costs.evaluate(choice.problem, [0, 1, 2, 3]).objective_value
        <= choice.bound + 4 + transfers
    )


@st.composite
def graphs(draw):
    """Return layers of any graph, with several starts and ends, or of two branches."""
    count, devices = draw(st.integers(2, 8)), draw(st.integers(1, 3))
    devices = min(devices, 2) if count > 6 else devices
    times = st.lists(MS, min_size=count, max_size=count)
    pairs = list(itertools.combinations(range(count), 2))
    branches = [
        (0, min(1, count - 1)),
        *((first, first + 2) for first in range(count - 2)),
        (count - 2, count - 1),
    ]
    drawn = st.lists(st.sampled_from(pairs), min_size=1, unique=True)
    edges = [(*pair, 0) for pair in draw(st.one_of(drawn, st.just(sorted(set(branches)))))]
    schedule, training = (
        draw(st.sampled_from(["1f1b", "zero-bubble", "fill-drain"])),
        draw(st.booleans()),
    )
    weights = draw(st.one_of(st.none(), times))
    return asked(
        draw(times),
        draw(times),
        devices,
        draw(st.integers(1, 6)),
        schedule,
        weights,
        edges,
        gradients=draw(st.lists(GRADIENTS, min_size=count, max_size=count)),
        training=training,
        step_kind=draw(st.sampled_from(["isolated", "steady-state"])),
    )


@st.composite
def exchanges(draw, devices):
    """Return what two replicas of each device exchange."""
    byte_ms, latency_ms = (
        st.sampled_from([0.0, 1e-9, 1e-8, 1e-7]),
        st.sampled_from([0.0, 0.25]),
    )
    times = st.builds(ExchangeTime, latency_ms, byte_ms)
    reduction, gathering = (
        tuple(draw(st.lists(times, min_size=devices, max_size=devices))) for _ in range(2)
    )
    return Replication(2, reduction, gathering)


@SETTINGS
@given(data=st.data(), request=graphs(), most=st.sampled_from([2, fill_bound.MOST_BLOCKS]))
def test_no_map_of_any_graph_takes_less_than_its_bound(data, request, most):
    shared = data.draw(st.booleans()) and request.is_training
    costs_of_replicas = data.draw(exchanges(len(request.devices))) if shared else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill_bound, "MOST_BLOCKS", most)
        choice = bounded(choice_of(request, costs_of_replicas))
    for where in itertools.product(
        range(len(choice.problem.devices)), repeat=len(choice.problem.layers)
    ):
        result = (
            costs.evaluate(choice.problem, list(where))
            if costs.allowed(choice.problem, where)
            else None
        )
        assert result is None or result.objective_value >= choice.bound * (1 - 1e-9)


def test_branches_are_one_block_between_the_layers_that_every_path_passes():
    arcs = {(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)}
    assert fill_bound._blocks(arcs, 6) == [0, 1, 2, 2, 3, 4]


def test_what_goes_past_layers_joins_no_blocks():
    """Return a residual around 1 and 2, and a table that 0 makes for all others."""
    arcs = {(0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (3, 4), (0, 4)}
    assert fill_bound._blocks(arcs, 5) == [0, 1, 2, 3, 4]


def test_what_begins_or_ends_by_itself_is_one_block_with_all_before_or_behind_it():
    assert fill_bound._blocks({(0, 2), (1, 2), (2, 3)}, 4) == [0, 0, 1, 2]
    assert fill_bound._blocks({(0, 1), (1, 2), (1, 3)}, 4) == [0, 1, 2, 2]


def test_more_blocks_than_are_looked_at_are_joined_with_their_neighbours(monkeypatch):
    monkeypatch.setattr(fill_bound, "MOST_BLOCKS", 3)
    assert fill_bound._joined([0, 1, 1, 2, 3, 4, 5, 6]) == [0, 0, 0, 0, 1, 1, 1, 2]


def test_a_graph_with_branches_is_no_row():
    _, table = table_of(
        asked(
            [1.0] * 4, [1.0] * 4, 2, 4, "1f1b", edges=[(0, 1, 0), (0, 2, 0), (1, 3, 0), (2, 3, 0)]
        )
    )
    assert table is None


def test_under_zero_bubble_a_stage_waits_with_room_for_two_micro_batches_a_stage():
    """Two stages: the first runs four micro-batches forwards before one comes back, not three."""
    choice, table = table_of(asked([1.0] * 2, [3.0] * 2, 2, 4, "zero-bubble", weights=[1.0] * 2))
    for bound, devices in table.cuts():
        assert bound <= costs.evaluate(choice.problem, devices).objective_value


@pytest.mark.parametrize("step_kind", ["isolated", "steady-state"])
def test_after_its_last_gradients_the_first_stage_has_a_weight_half_and_its_optimizer(
    step_kind,
):
    # Three stages, the middle one busiest: 1 + 4 * (4 + 4) there, 1 for gradients, then 1, 1 and 3
    # on the first.
    choice, table = table_of(
        asked(
            [1.0, 4.0, 1.0],
            [2.0, 4.0, 2.0],
            3,
            4,
            "zero-bubble",
            weights=[1.0, 0.0, 1.0],
            optimizer=[3.0, 0.0, 0.0],
            step_kind=step_kind,
        )
    )
    bound_of = {tuple(found): bound for bound, found in table.cuts()}
    assert bound_of[0, 1, 2] == pytest.approx(1 + 4 * 8 + 1 + 1 + 1 + 3)
    assert costs.evaluate(choice.problem, [0, 1, 2]).objective_value >= bound_of[0, 1, 2]


def test_transfers_at_cuts_that_are_known_come_on_top():
    # Four stages of which the last is busiest: its own cut is counted for any cut, those before as
    # they are.
    request = asked(
        [1.0] * 4,
        [1.0, 1.0, 1.0, 9.0],
        4,
        4,
        "1f1b",
        edges=[(0, 1, 2), (1, 2, 2), (2, 3, 0)],
        kinds=["a"] * 4,
    )
    choice, table = table_of(request)
    bound_of = {tuple(found): bound for bound, found in table.cuts()}
    assert bound_of[0, 1, 2, 3] == pytest.approx(3 + 4 * 10 + 3 + 1 + 2 * (2 + 3))
    assert costs.evaluate(choice.problem, [0, 1, 2, 3]).objective_value == pytest.approx(
        bound_of[0, 1, 2, 3]
    )
