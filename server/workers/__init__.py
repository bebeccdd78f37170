"""Worker processes, and the tasks that run in them."""
