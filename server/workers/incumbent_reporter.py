"""Reports of the best placement during a solve, so that it survives the worker process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from placer.errors import PlacerError

if TYPE_CHECKING:
    from placer.solver.search import Incumbent

# Shortest time between two reports in seconds; of the placements in between, the last is sent.
INTERVAL_S = 0.5

# Largest share of the solve's time that may go into the reports.
TIME_SHARE = 0.05


class IncumbentReporter:
    """Thread that turns incumbents into placements and sends them."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._latest: Incumbent | None = None
        self._new = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def report(self, incumbent: Incumbent) -> None:
        """Send this incumbent, unless a better one arrives first. Any thread may call this."""
        self._latest = incumbent
        self._new.set()

    def _run(self) -> None:
        while self._new.wait():
            self._new.clear()
            assert self._latest is not None
            start_s = time.monotonic()
            try:
                self._send(self._latest.placement().model_dump_json().encode())
            except (MemoryError, PlacerError):
                # The solve itself meets the same error and reports it. Earlier reports stay valid.
                pass
            time.sleep(max(INTERVAL_S, (time.monotonic() - start_s) / TIME_SHARE))
