"""Prometheus metrics: gaps, measured graphs and the state of the GPUs."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import stat

import pytest

from placer_server.observability import gpus
from placer_server.observability.gpus import record_gpus, watch_gpus
from placer_server.observability.metrics import Metrics
from placer_server.openapi import examples
from placer_server.workers.solving import default_solver

SAID = """GPU-1, NVIDIA H200, 1024, 143771, 37, 41
GPU-2, NVIDIA H200, [N/A], 143771, [N/A], 40
a line that is none
"""


def sample(metrics, what, /, **labels):
    return metrics.registry.get_sample_value(what, labels)


def test_the_state_of_each_gpu_is_told_in_bytes_shares_and_degrees():
    metrics = Metrics()
    record_gpus(metrics, SAID)
    one = {"uuid": "GPU-1", "name": "NVIDIA H200"}
    assert sample(metrics, "placer_gpu_memory_used_bytes", **one) == 2**30
    assert sample(metrics, "placer_gpu_memory_bytes", **one) == 143771 * 2**20
    assert sample(metrics, "placer_gpu_busy", **one) == pytest.approx(0.37)
    assert sample(metrics, "placer_gpu_celsius", **one) == 41


def test_what_a_gpu_does_not_say_is_left_out():
    metrics = Metrics()
    record_gpus(metrics, SAID)
    assert sample(metrics, "placer_gpu_celsius", uuid="GPU-2", name="NVIDIA H200") == 40
    assert sample(metrics, "placer_gpu_busy", uuid="GPU-2", name="NVIDIA H200") is None
    assert sample(metrics, "placer_gpu_busy", uuid="GPU-1", name="NVIDIA H200") is not None


def test_a_gpu_that_is_gone_is_told_no_more():
    metrics = Metrics()
    record_gpus(metrics, SAID)
    record_gpus(metrics, "")
    assert "GPU-1" not in metrics.render().decode()


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return ``program(script)``, which puts an ``nvidia-smi`` on the path."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpus, "EVERY_S", 0.05)

    def make(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    return make


async def watch(metrics, until):
    task = asyncio.create_task(watch_gpus(metrics))
    async with asyncio.timeout(20):
        while not until():
            await asyncio.sleep(0.01)
    task.cancel()


def test_nvidia_smi_is_asked_again_and_again(program, tmp_path):
    program(f"echo once >> {tmp_path}/asked; echo 'GPU-1, A, 1, 2, 3, 4'")
    metrics = Metrics()
    asyncio.run(
        watch(
            metrics,
            lambda: (tmp_path / "asked").exists() and len((tmp_path / "asked").read_text()) > 9,
        )
    )
    assert sample(metrics, "placer_gpu_celsius", uuid="GPU-1", name="A") == 4


def test_an_nvidia_smi_that_fails_leaves_no_old_state(program, caplog):
    program("exit 9")
    metrics = Metrics()
    record_gpus(metrics, SAID)
    asyncio.run(watch(metrics, lambda: "GPU-1" not in metrics.render().decode()))


def test_one_that_is_asked_while_the_service_ends_leaves_nothing_behind(program, tmp_path):
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    # the sleep is a child of its own
    program(f"exec 3> {tmp_path}/alive; echo here >&3; sleep 60")
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    asyncio.run(watch(Metrics(), lambda: poll.poll(0)))
    gc.collect()  # a pipe that outlived its loop would complain
    assert os.read(alive, 9) == b"here\n"
    assert poll.poll(20_000), "what nvidia-smi started runs on"
    assert os.read(alive, 9) == b""  # the kernel has closed it for each of them
    os.close(alive)


def test_gaps_and_measured_graphs_are_counted(serve, request_body):
    client = serve(default_solver)
    client.post("/v1/placements?wait=60", json=request_body())
    graph = examples.graphs()["one layer"]["value"]
    client.post("/v1/profiles?wait=60", json=graph)
    text = client.get("/metrics").text
    assert "placer_solve_gap_count 1.0" in text
    assert 'placer_profiles_total{status="answered"} 1.0' in text
