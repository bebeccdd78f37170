"""One process a task, and the tasks of a solve and of measuring."""
