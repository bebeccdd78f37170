from __future__ import annotations

from collections.abc import Callable
from typing import Any

import on_hosts
import pytest
import torch.multiprocessing as processes
from started import spawn

import placer
from placer.errors import InputError
from placer.schema import PlacementRequest, Profile

Told = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What a script of ``on_hosts`` returned, by rank."""
    results = processes.get_context("forkserver").SimpleQueue()
    store = tmp_path_factory.mktemp("gather") / "store"
    # raises what a process did not expect
    spawn(on_hosts.play, (str(store), results), nprocs=2)
    found = dict(results.get() for _ in range(2))
    return lambda script: [found[rank][script] for rank in (0, 1)]


def test_two_hosts_with_unlike_devices_make_one_profile(told: Told) -> None:
    first, second = told("unlike")
    assert first == second
    found = Profile.model_validate_json(first)
    assert set(found.layers[0].forward_ms) == {"fast", "slow"}
    assert found.cluster is not None
    assert [(device.name, device.type) for device in found.cluster.devices] == [
        ("node7/cpu:0", "fast"),
        ("node7/cpu:1", "fast"),
        ("node9/cpu:0", "slow"),
        ("node9/cpu:1", "slow"),
    ]
    assert len(found.cluster.links) == 4 * 3
    across = found.cluster.link("node7/cpu:0", "node9/cpu:1")
    assert across is not None and across.bandwidth_bytes_per_s > 0
    assert placer.solve(PlacementRequest(profile=found)).status == "optimal"


def test_processes_of_one_host_measure_it_once(told: Told) -> None:
    (count, text), (other_count, other_text) = told("together")
    assert (count, other_count) == (1, 0)
    assert text == other_text
    cluster = Profile.model_validate_json(text).cluster
    assert cluster is not None
    assert [device.name for device in cluster.devices] == ["cpu:0"]


def test_what_goes_wrong_on_one_host_is_told_on_all(told: Told) -> None:
    message = "ProfilingError: host node9 could not measure: RuntimeError: no GPU left"
    assert told("failing") == [message, message]


def test_a_network_that_changes_bytes_is_refused_on_all_hosts(told: Told) -> None:
    first, second = told("spoilt")
    assert first == second
    assert first.startswith("ProfilingError: the network node7 -> node9 changes bytes: 5 of")


def test_without_torch_distributed_it_says_what_to_start() -> None:
    with pytest.raises(InputError, match="run under torchrun"):
        placer.gather_profile(lambda: pytest.fail("measured"))
