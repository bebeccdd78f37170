"""Alembic environment; it uses the connection of ``placer_server.store.upgrade``."""

from __future__ import annotations

from alembic import context

from placer_server.store.tables import METADATA

# The caller holds the lock and the transaction: two replicas that start together migrate once.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=False,
)
context.run_migrations()
