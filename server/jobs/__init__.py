"""Questions on their way to an answer: queued, solved here or by another replica, ended."""
