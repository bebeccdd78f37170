from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from placer_server.node.cluster import NodeCluster
from placer_server.problem import Problem
from placer_server.settings import Settings


def test_the_cluster_is_measured_once_and_kept(solvers):
    async def twice():
        cluster = NodeCluster(Settings(), solvers.cluster_of_one)
        return await asyncio.gather(cluster.get(), cluster.get())

    one, other = asyncio.run(twice())
    assert one is other
    assert b"cpu:0" in one


def test_without_torch_the_cluster_is_501_and_says_what_to_install(solvers):
    with pytest.raises(Problem, match="pip install") as caught:
        asyncio.run(NodeCluster(Settings(), solvers.cluster_without_torch).get())
    assert caught.value.status == 501


def test_a_measurement_that_fails_is_503_and_can_be_asked_again(solvers, capfd):
    with pytest.raises(Problem, match="no driver") as caught:
        asyncio.run(NodeCluster(Settings(), solvers.cluster_that_fails).get())
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "10"})


def test_the_service_imports_neither_torch_nor_the_profiler_nor_the_client():
    code = (
        "import sys, placer_server.app\n"
        "from placer_server.settings import Settings\n"
        "placer_server.app.create_app(Settings(database=':memory:')).openapi()\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'ortools', 'placer_client')"
        " or m.startswith('placer.profiler')])"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
