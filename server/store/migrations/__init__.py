"""How a store comes from one version of its tables to the next, with Alembic."""
