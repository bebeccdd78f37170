"""Clients of the REST service."""
