"""What outlives the service: placements, jobs, profiles and nodes in SQLite or PostgreSQL."""
