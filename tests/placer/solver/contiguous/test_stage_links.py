"""The stage-prefix form over links that are not all alike."""

from dataclasses import replace

import pytest
from enumeration import brute_force
from hypothesis import assume, given
from small_requests import examples, small_requests

from placer.schema import Cluster, Device, Link
from placer.solver.contiguous import stage_program
from placer.solver.contiguous.stage_program import StageModel, stage_links
from placer.solver.cpsat.runner import Limits
from placer.solver.problem import Problem
from placer.solver.reduce import reduced

SETTINGS = examples(80)


@SETTINGS
@given(request=small_requests(objectives=("throughput",)))
def test_no_assignment_is_below_their_bound(request):
    problem = Problem.from_request(request)
    assume(stage_program.bounds(problem) and not stage_program.applies(problem))
    nodes = reduced(problem)
    assume(all(nodes.allowed))
    best = brute_force(request, True)
    assume(best is not None and best <= 100.0)
    answer = StageModel(problem, nodes, upper=100.0).solve(Limits(60))
    assert not answer.infeasible
    assert answer.bound <= best * (1 + 1e-12)


@pytest.fixture
def on_two_hosts(chain):
    """Six layers on two devices of each of two hosts: 1 ms inside a host, 5 ms between."""
    request = chain([4.0, 4.0, 4.0, 4.0, 4.0, 4.0], value_bytes=1_000)
    hosts = {"a": "one", "b": "one", "c": "two", "d": "two"}
    kind = request.placed_on.devices[0].type
    cluster = Cluster(
        devices=tuple(
            Device(name=name, type=kind, memory_bytes=10**6, host=host)
            for name, host in hosts.items()
        ),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=1e6 if hosts[a] == hosts[b] else 2e5)
            for a in hosts
            for b in hosts
            if a != b
        ),
    )
    return request.model_copy(update={"cluster": cluster})


def test_a_chain_over_two_hosts_is_solved_exactly(on_two_hosts):
    problem = Problem.from_request(on_two_hosts)
    answer = StageModel(problem, reduced(problem), upper=100.0).solve(Limits(60))
    assert answer.bound == pytest.approx(brute_force(on_two_hosts, True), rel=1e-6)


def test_the_way_between_hosts_raises_the_bound(on_two_hosts):
    four = on_two_hosts.constraints.model_copy(update={"min_devices": 4})
    request = on_two_hosts.model_copy(update={"constraints": four})
    problem = Problem.from_request(request)
    links = stage_links(problem)
    whole, quick = (
        StageModel(problem, reduced(problem), 100.0, known).solve(Limits(60)).bound
        for known in (links, replace(links, between=None))
    )
    assert whole == pytest.approx(brute_force(request, True), rel=1e-6)
    assert quick < whole - 0.5
