"""What all tests share: no cache of measurements, and no deadline of drawn examples.

Tests marked ``gpu`` are skipped, visibly, without CUDA devices.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os

import covering
import forks
import httpx._transports.default as httpx_transports
import hypothesis
import pytest

os.environ["PLACER_CACHE"] = "off"  # for the processes that tests start, too
forks.share()
# a busy machine is no fault
hypothesis.settings.register_profile("placer", deadline=None)
hypothesis.settings.load_profile("placer")

# httpx reads all known certificates for each client: 20 ms, also where nothing is encrypted
httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)

_TESTS = itertools.count()

gc.set_threshold(*forks.COLLECTIONS)


# before pytest selects tests by their markers
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    covering.mark_rest(items)
    _keep_handlers_from_torchs_trace()
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs CUDA devices"))


def pytest_runtest_setup() -> None:
    """Put aside what was imported since: Python would search all that torch consists of for cycles
    again and again."""
    _keep_handlers_from_torchs_trace()
    if next(_TESTS) % 50 == 0:
        gc.collect()
        gc.freeze()


def _keep_handlers_from_torchs_trace() -> None:
    """Let pytest add no handler to the logger of torch's trace, as it does to each logger that does
    not propagate.

    With a handler, torch writes stacks and graphs of all that it traces, which nobody reads.
    """
    logging.getLogger("torch.__trace").propagate = True
