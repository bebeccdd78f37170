"""Owners of graphs, so that another service on the same node continues after a crash."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Migrate from the previous revision."""
    op.add_column("graphs", sa.Column("owner", sa.Text))
