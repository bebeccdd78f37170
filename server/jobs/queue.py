"""The jobs that wait for a worker: clients take turns, so that one who asks much does not keep the
others waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from .job import Job


class FairQueue:
    """First come, first served for each client, and the clients one after the other.

    asked:   a1 a2 a3 b1 c1
    served:  a1 b1 c1 a2 a3
    """

    def __init__(self) -> None:
        # whose turn it is comes first
        self._clients: OrderedDict[str, OrderedDict[str, Job]] = OrderedDict()
        self._jobs: dict[str, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, key: str) -> Job | None:
        """The job of that id."""
        return self._jobs.get(key)

    def all(self) -> list[Job]:
        """Every job, in no particular order."""
        return list(self._jobs.values())

    def held_by(self, client: str) -> int:
        """How many jobs a client has waiting."""
        return len(self._clients.get(client, ()))

    def add(self, job: Job) -> None:
        """Let a job wait."""
        self._jobs[job.question.id] = job
        self._clients.setdefault(job.client, OrderedDict())[job.question.id] = job

    def remove(self, job: Job) -> None:
        """Take a job out."""
        del self._jobs[job.question.id]
        mine = self._clients[job.client]
        del mine[job.question.id]
        if not mine:
            del self._clients[job.client]

    def pop(self, running: Container[str]) -> Job | None:
        """The job whose turn it is; none of an id that runs already, as one that was stopped and
        asked again may.
        """
        for client, jobs in self._clients.items():
            for key, job in jobs.items():
                if key not in running:
                    self._clients.move_to_end(client)
                    self.remove(job)
                    return job
        return None
