"""Jobs from acceptance to answer: queued, run here or by another replica, finished."""
