"""Creation and migration of the tables, once even if several replicas start together."""

from __future__ import annotations

import importlib
from pathlib import Path

from sqlalchemy import Connection, inspect

from placer.errors import ServerError

from .tables import HEAD, METADATA

KNOWN = tuple(f"{number:04}" for number in range(1, int(HEAD) + 1))


def upgrade(connection: Connection, name: str) -> None:
    """Create or migrate the tables.

    Args:
        connection: Connection in a transaction that excludes other upgrades of the store.
        name: Name of the store, for messages.

    Raises:
        ServerError: A later version of Placer made the store.
    """
    found = _revision(connection)
    if found == HEAD:
        return
    if found is not None and found not in KNOWN:
        raise ServerError(
            f"database {name!r} has version {found}, and this Placer reads up to {HEAD}: a later"
            " Placer made it; upgrade Placer, or set PLACER_DATABASE to another database"
        )
    # Alembic would create the same tables, but its import would delay a first start by 0.3 s.
    if found is None:
        METADATA.create_all(connection)
        _stamp(connection, HEAD)
    else:
        _migrate(connection, found)
    _mark_file(connection)


def _revision(connection: Connection) -> str | None:
    """Return the revision of the tables, or None if the store is empty."""
    if inspect(connection).has_table("alembic_version"):
        revision: str = connection.exec_driver_sql(
            "SELECT version_num FROM alembic_version"
        ).scalar_one()
        return revision
    # Versions before Alembic stored the revision in the file's header.
    if connection.dialect.name == "sqlite":
        number = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        return f"{number:04}" if number else None
    return None


def _stamp(connection: Connection, revision: str) -> None:
    connection.exec_driver_sql(
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"
    )
    connection.exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{revision}')")


def _migrate(connection: Connection, found: str) -> None:
    command = importlib.import_module("alembic.command")
    config = importlib.import_module("alembic.config").Config()
    config.set_main_option(
        "script_location", str(Path(__file__).parent / "migrations").replace("%", "%%")
    )
    config.attributes["connection"] = connection
    if not inspect(connection).has_table("alembic_version"):
        _stamp(connection, found)
    command.upgrade(config, HEAD)


def _mark_file(connection: Connection) -> None:
    """Set the revision in the file, so that versions of Placer before Alembic reject it too."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA user_version = {int(HEAD)}")
