"""``python -m benchmarks.profiler MODEL PATH``: one job, its samples written to a file (``-``:
printed).
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from . import jobs

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    jobs.work(sys.argv[1], Path(sys.argv[2]))
