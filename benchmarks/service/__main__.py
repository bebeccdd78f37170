"""The service with a test solver: ``python -m benchmarks.service SOLVER``.

The solver is from ``benchmarks.service.solvers``; PLACER_ settings configure the service.
"""

from __future__ import annotations

import sys

from placer_server.app import run

from . import solvers

if __name__ == "__main__":
    run(solver=getattr(solvers, sys.argv[1]))
