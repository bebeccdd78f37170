"""Clients of the REST service, and ``suggest``: from a model to a placement in one call."""

from placer_client.async_client import AsyncClient
from placer_client.client import Client

__all__ = ["AsyncClient", "Client"]
