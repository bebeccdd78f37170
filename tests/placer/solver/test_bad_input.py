"""Bad input fails before anything is solved, and names the field and the value."""

import math

import pytest

from placer.errors import InputError
from placer.schema import PlacementRequest, Profile
from placer.solver.solve import solve


def question(edit=lambda asked: None, **constraints):
    """Two layers, a value between them, two linked devices.

    As data, so that anything can be wrong.
    """
    layer = {"forward_ms": {"t": 1.0}, "backward_ms": {"t": 2.0}}
    asked = {
        "profile": {
            "training": True,
            "layers": [{"name": "a", **layer}, {"name": "b", **layer}],
            "edges": [{"source": "a", "targets": ["b"], "bytes": 5, "gradient_bytes": 5}],
        },
        "cluster": {
            "devices": [{"name": name, "type": "t", "memory_bytes": 100} for name in ("x", "y")],
            "links": [
                {"source": a, "target": b, "bandwidth_bytes_per_s": 1e3}
                for a, b in (("x", "y"), ("y", "x"))
            ],
        },
        "constraints": constraints,
    }
    edit(asked)
    return asked


def setting(value, *path):
    """Return an edit that puts a value where a path leads."""

    def edit(asked):
        for key in path[:-1]:
            asked = asked[key]
        asked[path[-1]] = value

    return edit


def test_more_bytes_than_can_be_placed_are_answered_with_what_to_change():
    # It ended at '1 micro-batches; no more than 2**60 can be placed'.
    asked = PlacementRequest.model_validate(
        question(setting(2**60, "profile", "edges", 0, "bytes"))
    )
    with pytest.raises(InputError, match=r"with 1 micro-batch; .* give fewer or smaller micro-b"):
        solve(asked)


LAYER, DEVICE, LINK = (("profile", "layers", 0), ("cluster", "devices", 1), ("cluster", "links", 0))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            setting(math.nan, *LAYER, "forward_ms", "t"),
            ["profile.layers.0.forward_ms.t", "finite", "NaN"],
        ),
        (
            setting(math.inf, *LAYER, "backward_ms", "t"),
            ["profile.layers.0.backward_ms.t", "finite", "Infinity"],
        ),
        (
            setting(math.nan, *LINK, "bandwidth_bytes_per_s"),
            ["cluster.links.0.bandwidth_bytes_per_s", "NaN"],
        ),
        (
            setting(-1.0, *LAYER, "forward_ms", "t"),
            ["profile.layers.0.forward_ms.t", "greater than or equal", "-1.0"],
        ),
        (setting(-7, *LAYER, "param_bytes"), ["profile.layers.0.param_bytes", "-7"]),
        (setting(-5, "profile", "edges", 0, "bytes"), ["profile.edges.0.bytes", "-5"]),
        (
            setting(0.0, *LINK, "bandwidth_bytes_per_s"),
            ["cluster.links.0.bandwidth_bytes_per_s", "greater than 0"],
        ),
        (setting(-1e-6, *LINK, "latency_s"), ["cluster.links.0.latency_s", "-1e-06"]),
        (setting("fast", *DEVICE, "type"), ["layer 'a' has no forward_ms for device type 'fast'"]),
        (setting({}, *LAYER, "backward_ms"), ["layer 'a' has no backward_ms for device type 't'"]),
        (
            setting(101, *DEVICE, "reserve_bytes"),
            ["cluster.devices.1", "memory_bytes 100 is below reserve_bytes 101"],
        ),
        (
            setting([], "cluster", "links"),
            ["cluster.links", "device 'x' has no link with any other device"],
        ),
        (setting("z", *LINK, "target"), ["link 'x' -> 'z': there is no device 'z'"]),
    ],
)
def test_a_number_that_is_none_or_a_device_that_is_out_of_reach_is_refused(edit, words):
    with pytest.raises(InputError) as refused:
        PlacementRequest.model_validate(question(edit))
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("targets", "until", "words"),
    [
        (
            ["c"],
            "",
            "edge from 'a': retained_bytes is for values that two layers read or more; "
            "leave it out",
        ),
        (
            ["b", "d"],
            "b",
            "edge from 'a': retained_until names 'b', which does not run after the last target "
            "but one",
        ),
        (["b", "d"], "e", "retained_until names 'e'"),
        (["b", "d"], "z", "edge from 'a': retained_until: there is no layer 'z'"),
    ],
)
def test_a_rest_beside_a_slice_that_cannot_be_is_refused(targets, until, words):
    edge = {"source": "a", "targets": targets, "bytes": 5, "retained_bytes": 7}
    content = {"layers": [{"name": name, "forward_ms": {"t": 1.0}} for name in "abcde"]}
    assert Profile.model_validate(
        content | {"edges": [edge | {"targets": ["b", "d"], "retained_until": "c"}]}
    )
    with pytest.raises(InputError) as refused:
        Profile.model_validate(content | {"edges": [edge | {"retained_until": until}]})
    assert words in str(refused.value)


def test_layers_that_share_parameters_are_colocated():
    layers = [{"name": name, "forward_ms": {"t": 1.0}} for name in "abc"]
    content = {"layers": layers, "tied": [{"layers": ["a", "c"], "gradient_bytes": 5}]}
    assert Profile.model_validate(content | {"colocated": [["a", "b", "c"]]})
    with pytest.raises(
        InputError, match="layers 'a', 'c' share parameters; name them together in colocated, too"
    ):
        Profile.model_validate(content | {"colocated": [["a", "b"]]})


def one_way(asked):
    del asked["cluster"]["links"][1]


@pytest.mark.parametrize(
    ("edit", "constraints", "words"),
    [
        (None, {"pinned": {"a": "w"}}, "constraints.pinned: there is no device 'w'"),
        (
            None,
            {"pinned": {"a": "x"}, "forbidden": {"a": ["x"]}},
            "'a' is pinned to 'x', which is forbidden for it",
        ),
        (
            None,
            {"pinned": {"b": "y"}, "forbidden": {"*": ["y"]}},
            "'b' is pinned to 'y', which is forbidden for it",
        ),
        (
            None,
            {"pinned": {"a": "x", "b": "y"}, "colocated": [["a", "b"]]},
            "colocated layers are pinned apart, 'a' to 'x' and 'b' to 'y'",
        ),
        (
            setting([["a", "b"]], "profile", "colocated"),
            {"pinned": {"a": "x", "b": "y"}},
            "colocated layers are pinned apart, 'a' to 'x' and 'b' to 'y'",
        ),
        (
            one_way,
            {"pinned": {"a": "y", "b": "x"}},
            "'b' reads on 'x', but cluster.links has no link from 'y' to 'x'",
        ),
        (
            one_way,
            {"pinned": {"a": "x", "b": "y"}},
            "'b' reads on 'y', but cluster.links has no link from 'y' to 'x'",
        ),
    ],
)
def test_pins_that_contradict_another_rule_by_themselves_are_refused(edit, constraints, words):
    with pytest.raises(InputError) as refused:
        PlacementRequest.model_validate(question(edit or (lambda asked: None), **constraints))
    assert "constraints.pinned" in str(refused.value) and words in str(refused.value)


def test_a_gradient_needs_a_link_back_in_training_alone():
    request = question(one_way, pinned={"a": "x", "b": "y"}) | {"training": False}
    assert PlacementRequest.model_validate(request).constraints.pinned == {"a": "x", "b": "y"}


def test_one_device_needs_no_link():
    def alone(asked):
        asked["cluster"] = {"devices": asked["cluster"]["devices"][:1]}

    assert len(PlacementRequest.model_validate(question(alone)).devices) == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"bandwidth_bytes_per_s": 1e-300},
            "5 bytes of layer 'a' would take 5e+303 ms over link 'x' -> 'y'",
        ),
        (
            {"bandwidth_bytes_per_s": 1e-320},
            "5 bytes of layer 'a' would take inf ms over link 'x' -> 'y'",
        ),
        ({"bandwidth_bytes_per_s": 1.0, "latency_s": 1e6}, "latency_s = 1e+06"),
    ],
)
@pytest.mark.parametrize("objective", ["throughput", "latency", "memory", "step"])
def test_a_link_over_which_a_value_takes_longer_than_any_layer_may_is_refused(
    values, words, objective
):
    asked = question(pinned={"a": "x", "b": "y"})
    asked["cluster"]["links"][0].update(values)
    with pytest.raises(InputError) as refused:
        solve(PlacementRequest.model_validate(asked | {"objective": objective}))
    assert words in str(refused.value) and "no more than 1e9" in str(refused.value)


def test_a_link_without_bandwidth_is_refused_though_values_are_empty():
    asked = question(setting(0, "profile", "edges", 0, "bytes"))
    asked["profile"]["edges"][0]["gradient_bytes"] = 0
    asked["cluster"]["links"][0]["bandwidth_bytes_per_s"] = 1e-320
    with pytest.raises(InputError, match="link 'x' -> 'y'"):
        solve(PlacementRequest.model_validate(asked))
