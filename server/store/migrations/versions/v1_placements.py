"""Placements by the content hash of their question."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables of this revision."""
    op.create_table(
        "placements",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("placement", sa.LargeBinary, nullable=False),
    )
