"""Clients of the REST service, and ``suggest``: from a model to a placement in one call."""

from placer_client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
