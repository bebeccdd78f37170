"""The client and the service with a faulty network between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import httpx

from placer.errors import PlacerError
from placer.schema import PlacementRequest
from placer_client import Client

from .helpers import helper
from .load import request_body
from .server import serving

CALLS = 300
RETRIES = 4
LAYERS = 12
MOST_FAULTS = 6
"""In a row; more than the retries, so that some calls cannot come through."""


class Through(NamedTuple):
    """The results of calls.

    Attributes:
        calls: the number of calls.
        answered: the number of calls with the right answer.
        unclear: the number of calls with neither the right answer nor a clear error, or that gave
            up although a retry would have helped.
        twice: the number of calls that reached the service twice although that is not safe.
    """

    calls: int
    answered: int
    unclear: int
    twice: int


class Caller:
    """A caller whose calls each meet their own faults, and who checks the results."""

    def __init__(self, port: int, seed: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._network = helper("faulty_network")
        self._random = Random(seed)
        self._turn = 0
        self.answered = self.unclear = self.twice = 0

    def call(self) -> None:
        """Make one call."""
        self._random.choice(
            [self._place, self._place, self._read, self._judge, self._stop, self._measure]
        )()

    def _place(self) -> None:
        asked = self._request()
        self._through(lambda client: client.place(asked).id == asked.content_hash())

    def _read(self) -> None:
        asked = self._placed()
        self._through(lambda client: client.request(asked.content_hash()) == asked)

    def _judge(self) -> None:
        asked = self._placed()
        with Client(self._url) as client:
            where = client.place(asked).layer_devices
        self._through(lambda client: client.evaluate(where, asked).valid)

    def _stop(self) -> None:
        asked = self._request(layers=120, time_limit_s=20, constraints={"contiguous": False})
        with Client(self._url) as client:
            client.submit(asked)
        self._through(
            lambda client: client.stop(asked.content_hash()).id == asked.content_hash(),
            once="DELETE ",
        )
        with Client(self._url) as client:
            client.stop(asked.content_hash())

    def _measure(self) -> None:
        cluster = self._request().cluster
        assert cluster is not None
        # stands in for a measurement that would take minutes
        answer = httpx.Response(200, json=cluster.model_dump(mode="json"))
        self._through(
            lambda client: client.measure_cluster() == cluster, once="POST ", answer=answer
        )

    def _request(self, layers: int = LAYERS, **fields: Any) -> PlacementRequest:
        self._turn += 1
        return PlacementRequest.model_validate_json(
            request_body(layers, seed=self._turn, workers=1, **fields)
        )

    def _placed(self) -> PlacementRequest:
        asked = self._request()
        with Client(self._url) as client:
            client.place(asked)
        return asked

    def _through(
        self, ask: Callable[[Client], bool], once: str = "", answer: httpx.Response | None = None
    ) -> None:
        """Make a call.

        Args:
            ask: makes the call and returns whether its answer is right.
            once: the start of the request line that must not reach the service twice; if empty,
                every request may.
            answer: an answer that replaces the service's answer.
        """
        kinds = [*self._network.BEFORE, *self._network.AFTER]
        faults = self._random.choices(kinds, k=self._random.randrange(MOST_FAULTS + 1))
        faulty = self._network.Faulty(*faults, answer=answer)
        try:
            with Client(self._url, retries=RETRIES, transport=self._network.Sync(faulty)) as client:
                right = ask(client)
        except PlacerError:
            # a retry would have helped
            self.unclear += len(faults) <= RETRIES and not once
        except Exception:
            self.unclear += 1
        else:
            self.answered += right
            self.unclear += not right
        self.twice += bool(once) and sum(line.startswith(once) for line in faulty.seen) > 1


@contextmanager
def calling(seed: int = 0) -> Iterator[Caller]:
    """Yield a caller with a service of its own."""
    with serving(workers=1, queue=64) as server:
        yield Caller(server.port, seed)


def through_faults(calls: int = CALLS) -> Through:
    """Make ``calls`` calls through faults."""
    with calling() as caller:
        for _ in range(calls):
            caller.call()
    return Through(calls, caller.answered, caller.unclear, caller.twice)
