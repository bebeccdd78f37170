"""Which service measures a graph, so that another one on the same node takes over what a killed one
has left.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Bring a store from the version before to this."""
    op.add_column("graphs", sa.Column("owner", sa.Text))
