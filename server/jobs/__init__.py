"""Jobs from acceptance to answer: queued, run here or by another replica, finished.

runner ──┬─ solves         placements: persistent, stoppable, shared among replicas
└─ measurements   profiles of graphs: persistent, one at a time
evaluations                maps that users made, and the memory of graphs: a client waits for each,
                           nothing is stored
"""
