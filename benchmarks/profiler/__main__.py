"""The command line of one job: ``python -m benchmarks.profiler MODEL PATH``.

It writes the job's samples to the file, or prints them if the path is ``-``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from . import jobs

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    jobs.work(sys.argv[1], Path(sys.argv[2]))
