"""What the process that others are forked from has imported: the same for all that a test process
starts.

Python has one such process for each that starts others, and who first starts one says what it
imports. The service's workers need the solver and processes of ranks torch; where the others came
first, each would import its own anew: half a second for every solve, three for every rank."""

from __future__ import annotations

import sys
from multiprocessing import forkserver

SOLVER = ["placer_server.workers.solving", "placer.solver.solve"]
SERVICE = "placer_server.app"
# the first as soon as there is an optimizer
MEASURING = ["torch._dynamo", "placer.profiler.remote.replay"]
TORCH = [
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "placer.distributed",
    "placer.zoo",
]

# New containers between two collections, and collections of each generation between two of the next
# older one. Tracing a model makes so many objects that Python's default, 700 containers, takes a
# tenth of a test's time.
COLLECTIONS = (10_000, 20, 20)


def share() -> None:
    """Whoever starts such a process, let it import what any of them needs; torch and the service if
    they are here."""
    if forkserver.set_forkserver_preload is not _everything:
        forkserver.set_forkserver_preload = _everything


def _everything(names: list[str]) -> None:
    torch = [*MEASURING, *TORCH] if "torch" in sys.modules else []
    service = [SERVICE] if SERVICE in sys.modules else []
    forkserver._forkserver.set_forkserver_preload(
        list(dict.fromkeys([*names, *SOLVER, *torch, *service]))
    )
