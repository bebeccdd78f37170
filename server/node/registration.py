"""Registration of this node's devices with another service."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import placer

from ..problem import Problem, clip
from ..settings import Settings
from .cluster import NodeCluster

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("placer_server")

REGISTER_EVERY_S = 60.0
RETRY_S = 10.0


async def register_forever(settings: Settings, node: NodeCluster) -> None:
    """Register this node's devices at ``settings.register_url``, now and every minute."""
    # The import takes 0.1 s, which only services that register should spend.
    import httpx

    where = f"{settings.register_url.rstrip('/')}/v1/nodes/{settings.node_name}"
    headers = {"Content-Type": "application/json", "User-Agent": f"placer/{placer.__version__}"}
    if settings.register_key.get_secret_value():
        headers["Authorization"] = f"Bearer {settings.register_key.get_secret_value()}"
    failed = ""
    async with httpx.AsyncClient(headers=headers, timeout=30) as client:
        while True:
            problem = await _register(client, where, node)
            if problem and problem != failed:
                log.error(
                    "this node could not be registered at %s: %s", settings.register_url, problem
                )
            elif not problem and failed:
                log.info("this node is registered at %s", settings.register_url)
            failed = problem
            await asyncio.sleep(RETRY_S if problem else REGISTER_EVERY_S)


async def _register(client: httpx.AsyncClient, where: str, node: NodeCluster) -> str:
    """Register once, and return the error message, or an empty string."""
    import httpx

    try:
        reply = await client.put(where, content=await node.get())
    except Problem as problem:
        return problem.detail
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return "" if reply.is_success else f"{reply.status_code}: {clip(reply.text, 300)}"
