"""Measured profiles, and the devices of registered nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

ORDER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Migrate from the previous revision."""
    op.create_table(
        "measured",
        sa.Column("row", ORDER, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("profile", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "nodes",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("cluster", sa.LargeBinary, nullable=False),
    )
