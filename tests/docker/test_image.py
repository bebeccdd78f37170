"""What the image leaves out is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DOCKER = Path(__file__).parents[2] / "docker"


def test_placements_are_solved_with_what_stands_in_for_pandas():
    code = (
        "import pandas\n"
        "from placer.schema import PlacementRequest\n"
        "from placer.solver.solve import solve\n"
        "from placer_server.openapi import examples\n"
        "requests = [PlacementRequest.model_validate(one['value']) for one in examples.requests().values()]\n"
        "print(pandas.__file__, *(solve(request).status for request in requests))"
    )
    given = {**os.environ, "PYTHONPATH": str(DOCKER / "without")}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, env=given)
    assert done.stdout.split() == [str(DOCKER / "without" / "pandas.py"), "optimal", "optimal", "infeasible"], (
        done.stderr
    )


def test_the_image_has_every_folder_that_its_build_copies():
    copied = [line.split()[1] for line in (DOCKER / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")]
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    for source in copied:
        if source.startswith("docker/"):
            assert f"!{source}" in allowed
            assert (DOCKER.parent / source).exists()
