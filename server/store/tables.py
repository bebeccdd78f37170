"""Tables of the store, the same in SQLite and PostgreSQL; ``migrations`` creates them in steps."""

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

# Revision of these tables; in SQLite, also the value of ``PRAGMA user_version``.
HEAD = "0006"

METADATA = MetaData()

# Type of the row number, which gives the order of writing; a clock may jump.
ORDER = BigInteger().with_variant(Integer, "sqlite")

# Large columns come last, so that a search does not read them.
placements = Table(
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

# Accepted requests without an answer.
jobs = Table(
    "jobs",
    METADATA,
    Column("row", ORDER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("client", Text, nullable=False),
    Column("objective", Text, nullable=False),
    Column("time_limit_s", Double, nullable=False),
    # The replica that must answer it. Any replica may take a job whose owner is null or unknown.
    Column("owner", Text),
    Column("running", Boolean, nullable=False, server_default=false()),
    # Whether a client asked another replica to end it.
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

# The running services that share the store.
replicas = Table(
    "replicas",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("beats", BigInteger, nullable=False),
)

# Profiles that a node measured from graphs.
measured = Table(
    "measured",
    METADATA,
    Column("row", ORDER, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("profile", LargeBinary, nullable=False),
)

# Registered nodes and their devices.
nodes = Table(
    "nodes",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("created_s", Double, nullable=False),
    Column("cluster", LargeBinary, nullable=False),
)

# Accepted graphs that are not measured yet.
graphs = Table(
    "graphs",
    METADATA,
    Column("row", ORDER, primary_key=True),
    Column("id", Text, nullable=False),
    # The node on whose devices it is measured.
    Column("node", Text, nullable=False),
    # The service that measures it. Any service may take a graph whose owner is null or unknown.
    Column("owner", Text),
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("id", "node"),
)
