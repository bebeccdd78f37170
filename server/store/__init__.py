"""Persistence in SQLite or PostgreSQL: placements, jobs, profiles and nodes."""
