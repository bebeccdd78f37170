"""What a device holds, on examples worked by hand."""

import pytest

from placer.schema import Cluster, Device, Edge, Layer, PlacementRequest, Profile
from placer.solver import costs
from placer.solver.problem import Problem


def memory(
    where,
    edges,
    training=True,
    chunks=1,
    schedule="fill-drain",
    share=0.0,
    contiguous=False,
    **sizes,
):
    """Return the memory of device x; ``where`` gives the devices of layers a, b, c and so on."""
    names = "abcdef"[: len(where)]
    ties = {field: sizes.pop(field) for field in ("colocated", "tied") if field in sizes}
    layers = [
        Layer(
            name=name,
            forward_ms={"t": 1},
            backward_ms={"t": 1},
            **{field: by_layer.get(name, 0) for field, by_layer in sizes.items()},
        )
        for name in names
    ]
    cluster = Cluster(
        devices=[Device(name=name, type="t", memory_bytes=10_000) for name in "xy"],
        links=[{"source": s, "target": t, "bandwidth_bytes_per_s": 1e9} for s, t in ("xy", "yx")],
    )
    profile = Profile(
        layers=layers,
        edges=edges,
        training=training,
        cluster=cluster,
        optimizer_workspace_ratio=share,
        **ties,
    )
    asked = PlacementRequest(
        profile=profile, chunks=chunks, schedule=schedule, constraints={"contiguous": contiguous}
    )
    return costs.evaluate(
        Problem.from_request(asked), ["xy".index(device) for device in where]
    ).memory[0]


def skip(**changes):
    """a's value, of 100 bytes and with a gradient of 10, is read by d."""
    return [Edge(**{"source": "a", "targets": ["d"], "bytes": 100, "gradient_bytes": 10} | changes)]


def test_the_largest_workspace_is_not_there_at_once_with_what_later_layers_keep():
    use = memory(
        "xx", [], saved_bytes={"a": 5, "b": 30}, backward_workspace_bytes={"a": 20, "b": 1}
    )
    # b runs backwards with 35 saved and a workspace of 1; a, with a workspace of 20, when b's are
    # gone
    assert (use.activation_bytes, use.workspace_bytes) == (35, 1)


def test_a_value_that_nobody_has_kept_yet_waits_for_its_reader():
    use = memory("xxxx", skip(gradient_bytes=0), forward_workspace_bytes={"c": 7})
    assert (use.activation_bytes, use.workspace_bytes) == (100, 7)
    # on y, d reads it there: nothing waits on x
    assert (
        memory("xxxy", skip(gradient_bytes=0), forward_workspace_bytes={"c": 7}).activation_bytes
        == 0
    )


@pytest.mark.parametrize(("where", "total"), [("xxy", 107), ("yxx", 107), ("yxy", 7), ("xyy", 100)])
def test_in_inference_a_value_is_where_it_was_made_and_where_it_will_be_read_until_then(
    where, total
):
    edges = [Edge(source="a", targets=["c"], bytes=100)]
    assert (
        memory(where, edges, training=False, forward_workspace_bytes={"b": 7}).total_bytes == total
    )


def test_a_value_that_is_kept_counts_once_however_many_read_it():
    edges = [Edge(source="a", targets=["b", "d"], bytes=100, saved_by=["b", "d"])]
    assert memory("xxxx", edges).total_bytes == 100
    # forwards it waits for d before d keeps it
    assert memory("yyxx", edges, forward_workspace_bytes={"c": 7}).total_bytes == 107


def test_a_gradient_waits_where_its_value_was_made_until_the_layer_that_made_it_runs_backwards():
    use = memory("xxyy", skip(), backward_workspace_bytes={"b": 7})
    assert (use.activation_bytes, use.workspace_bytes) == (10, 7)


def test_a_gradient_is_summed_up_where_several_layers_read_the_value_before_it_is_sent():
    twice = {"targets": ["b", "d"], "bytes": 0}
    # d's part waits while c and b run backwards; b's own is in b's workspace
    assert (
        memory("yxxx", skip(**twice), backward_workspace_bytes={"b": 3, "c": 5}).total_bytes == 15
    )
    # b's workspace is larger than c's: the part of d is there too
    assert (
        memory("yxxx", skip(**twice), backward_workspace_bytes={"b": 8, "c": 5}).total_bytes == 18
    )
    # one reader here, and none after it: it is sent at once
    assert memory("yxyy", skip(**twice), backward_workspace_bytes={"b": 8}).total_bytes == 8


@pytest.mark.parametrize(("chunks", "total"), [(1, 35), (4, 3 * 35 + 35)])
def test_further_micro_batches_add_what_they_keep(chunks, total):
    sizes = {"saved_bytes": {"a": 5, "b": 30}, "backward_workspace_bytes": {"a": 20}}
    assert memory("xx", [], chunks=chunks, **sizes).total_bytes == total


def apart(where, edges, chunks=1, **sizes):
    """Return the same where weight passes run apart.

    By micro-batch, and what weight passes share.
    """
    use = memory(where, edges, chunks=chunks, schedule="zero-bubble", **sizes)
    assert use.activation_bytes % chunks == 0
    return use.activation_bytes // chunks, use.workspace_bytes


def test_with_separate_weight_halves_a_backward_pass_has_memory_of_its_own():
    sizes = {"saved_bytes": {"a": 5, "b": 30}, "backward_workspace_bytes": {"a": 20, "b": 1}}
    assert memory("xx", [], **sizes).total_bytes == 36
    assert apart("xx", [], **sizes) == (35 + 20, 0)
    assert apart("xx", [], chunks=3, **sizes) == (35 + 20, 0)


def test_what_is_left_to_weight_passes_stays_while_the_layers_before_run_backwards():
    left = {"deferred_bytes": {"a": 4, "b": 6}}
    assert apart("xx", [], **left) == (10, 0)
    # a works in 20, of which 4 stay, while the 6 of b are there
    assert apart("xx", [], input_grad_workspace_bytes={"a": 20, "b": 8}, **left) == (26, 0)
    assert apart("xx", [], input_grad_workspace_bytes={"a": 4, "b": 50}, **left) == (50, 0)


def test_a_gradient_that_weight_passes_wait_with_needs_no_other_place_where_it_arrives():
    value = {"source": "a", "bytes": 3, "gradient_bytes": 4}
    for waits, readers, arriving in ((False, ["b"], 4), (True, ["b"], 0), (True, ["b", "c"], 4)):
        edges = [Edge(**value, targets=readers, deferred=waits)]
        assert apart("xyy", edges, chunks=2, deferred_bytes={"a": 4}) == (3 + 4 + arriving, 0)
        # Else it has its place for itself: what a pass that all share works in is no place to wait.
        kept = memory(
            "xyy", edges, chunks=2, schedule="1f1b", contiguous=True, deferred_bytes={"a": 4}
        )
        assert kept.activation_bytes == 2 * (3 + 4)


ROW = [
    Edge(source=a, targets=[b], bytes=100, gradient_bytes=10)
    for a, b in zip("abc", "bcd", strict=False)
]
KEPT = {"saved_bytes": dict.fromkeys("abcd", 40), "deferred_bytes": dict.fromkeys("abcd", 30)}
WORKS = {
    "backward_workspace_bytes": dict.fromkeys("abcd", 7),
    "weight_grad_workspace_bytes": dict.fromkeys("abcd", 5),
}


def stages(limit_bytes, schedule="zero-bubble", chunks=8, edges=ROW):
    """Rooms and bytes of four stages of a layer each, none of which may use more than so much."""
    names, devices = (
        "abcd",
        [Device(name=f"d{i}", type="t", memory_bytes=limit_bytes) for i in range(4)],
    )
    layers = [
        Layer(
            name=name,
            forward_ms={"t": 1},
            backward_ms={"t": 1},
            **{field: sizes[name] for field, sizes in (KEPT | WORKS).items()},
        )
        for name in names
    ]
    links = [
        {"source": a.name, "target": b.name, "bandwidth_bytes_per_s": 1e9}
        for a in devices
        for b in devices
        if a is not b
    ]
    cluster = Cluster(devices=devices, links=links)
    profile = Profile(layers=layers, edges=edges, training=True, cluster=cluster)
    asked = PlacementRequest(
        profile=profile, chunks=chunks, schedule=schedule, constraints={"contiguous": True}
    )
    result = costs.evaluate(Problem.from_request(asked), [0, 1, 2, 3])
    return result.in_flight, [use.total_bytes for use in result.memory]


def test_with_the_room_of_1f1b_zero_bubble_takes_its_memory_but_for_what_one_weight_pass_needs():
    room, bytes_by_stage = stages(1)  # too little for any
    plain, wanted = stages(1, "1f1b")
    assert room == plain == (4, 3, 2, 1)
    # A backward pass works in 7; its input half leaves 30, in which it works, and a weight half
    # works in 5.
    assert bytes_by_stage == [need - 7 + 30 + 5 for need in wanted]
    # The first stage: 4 times 40 saved and 100 sent, and a place for the gradient of that.
    assert bytes_by_stage[0] == 4 * (40 + 100 + 10) + 30 + 5
    # The second: also the value that comes, and a place out of the shared memory for the gradient
    # that it sends.
    assert bytes_by_stage[1] == 3 * (40 + 100 + 100 + 10 + 10) + 30 + 5
    # one micro-batch shares its memory with no other
    assert bytes_by_stage[3] == 1 * (40 + 100) + 30 + 5


@pytest.mark.parametrize(
    ("first", "memories"),
    [
        (4, 1),  # as under 1F1B
        # two weight passes are put off: of 5 in turn, only every second or third may have the same
        # memory
        (5, 3),
        (6, 3),  # three are put off: every third has the same memory
        (7, 7),  # four: of 7 in turn no two are so far apart, round and round
        (8, 8),  # all micro-batches
    ],
)
def test_zero_bubble_takes_the_room_for_which_there_is_memory(first, memories):
    """Count 150 bytes per micro-batch of the first stage, and 30 per memory of backward passes."""
    need = first * 150 + memories * 30 + 5
    room, bytes_by_stage = stages(need)
    assert (room[0], bytes_by_stage[0]) == (first, need)
    assert stages(need - 1)[0][0] == max(4, first - 1)


def test_zero_bubble_has_no_use_for_more_room_than_two_micro_batches_a_stage():
    assert stages(10_000, chunks=20)[0] == (8, 8, 8, 8)


def test_weight_passes_of_all_micro_batches_work_in_the_same_memory():
    assert apart("xx", [], chunks=3, weight_grad_workspace_bytes={"a": 7, "b": 9}) == (0, 9)


def test_the_optimizer_has_the_memory_of_passes_that_are_over_but_none_that_recorded_passes_keep():
    sizes = {"share": 2.0, "grad_bytes": {"a": 5, "b": 10}}
    assert memory("xxy", [], **sizes).total_bytes == 15 + 30
    assert memory("xxy", [], saved_bytes={"a": 29}, **sizes).total_bytes == 15 + 30
    assert memory("xxy", [], saved_bytes={"a": 31}, **sizes).total_bytes == 15 + 31
    assert apart("xxy", [], saved_bytes={"a": 31}, **sizes) == (31, 30)


def test_a_gradient_that_is_to_be_sent_is_there_until_the_backward_pass_is_over():
    edges = [Edge(source="a", targets=["d"], bytes=100, gradient_bytes=10)]
    # a made it elsewhere; d's part of its gradient is there while b and c work; all at once it was
    # sent before
    assert apart("yxxx", edges, input_grad_workspace_bytes={"b": 7, "c": 5})[0] == 100 + 17
    assert memory("yxxx", edges, backward_workspace_bytes={"b": 7, "c": 5}).total_bytes == 100 + 0


def recorded(where, edges, chunks=1, **sizes):
    """Of a contiguous placement.

    What all micro-batches have for themselves, and what they share.
    """
    use = memory(where, edges, chunks=chunks, contiguous=True, **sizes)
    return use.activation_bytes, use.workspace_bytes


def test_recorded_passes_keep_the_memory_that_they_work_in():
    sizes = {"saved_bytes": {"a": 5, "b": 30}, "backward_workspace_bytes": {"a": 20, "b": 1}}
    # a works backwards when what b saved is gone
    assert memory("xx", [], **sizes).total_bytes == 36
    assert recorded("xx", [], **sizes) == (35, 20)
    assert recorded("xx", [], chunks=3, forward_workspace_bytes={"b": 4}, **sizes) == (3 * 39, 20)
    assert recorded("xx", [], share=2.0, grad_bytes={"a": 5}, **sizes) == (35, 20 + 10)


def test_recorded_passes_of_several_micro_batches_send_gradients_from_memory_of_their_own():
    one = [Edge(source="a", targets=["b"], bytes=100, gradient_bytes=10)]
    # The value has its place; its gradient is in b's workspace, and is copied from there if others
    # work there next.
    assert recorded("yx", one, backward_workspace_bytes={"b": 12}) == (100, 12)
    assert recorded("yx", one, chunks=3, backward_workspace_bytes={"b": 12}) == (3 * (100 + 10), 12)


def test_what_crosses_has_its_place_beside_recorded_passes():
    one = [Edge(source="a", targets=["d"], bytes=100, gradient_bytes=10)]
    # On d's device the value lies in its place, whether d keeps it or not; the pass adds its
    # gradient.
    assert apart("yyyx", one) == (100, 0)
    assert apart("yyyx", [one[0].model_copy(update={"saved_by": ("d",)})]) == (100, 0)
    # Where it was made it stays until the next micro-batch comes, and its gradient has its place.
    assert apart("xxxy", one) == (110, 0)
    assert apart("xxxy", [one[0].model_copy(update={"saved_by": ("a",)})]) == (110, 0)
    # while b runs forwards, and while it runs backwards
    assert apart("xxxx", one) == (100 + 10, 0)
    twice = [Edge(source="a", targets=["c", "d"], bytes=100, gradient_bytes=10)]
    # c's part of the gradient waits beside what arrives
    assert apart("xxxy", twice) == (100 + 10 + 10, 0)


def test_what_is_sent_is_in_its_layers_workspace_and_then_stays_until_the_pass_is_over():
    last = [Edge(source="c", targets=["d"], bytes=100, gradient_bytes=10)]
    assert apart("xxxy", last, forward_workspace_bytes={"c": 130}) == (130 + 10, 0)
    first = [Edge(source="a", targets=["d"], bytes=100, gradient_bytes=10)]
    assert apart("xxxy", first, forward_workspace_bytes={"a": 130, "b": 7, "c": 40}) == (
        140 + 10,
        0,
    )
    # Kept by b, it waits no more, and counts as what is kept does.
    kept = [Edge(source="a", targets=["b", "d"], bytes=100, gradient_bytes=10, saved_by=("b",))]
    sizes = {"forward_workspace_bytes": {"a": 130, "c": 40}, "saved_bytes": {"c": 1}}
    assert apart("xxxy", kept, **sizes) == (141 + 10, 0)


def test_the_rest_of_a_storage_is_held_while_a_slice_of_it_waits_for_the_reader_before():
    # f's part of the gradient of a's value, 10, is a slice of a storage of 10 + 7; b's is added
    # when b has run.
    read = {
        "source": "a",
        "targets": ["b", "f"],
        "bytes": 0,
        "gradient_bytes": 10,
        "retained_bytes": 7,
    }
    whole = [Edge(**read)]
    sizes = {"backward_workspace_bytes": {"c": 3, "e": 2}}
    assert memory("xxxxxx", whole, **sizes).total_bytes == 10 + 7 + 3
    assert memory("xxyyyx", whole, backward_workspace_bytes={"b": 3}).total_bytes == 10 + 7 + 3
    # y's part comes when b has run there
    assert memory("xyxyyx", whole, **sizes).total_bytes == 10 + 7 + 3
    assert memory("yxxyyx", whole, **sizes).total_bytes == 10 + 7 + 3
    # A copy of the slice leaves for a's device, and what is a slice no more waits there.
    assert memory("xxxxxy", whole, **sizes).total_bytes == 10 + 3
    assert memory("yyxyxx", whole, **sizes).total_bytes == 0 + 3
    # e made the rest, whose gradient counts for itself until e has run; then all of it is held for
    # f's.
    later = [Edge(**read, retained_until="e")]
    assert memory("xxxxxx", later, **sizes).total_bytes == 10 + 7 + 3
    assert (
        memory("xxxxxx", later, backward_workspace_bytes={"e": 30, "d": 3}).total_bytes == 10 + 30
    )


def test_a_gradient_of_tied_parameters_waits_from_the_last_layer_that_has_them_to_the_first():
    tied = {
        "colocated": [("a", "c", "d")],
        "tied": [{"layers": ("a", "c", "d"), "gradient_bytes": 10}],
    }
    assert memory("xxxx", [], backward_workspace_bytes={"b": 3}, **tied).total_bytes == 10 + 3
    assert (
        memory("xyxx", [], backward_workspace_bytes={"d": 9, "c": 1}, **tied).total_bytes == 10 + 1
    )
    assert memory("xyxx", [], backward_workspace_bytes={"d": 30}, **tied).total_bytes == 30
    # e runs backwards before
    assert memory("xyxxx", [], backward_workspace_bytes={"e": 5}, **tied).total_bytes == 10


def test_a_device_without_layers_holds_nothing():
    assert memory("yyyy", skip(), saved_bytes={"a": 5}).total_bytes == 0
