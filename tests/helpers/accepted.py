"""What a service's store has accepted and not answered."""

from __future__ import annotations

import sqlalchemy as sa

from placer_server.store.store import JOB, Accepted, Store
from placer_server.store.tables import graphs, jobs


def accepted_jobs(store: Store) -> list[Accepted]:
    """Return the requests without an answer, in the order of their arrival."""
    query = sa.select(*JOB).order_by(jobs.c.row)
    rows = store.database.read(lambda connection: connection.execute(query).all())
    return [Accepted(*row) for row in rows]


def accepted_graphs(store: Store, node: str) -> list[tuple[str, bytes]]:
    """Return ids and bodies of a node's unmeasured graphs, in the order of their arrival."""
    query = (
        sa.select(graphs.c.id, graphs.c.body).where(graphs.c.node == node).order_by(graphs.c.row)
    )
    rows = store.database.read(lambda connection: connection.execute(query).all())
    return [(key, body) for key, body in rows]
