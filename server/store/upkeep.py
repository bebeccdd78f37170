"""What the store could not take, written when it can again: the disk was full, or PostgreSQL away."""

from __future__ import annotations

import asyncio
import logging

from .database import StoreError
from .store import Store

log = logging.getLogger("placer_server")

MEND_S = 2.0


async def mend_forever(store: Store) -> None:
    """Try every two seconds, while there is something to write."""
    while True:
        await asyncio.sleep(MEND_S)
        await mend(store)


async def mend(store: Store) -> None:
    """Try once."""
    if not store.unwritten:
        return
    try:
        await asyncio.to_thread(store.mend)
        log.info("what could not be written before is written now")
    except StoreError as error:
        log.error("%d ends of jobs are still unwritten: %s", store.unwritten, error)
