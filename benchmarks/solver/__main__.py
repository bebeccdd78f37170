"""One case in this process: ``python -m benchmarks.solver CASE`` prints its row as JSON."""

from __future__ import annotations

import json
import sys

from . import cases

if __name__ == "__main__":
    print(json.dumps(cases.every()[sys.argv[1]].row()))
