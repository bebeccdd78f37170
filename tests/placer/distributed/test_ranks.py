from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.distributed.ranks import Process, refuse_missing_gpus, seats
from placer.errors import PlacementError


def nodes(*sizes: int, host: str = "node{}") -> list[Process]:
    """Processes as torchrun starts them: node by node."""
    return [
        Process(host.format(node), node, local)
        for node, size in enumerate(sizes)
        for local in range(size)
    ]


def test_on_one_host_a_device_belongs_to_the_process_of_its_number() -> None:
    given = seats(["cuda:2", "cuda:0", "cuda:3", "cuda:1"], nodes(4))
    assert [seat.local for seat in given] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_devices_that_are_left_out_leave_no_process_without_one() -> None:
    given = seats(["cuda:6", "cuda:1"], nodes(2))
    assert [seat.local for seat in given] == ["cuda:1", "cuda:6"]


def test_hosts_are_matched_with_nodes_by_name() -> None:
    given = seats(["beta/cuda:0", "alpha/cuda:0", "beta/cuda:1"], [
        Process("beta", 0, 0), Process("beta", 0, 1), Process("alpha", 1, 0),
    ])  # fmt: skip
    assert [seat.device for seat in given] == ["beta/cuda:0", "beta/cuda:1", "alpha/cuda:0"]
    assert [seat.local for seat in given] == ["cuda:0", "cuda:1", "cuda:0"]


def test_hosts_of_other_names_are_matched_in_order_with_numbers_counted_as_numbers() -> None:
    devices = [f"host{host}/cuda:{index}" for host in (10, 2) for index in (1, 0)]
    given = seats(devices, nodes(2, 2))
    assert [seat.device for seat in given] == [
        "host2/cuda:0",
        "host2/cuda:1",
        "host10/cuda:0",
        "host10/cuda:1",
    ]


def test_two_nodes_on_one_machine_are_two_hosts() -> None:
    given = seats(["host0/cuda:0", "host1/cuda:1"], nodes(1, 1, host="machine"))
    assert [seat.local for seat in given] == ["cuda:0", "cuda:1"]


def test_devices_without_hosts_are_counted_through_several_nodes() -> None:
    given = seats([f"cuda:{index}" for index in range(4)], nodes(2, 2))
    assert [(seat.device, seat.local) for seat in given] == [
        ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("cuda:2", "cuda:0"), ("cuda:3", "cuda:1"),
    ]  # fmt: skip


def test_replicas_side_by_side_on_a_node_take_the_devices_of_their_processes() -> None:
    replica = [Process("node", 0, local) for local in (2, 3)]
    assert [seat.local for seat in seats(["cuda:0", "cuda:1"], replica)] == ["cuda:2", "cuda:3"]
    assert [seat.local for seat in seats(["host/cuda:1", "host/cuda:0"], replica)] == [
        "cuda:2",
        "cuda:3",
    ]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_every_process_gets_a_device_of_its_own_node(sizes: list[int], random: object) -> None:
    devices = [
        f"node{node}/cuda:{index}" for node, size in enumerate(sizes) for index in range(size)
    ]
    random.shuffle(devices)  # type: ignore[attr-defined]
    processes = nodes(*sizes)
    given = seats(devices, processes)
    assert sorted(seat.device for seat in given) == sorted(devices)
    assert all(
        seat.device.startswith(process.host) for seat, process in zip(given, processes, strict=True)
    )


@pytest.mark.parametrize(
    ("devices", "processes", "message"),
    [
        (["cuda:0", "cuda:1"], nodes(3), "uses 2 devices .*the group has 3 processes: start 2"),
        (["a/cuda:0", "b/cuda:0"], nodes(2), "made for 2 hosts .*run on 1 node "),
        (
            ["a/cuda:0", "a/cuda:1", "b/cuda:0"],
            nodes(1, 2),
            "2 devices of host 'a' .*node 0 has 1 process:",
        ),
    ],
)
def test_too_many_or_too_few_processes_are_named(
    devices: list[str], processes: list[Process], message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        seats(devices, processes)


def test_a_device_without_a_host_among_those_with_one_is_named() -> None:
    with pytest.raises(
        PlacementError, match="host of some devices, and none of 'cuda:1': name it as a/cuda:1"
    ):
        seats(["a/cuda:0", "cuda:1"], nodes(2))


def test_a_gpu_that_a_process_does_not_see_is_named_with_the_process() -> None:
    given = seats(["cuda:0", "cuda:1", "cuda:2"], nodes(3))
    refuse_missing_gpus(given, [3, 3, 3])
    with pytest.raises(
        PlacementError, match="process 2 is given 'cuda:2', its cuda:2, and sees 2 GPUs"
    ):
        refuse_missing_gpus(given, [2, 2, 2])
    refuse_missing_gpus(seats(["cpu:0", "cpu:1"], nodes(2)), [0, 0])
