"""The best placement so far, sent to the service as a solve goes, so that it outlives the solve's
process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from placer.errors import PlacerError

if TYPE_CHECKING:
    from placer.solver.search import Incumbent

EVERY_S = 0.5
"""Between two placements; of those in between the last one is sent."""

SHARE = 0.05
"""Of the solve's time, so much may go to making them."""


class Telling:
    """Makes placements of what a solver finds, in a thread of its own, and sends them.

    Args:
        send: is given each as JSON.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._latest: Incumbent | None = None
        self._new = threading.Event()
        threading.Thread(target=self._go_on, daemon=True).start()

    def tell(self, incumbent: Incumbent) -> None:
        """Send the placement of this one, unless a better one comes before it is its turn. Safe
        from any thread.
        """
        self._latest = incumbent
        self._new.set()

    def _go_on(self) -> None:
        while self._new.wait():
            self._new.clear()
            assert self._latest is not None
            began_s = time.monotonic()
            try:
                self._send(self._latest.placement().model_dump_json().encode())
            except (MemoryError, PlacerError):
                # the solve meets the same, and says so; what was sent before is still there
                pass
            time.sleep(max(EVERY_S, (time.monotonic() - began_s) / SHARE))
