from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import placer
from placer.errors import ProfileError
from placer.profiler.merge import merge_profiles
from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile, Rate

GIB = 2**30


def cluster(
    kind: str, host: str, names: tuple[str, ...] = ("cuda:0", "cuda:1"), **ports: Rate
) -> Cluster:
    return Cluster(
        devices=tuple(
            Device(name=name, type=kind, memory_bytes=GIB, host=host, **ports) for name in names
        ),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=1e11, latency_s=1e-5)
            for a in names
            for b in names
            if a != b
        ),
    )


def profile(
    kind: str = "H200", host: str = "node1", factor: float = 1.0, **changes: Any
) -> Profile:
    layers = tuple(
        Layer(
            name=name,
            forward_ms={kind: factor * time},
            backward_ms={kind: 2 * factor * time},
            param_bytes=100,
            saved_bytes=int(10 * factor),
        )
        for name, time in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    )
    edges = (
        Edge(source="a", targets=("b", "c"), bytes=8, saved_by=("b",) if factor == 1 else ("a",)),
        Edge(source="b", targets=("c",), bytes=8),
    )
    fields: dict[str, Any] = {
        "model": "Net",
        "graph_hash": "same",
        "training": True,
        "optimizer": "Adam",
        "batch_size": 4,
        "layers": layers,
        "edges": edges,
        "cluster": cluster(kind, host),
        "versions": {"torch": "2.11", "python": "3.12"},
    }
    return Profile(**fields | changes)


def test_what_is_no_profile_is_named() -> None:
    with pytest.raises(
        ProfileError, match="profile 2 is a str; give each as an argument of its own, a Profile"
    ):
        merge_profiles(profile(), "b.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [[], [profile(), profile()], (profile(),)])
def test_profiles_in_a_list_are_arguments_with_a_star(given: Any) -> None:
    words = (
        r"was given a (list|tuple); give each profile as an argument of its own: "
        r"merge_profiles\(\*profiles\)"
    )
    with pytest.raises(ProfileError, match=words):
        merge_profiles(given)


def test_unlike_devices_have_their_own_times() -> None:
    merged = merge_profiles(profile("H200"), profile("A100", "node2", 3.0))
    assert merged.layers[1].forward_ms == {"A100": 6.0, "H200": 2.0}
    assert merged.layers[1].backward_ms == {"A100": 12.0, "H200": 4.0}


def test_the_slower_time_of_one_type_and_the_larger_memory_count() -> None:
    merged = merge_profiles(profile(factor=1.5), profile(factor=1.0))
    assert [layer.forward_ms["H200"] for layer in merged.layers] == [1.5, 3.0, 4.5]
    assert {layer.saved_bytes for layer in merged.layers} == {15}


@pytest.mark.parametrize("field", ["recorded_workspace_bytes", "input_grad_workspace_bytes"])
def test_a_workspace_that_was_not_told_apart_is_that_of_an_eager_backward_pass(field: str) -> None:
    def worked(own: int, eager: int) -> Profile:
        made = profile()
        sizes = {field: own, "backward_workspace_bytes": eager}
        return made.model_copy(
            update={"layers": tuple(layer.model_copy(update=sizes) for layer in made.layers)}
        )

    for own, others, merged in ((5, 0, 9), (12, 0, 12), (5, 7, 7), (0, 0, 0)):
        found = merge_profiles(worked(own, 6), worked(others, 9))
        assert {getattr(layer, field) for layer in found.layers} == {merged}


def test_the_larger_share_of_an_optimizers_step_counts() -> None:
    gpu = profile("A100", "node2", optimizer_workspace_ratio=1.0)
    assert merge_profiles(profile(), gpu).optimizer_workspace_ratio == 1.0


def test_a_value_is_kept_where_any_type_of_device_keeps_it() -> None:
    merged = merge_profiles(profile(), profile("A100", "node2", 2.0))
    assert merged.edges[0].saved_by == ("a", "b")


def test_the_larger_rest_beside_a_slice_of_a_gradient_counts() -> None:
    first, *others = profile().edges
    rests = ((8, "c"), (16, "c"))
    parts = [
        first.model_copy(update={"retained_bytes": size, "retained_until": until})
        for size, until in rests
    ]
    merged = merge_profiles(*(profile(edges=(part, *others)) for part in parts))
    assert (merged.edges[0].retained_bytes, merged.edges[0].retained_until) == (16, "c")


def test_devices_of_several_hosts_are_named_after_them() -> None:
    merged = merge_profiles(profile("H200", "node1"), profile("H200", "node2")).cluster
    assert merged is not None
    assert [device.name for device in merged.devices] == [
        "node1/cuda:0",
        "node1/cuda:1",
        "node2/cuda:0",
        "node2/cuda:1",
    ]
    assert {(link.source[:5], link.target[:5]) for link in merged.links} == {
        ("node1", "node1"),
        ("node2", "node2"),
    }


def test_devices_of_one_host_keep_their_names() -> None:
    both = merge_profiles(
        profile(), profile("A100", cluster=cluster("A100", "node1", ("cuda:2", "cuda:3")))
    ).cluster
    assert both is not None
    assert [device.name for device in both.devices] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_a_network_joins_the_devices_of_different_hosts_by_way_of_their_memories() -> None:
    ports = {
        "to_host": Rate(bandwidth_bytes_per_s=5e10, latency_s=1e-5),
        "from_host": Rate(bandwidth_bytes_per_s=2.5e10, latency_s=2e-5),
    }
    first = profile("H200", "node1", cluster=cluster("H200", "node1", **ports))
    second = profile("A100", "node2", 2.0, cluster=cluster("A100", "node2", **ports))
    both = merge_profiles(
        first, second, network=Rate(bandwidth_bytes_per_s=1e10, latency_s=1e-4)
    ).cluster
    assert both is not None
    assert len(both.links) == 4 * 3
    link = both.link("node1/cuda:0", "node2/cuda:1")
    assert link is not None
    size = 10**9
    seconds = 1e-5 + size / 5e10 + 1e-4 + size / 1e10 + 2e-5 + size / 2.5e10
    assert link.transfer_ms(size) == pytest.approx(1e3 * seconds, rel=1e-3)


def test_each_direction_of_a_network_may_have_its_own_rate() -> None:
    network = {("node1", "node2"): Rate(bandwidth_bytes_per_s=1e9)}
    both = merge_profiles(
        profile("H200", "node1"), profile("H200", "node2"), network=network
    ).cluster
    assert both is not None
    assert both.link("node1/cuda:0", "node2/cuda:0") is not None
    assert both.link("node2/cuda:0", "node1/cuda:0") is None


def test_merging_three_is_merging_two_and_then_the_third() -> None:
    each = [profile("H200", "n1"), profile("A100", "n2", 2.0), profile("L4", "n3", 5.0)]
    assert merge_profiles(*each) == merge_profiles(merge_profiles(*each[:2]), each[2])


def test_one_profile_alone_stays_as_it_is() -> None:
    assert merge_profiles(profile()) == profile()


def test_a_merged_profile_can_be_placed_on_all_its_devices() -> None:
    merged = merge_profiles(
        profile("H200"),
        profile("A100", "node2", 2.0),
        network=Rate(bandwidth_bytes_per_s=1e12, latency_s=0.0),
    )
    placement = placer.solve(
        PlacementRequest(profile=Profile.model_validate_json(merged.to_json()))
    )
    # 18 ms of work on fast devices: c alone takes 9, and the rest, wherever it is, need take no
    # longer. and 0.01 ms of latency
    assert placement.objective_value == pytest.approx(9.0, abs=0.011)
    assert placement.layer_devices["c"].startswith("node1/")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 8}, "profile 2 has batch_size 8, the first 4"),
        ({"optimizer": "SGD"}, "profile 2 has optimizer 'SGD', the first 'Adam'"),
        ({"graph_hash": "other"}, "profile 2 is of another graph than the first"),
        (
            {"layers": profile().layers[:2], "edges": ()},
            "other layers than the first, 'c' among them",
        ),
        ({"edges": profile().edges[:1]}, "profile 2 has other values between its layers"),
        (
            {
                "layers": tuple(
                    layer.model_copy(update={"param_bytes": 99}) for layer in profile().layers
                )
            },
            "layer 'a' has param_bytes 99 in profile 2, 100 in the first",
        ),
        (
            {"cluster": cluster("L4", "node1")},
            "device 'cuda:0' is a 'H200' in one profile, a 'L4' in another",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        merge_profiles(profile(), profile(**changes))


def test_another_version_of_torch_may_write_the_same_graph_in_other_words() -> None:
    other = profile("A100", "node2", graph_hash="other", versions={"torch": "2.12"})
    assert merge_profiles(profile(), other).versions == {"python": "3.12", "torch": "2.11, 2.12"}


def test_profiles_that_were_measured_can_be_merged() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)
    first, second = (
        placer.profile(model, x, [device], progress=False, repeats=1)
        for device in ("cpu:0", "cpu:1")
    )
    merged = placer.merge_profiles(first, second)
    assert merged.cluster is not None
    assert [device.name for device in merged.cluster.devices] == ["cpu:0", "cpu:1"]
    assert merged.edges == first.edges
