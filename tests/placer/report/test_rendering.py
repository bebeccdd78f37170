from __future__ import annotations

import itertools

import pytest

from placer.report import explain
from placer.report.page import html_report
from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.solve import solve

NAMES = ("first:x:", "second[red]", "third[/red]", ":smile:")


@pytest.fixture
def profile() -> Profile:
    """A chain whose names look like rich's markup and emoji, as keys of a ModuleDict may."""
    edges = [
        Edge(source=one, targets=(other,), bytes=8) for one, other in itertools.pairwise(NAMES)
    ]
    devices = [Device(name=f":x:{n}[/b]", type="t", memory_bytes=1000) for n in range(2)]
    links = [
        Link(source=one.name, target=other.name, bandwidth_bytes_per_s=1e9)
        for one, other in (devices, devices[::-1])
    ]
    return Profile(
        layers=tuple(Layer(name=name, forward_ms={"t": 1.0}) for name in NAMES),
        edges=tuple(edges),
        cluster=Cluster(devices=tuple(devices), links=tuple(links)),
    )


def test_names_that_look_like_markup_are_shown_as_they_are(profile: Profile) -> None:
    """Rich took ``[/red]`` for a closing tag without an opening one, and raised a MarkupError."""
    placement = solve(PlacementRequest(profile=profile))
    shown = explain(profile)
    assert all(name in shown for name in NAMES)
    for subject in (profile, placement):
        assert ":x:1[/b]" in explain(subject) and ":x:1[/b]" in html_report(subject)
