"""Questions next to the answers, and accepted requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Migrate from the previous revision."""
    blob = sa.LargeBinary
    op.create_table(
        "answers",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("profile_id", sa.Text),
        sa.Column("summary", blob, nullable=False),
        sa.Column("question", blob, nullable=False),
        sa.Column("placement", blob, nullable=False),
    )
    copy = (
        "INSERT INTO answers"
        " SELECT id, version, complete, created_s, NULL, :empty, :empty, placement"
        " FROM placements ORDER BY created_s"
    )
    op.get_bind().execute(sa.text(copy).bindparams(sa.bindparam("empty", b"{}", blob)))
    op.drop_table("placements")
    op.rename_table("answers", "placements")
    op.create_index("placements_by_profile", "placements", ["profile_id"])
    op.create_table(
        "profiles",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("profile", blob, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("client", sa.Text, nullable=False),
        sa.Column("objective", sa.Text, nullable=False),
        sa.Column("time_limit_s", sa.Double, nullable=False),
        sa.Column("request", blob, nullable=False),
    )
    op.create_table(
        "starts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("count", sa.Integer, nullable=False),
    )
    op.create_table(
        "failures",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("problem", blob, nullable=False),
    )
