"""Retries of failed writes, for example after a full disk or an unreachable PostgreSQL."""

from __future__ import annotations

import asyncio
import logging

from .database import StoreError
from .store import Store

log = logging.getLogger("placer_server")

RETRY_S = 2.0


async def retry_writes_forever(store: Store) -> None:
    """Retry every two seconds while writes are pending."""
    while True:
        await asyncio.sleep(RETRY_S)
        await retry_writes(store)


async def retry_writes(store: Store) -> None:
    """Retry once."""
    if not store.unwritten:
        return
    try:
        await asyncio.to_thread(store.retry_unwritten)
        log.info("the pending ends of jobs are written now")
    except StoreError as error:
        log.error("%d ends of jobs are still unwritten: %s", store.unwritten, error)
