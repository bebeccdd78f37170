"""``python -m benchmarks.service SOLVER`` serves with one of the solvers of this package, as
PLACER_ settings say.
"""

from __future__ import annotations

import sys

from placer_server.app import run

from . import solvers

if __name__ == "__main__":
    run(solver=getattr(solvers, sys.argv[1]))
