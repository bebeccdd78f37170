"""What docker compose starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

FILE = Path(__file__).parents[2] / "docker" / "compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]
UNITS = {"": 1, "g": 2**30}


def default_bytes(text):
    """The default of ``${NAME:-4g}``."""
    number, unit = re.fullmatch(r"\$\{\w+:-(\d+)(g?)\}", text).groups()
    return int(number) * UNITS[unit]


@pytest.mark.parametrize("name", ["solver", "gpu"])
def test_workers_stay_below_the_memory_of_their_container(name):
    # Each could take as much as the container has: one solve too large had the kernel choose what
    # to kill.
    given = SERVICES[name]["environment"]
    workers = default_bytes(given["PLACER_WORKERS"]) * default_bytes(
        given["PLACER_WORKER_MEMORY_BYTES"]
    )
    assert workers + 2**29 <= default_bytes(SERVICES[name]["mem_limit"])


@pytest.mark.parametrize("name", ["solver", "gpu"])
def test_threads_of_large_machines_fit(name):
    # A process that loads numpy or torch starts a thread for each core, of which there may be 256.
    assert SERVICES[name]["pids_limit"] >= 8 * 256


def test_the_file_of_keys_can_be_read_by_the_user_of_the_image():
    # It told to make it with a mode of 600, under which the service, a user of its own, does not
    # start.
    assert "umask" not in FILE.read_text()
