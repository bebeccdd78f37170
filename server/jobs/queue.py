"""Queue of the jobs that wait for a worker; clients take turns in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Generic, TypeVar

from .job import Job

J = TypeVar("J", bound=Job)


class FairQueue(Generic[J]):
    """Round-robin queue: first come, first served for each client, and the clients in turn.

    asked:   a1 a2 a3 b1 c1
    served:  a1 b1 c1 a2 a3
    """

    def __init__(self) -> None:
        # The client whose turn is next comes first.
        self._clients: OrderedDict[str, OrderedDict[str, J]] = OrderedDict()
        self._jobs: dict[str, J] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, key: str) -> J | None:
        """Return the job of that id, or None."""
        return self._jobs.get(key)

    def all(self) -> list[J]:
        """Return every job, in no particular order."""
        return list(self._jobs.values())

    def held_by(self, client: str) -> int:
        """Return the number of jobs that a client has in the queue."""
        return len(self._clients.get(client, ()))

    def add(self, job: J) -> None:
        """Add a job."""
        self._jobs[job.id] = job
        self._clients.setdefault(job.client, OrderedDict())[job.id] = job

    def remove(self, job: J) -> None:
        """Remove a job."""
        del self._jobs[job.id]
        mine = self._clients[job.client]
        del mine[job.id]
        if not mine:
            del self._clients[job.client]

    def pop(self, running: Container[str]) -> J | None:
        """Remove and return the next job whose id is not running, or None.

        A job that was stopped and asked again may have the id of a running one.
        """
        for client, jobs in self._clients.items():
            for key, job in jobs.items():
                if key not in running:
                    # In this order, since ``remove`` drops a client without further jobs.
                    self._clients.move_to_end(client)
                    self.remove(job)
                    return job
        return None
