"""The cost model on examples worked by hand."""

import pytest

from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import costs, pass_times
from placer.solver.problem import Problem


def problem(training=False, transfers="added", **asked):
    """Return layers a, b, c in a row, b's value also read by d.

    Links of 1 byte per ms one way and half of that the other.
    """
    backward = {"t": 2.0} if training else {}
    held = {"saved_bytes": 5, "grad_bytes": 3, "optimizer_bytes": 7} if training else {}
    layers = [
        Layer(
            name=name,
            forward_ms={"t": 1.0},
            backward_ms=backward,
            param_bytes=10,
            forward_workspace_bytes=i,
            **held,
        )
        for i, name in enumerate("abcd")
    ]
    gradients = {"gradient_bytes": 2} if training else {}
    edges = [
        Edge(source="a", targets=["b"], bytes=100, saved_by=["b"] if training else [], **gradients),
        Edge(
            source="b",
            targets=["c", "d"],
            bytes=20,
            saved_by=["c"] if training else [],
            **gradients,
        ),
    ]
    cluster = Cluster(
        devices=[Device(name=name, type="t", memory_bytes=1000) for name in ("x", "y", "z")],
        links=[
            Link(source=s, target=t, bandwidth_bytes_per_s=1e3 if s < t else 500)
            for s in "xyz"
            for t in "xyz"
            if s != t
        ],
    )
    profile = Profile(layers=layers, edges=edges, training=training, cluster=cluster)
    return Problem.from_request(PlacementRequest(profile=profile, transfers=transfers, **asked))


def test_a_value_is_sent_once_to_each_device_that_reads_it():
    result = costs.evaluate(problem(), [0, 0, 1, 1])
    assert (result.send_ms, result.receive_ms) == ((20, 0, 0), (0, 20, 0))
    result = costs.evaluate(problem(), [0, 0, 1, 2])
    assert (result.send_ms, result.receive_ms) == ((40, 0, 0), (0, 20, 20))


def test_in_training_a_gradient_comes_back_over_the_link_the_other_way():
    result = costs.evaluate(problem(training=True), [0, 0, 1, 2])
    assert result.compute_ms == (6, 3, 3)
    assert result.send_ms == (40, 4, 4)  # 2 bytes at half a byte per ms
    assert result.receive_ms == (8, 20, 20)


def test_added_transfers_lengthen_the_load_and_overlapped_ones_hide_behind_the_longest():
    assert costs.evaluate(problem(), [0, 0, 1, 1]).load_ms == (22, 22, 0)
    assert costs.evaluate(problem(transfers="overlapped"), [0, 0, 1, 1]).load_ms == (20, 20, 0)


def test_inference_memory_peaks_where_live_values_and_workspace_do():
    result = costs.evaluate(problem(), [0, 0, 0, 0])
    # step b: a's value (100) and b's (20) live, workspace 1; steps c and d hold 20 with workspaces
    # 2 and 3
    assert result.memory[0].activation_bytes == 120 and result.memory[0].workspace_bytes == 1
    assert result.memory[0].total_bytes == 40 + 121


def test_a_sent_value_is_held_by_its_source_until_the_last_layer_has_read_it_wherever_that_is():
    result = costs.evaluate(problem(), [0, 1, 2, 2])
    # x and y hold a's value until b has read it; then y also holds b's own, and goes on while c and
    # d read that on z
    assert [use.activation_bytes for use in result.memory] == [100, 120, 20]


def test_training_memory_counts_saved_values_for_each_micro_batch_in_flight():
    result = costs.evaluate(problem(training=True, chunks=8, schedule="fill-drain"), [0, 1, 1, 1])
    # For each of 8, y saves b's value (c keeps it) and 5 bytes for each of 3 layers; then d works
    # in 3. a's value has its place, and so has its gradient until it was sent.
    assert result.memory[1].activation_bytes == 8 * (20 + 15 + 3 + 100 + 2)
    # d's part of b's gradient waits while c runs backwards
    assert result.memory[1].workspace_bytes == 2
    assert result.memory[1].total_bytes == 8 * 140 + 2 + 3 * (10 + 3 + 7)
    # x makes a's value: nobody there keeps it, but it stays until the next one comes; its gradient
    # has its place.
    assert result.memory[0].activation_bytes == 8 * (5 + 100 + 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize(("chunks", "flights"), [(1, (1, 1, 1)), (2, (2, 2, 1)), (8, (3, 2, 1))])
def test_a_stage_needs_room_for_as_many_as_there_are_stages_left(chunks, flights, schedule):
    asked = problem(training=True, chunks=chunks, schedule=schedule)
    result = costs.evaluate(asked, [0, 1, 2, 2])
    assert result.stages == (0, 1, 2)
    assert tuple(asked.flight(left) for left in (3, 2, 1)) == flights
    if schedule == "1f1b":
        assert result.in_flight == flights and result.least_memory == result.memory


def test_latency_waits_for_transfers_and_for_the_device():
    # a 0-1, sent 1-101; b 101-102, sent to z 102-122; c on y 102-103; d on z 122-123
    assert pass_times.latency_ms(problem(), [0, 1, 1, 2]) == 123
    # on one device everything follows: four layers of 1 ms
    assert pass_times.latency_ms(problem(), [0, 0, 0, 0]) == 4


def test_the_backward_pass_starts_when_all_forward_passes_have_finished():
    # forwards 123; backwards d on z 0-2, gradient 4 ms back to y: 6; c on y 0-2; b on y 6-8,
    # gradient 4: 12; a 12-14
    assert pass_times.latency_ms(problem(training=True), [0, 1, 1, 2]) == 123 + 14


def test_stages_that_feed_each_other_are_no_contiguous_placement():
    assert costs.evaluate(problem(), [0, 1, 0, 0]) is None


def test_of_two_orders_the_one_is_taken_in_which_memory_fits():
    # Two branches that no value joins: the large one must stand last, where fewer micro-batches are
    # held.
    layers = [
        Layer(name=name, forward_ms={"t": 1}, backward_ms={"t": 1}, saved_bytes=size)
        for name, size in (("large", 100), ("small", 10))
    ]
    link = Link(source="x", target="y", bandwidth_bytes_per_s=1e3)
    cluster = Cluster(
        devices=[Device(name=name, type="t", memory_bytes=150) for name in "xy"], links=[link]
    )
    profile = Profile(layers=layers, training=True, cluster=cluster)
    result = costs.evaluate(
        Problem.from_request(PlacementRequest(profile=profile, chunks=4)), [0, 1]
    )
    assert result.stages == (1, 0)
    assert [use.activation_bytes for use in result.memory] == [100, 20]
