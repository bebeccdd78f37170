"""``python -m benchmarks.solver CASE``: one case in this process, its row printed as JSON."""

from __future__ import annotations

import json
import sys

from . import cases

if __name__ == "__main__":
    print(json.dumps(cases.every()[sys.argv[1]].row()))
