"""Owners of jobs for several replicas, and row numbers in the order of writing."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

ORDER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Migrate from the previous revision."""
    sqlite = op.get_context().dialect.name == "sqlite"
    order = "rowid" if sqlite else "ctid"
    for name in ("placements", "jobs", "failures"):
        op.rename_table(name, f"old_{name}")
    op.drop_index("placements_by_profile", "old_placements")
    _create()
    text = "CAST(summary AS TEXT)" if sqlite else "convert_from(summary, 'UTF8')::json"
    op.execute(
        "INSERT INTO placements"
        " (id, version, complete, created_s, profile_id, summary, question, placement)"
        f" SELECT id, version, complete, created_s, profile_id, {text}, question, placement"
        f" FROM old_placements ORDER BY {order}"
    )
    op.execute(
        "INSERT INTO jobs (id, client, objective, time_limit_s, starts, request)"
        " SELECT old_jobs.id, client, objective, time_limit_s, coalesce(count, 0), request"
        f" FROM old_jobs LEFT JOIN starts ON starts.id = old_jobs.id ORDER BY old_jobs.{order}"
    )
    op.execute(
        "INSERT INTO failures (id, status, problem)"
        f" SELECT id, status, problem FROM old_failures ORDER BY {order}"
    )
    for name in ("old_placements", "old_jobs", "old_failures", "starts"):
        op.drop_table(name)
    op.create_index("placements_by_profile", "placements", ["profile_id"])


def _create() -> None:
    op.create_table(
        "placements",
        sa.Column("row", ORDER, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("profile_id", sa.Text),
        sa.Column("summary", sa.JSON, nullable=False),
        sa.Column("question", sa.LargeBinary, nullable=False),
        sa.Column("placement", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("row", ORDER, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("client", sa.Text, nullable=False),
        sa.Column("objective", sa.Text, nullable=False),
        sa.Column("time_limit_s", sa.Double, nullable=False),
        sa.Column("owner", sa.Text),
        sa.Column("running", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("stop", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("starts", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("incumbent", sa.Double),
        sa.Column("bound", sa.Double),
        sa.Column("request", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "failures",
        sa.Column("row", ORDER, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("problem", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "replicas",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("beats", sa.BigInteger, nullable=False),
    )
