"""The tables of the store, the same in SQLite and PostgreSQL; ``migrations`` brings a store up to
them.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

HEAD = "0006"
"""The revision that these tables are; in SQLite, ``PRAGMA user_version`` is its number too."""

METADATA = MetaData()

ORDER = BigInteger().with_variant(Integer, "sqlite")
"""Of writing: a clock may jump."""

placements = Table(  # what is large comes last, so that a search does not read it
    "placements",
    METADATA,
    Column("row", ORDER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("version", Text, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("profile_id", Text),
    Column("summary", JSON, nullable=False),
    Column("question", LargeBinary, nullable=False),
    Column("placement", LargeBinary, nullable=False),
    Index("placements_by_profile", "profile_id"),
)

profiles = Table(
    "profiles",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("profile", LargeBinary, nullable=False),
)

jobs = Table(  # what is accepted and not answered
    "jobs",
    METADATA,
    Column("row", ORDER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("client", Text, nullable=False),
    Column("objective", Text, nullable=False),
    Column("time_limit_s", Double, nullable=False),
    # the replica that answers for it; none, or one that is not in replicas: free to take
    Column("owner", Text),
    Column("running", Boolean, nullable=False, server_default=false()),
    # another replica was asked to end it
    Column("stop", Boolean, nullable=False, server_default=false()),
    Column("starts", Integer, nullable=False, server_default=text("0")),
    Column("incumbent", Double),
    Column("bound", Double),
    Column("request", LargeBinary, nullable=False),
)

failures = Table(
    "failures",
    METADATA,
    Column("row", ORDER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("status", Integer, nullable=False),
    Column("problem", LargeBinary, nullable=False),
)

replicas = Table(  # the services that share the store, each while it lives
    "replicas",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("beats", BigInteger, nullable=False),
)

measured = Table(  # profiles of graphs, measured on a node
    "measured",
    METADATA,
    Column("row", ORDER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("profile", LargeBinary, nullable=False),
)

nodes = Table(  # the devices of the nodes that registered
    "nodes",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("created_s", Double, nullable=False),
    Column("cluster", LargeBinary, nullable=False),
)

graphs = Table(  # accepted, and not measured yet
    "graphs",
    METADATA,
    Column("row", ORDER, primary_key=True),
    Column("id", Text, nullable=False),
    Column("node", Text, nullable=False),  # whose devices it is for
    # the service that measures it; none, or one that is not in replicas: free to take
    Column("owner", Text),
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("id", "node"),
)
