"""Progress of a solve from the service's event stream, which is resumed after an interruption."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx

from placer.errors import PlacerError, ServerError
from placer.schema import Placement, Progress

from . import errors
from .endpoints import placement_path
from .exchange import NOTHING_SENT, RETRIED, Outcome, Sender, backoff_s, retry_after_s

# Seconds without data after which the connection is lost; the service sends every 10 s.
SILENCE_S = 25.0


class EventStream:
    """Parser of an event stream, and what to do when it ends.

    Args:
        sender: Sender of the service.
        key: Id of the placement.

    Attributes:
        path: Path of the stream.
        ended: Whether the placement arrived.
    """

    def __init__(self, sender: Sender, key: str) -> None:
        self.path = f"{placement_path(key)}/events"
        self.ended = False
        self._sender = sender
        self._failures = 0
        self._has_begun = False
        self._begin()

    def _begin(self) -> None:
        """Discard an incomplete event; the next stream sends it again."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # The event-stream format allows \r\n, \n and \r as line ends.
        self._text = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._half: list[str] = []
        self._fields: dict[str, str] = {}

    def read(self, piece: bytes) -> Iterator[Progress | Placement]:
        """Yield the events that a piece of the stream completes.

        Raises:
            PlacerError: The solve failed.
        """
        *ends, rest = self._text.decode(piece).split("\n")
        for end in ends:
            line = "".join((*self._half, end))
            self._half = []
            if (event := self._line(line)) is not None:
                yield event
        self._half.append(rest)

    def _line(self, text: str) -> Progress | Placement | None:
        """Return the event that a line completes, or None."""
        name, _, value = text.partition(": ")
        if text:
            self._fields[name] = value
            return None
        fields, self._fields = self._fields, {}
        return self._event(fields.get("event", ""), fields.get("data", ""))

    def _event(self, kind: str, data: str) -> Progress | Placement | None:
        """Return the content of a complete event, or None."""
        if kind == "done":
            self.ended = True
            return self._sender.parse(Placement, data)
        if kind == "failed":
            raise self._failed(data)
        if kind != "progress":
            return None
        self._failures, self._has_begun = 0, True
        return self._sender.parse(Progress, data)

    def _failed(self, data: str) -> PlacerError:
        try:
            problem: dict[str, Any] = json.loads(data)
            return errors.from_problem(int(problem.get("status", 500)), problem, self._sender.url)
        except (ValueError, TypeError, AttributeError):
            return ServerError(
                f"the solve failed; the service at {self._sender.url} gives no reason:"
                f" {data[:200]!r}"
            )

    def pause_s(self, outcome: Outcome) -> float:
        """Return the pause in seconds before the stream is requested again.

        Args:
            outcome: The reply whose stream ended without an answer or which was an error, or the
                error that interrupted the stream.

        Raises:
            PlacerError: A repetition does not help.
        """
        if isinstance(outcome, httpx.RequestError):
            return self._interrupted(outcome)
        # A stream ends without an answer if the service stops.
        return self._interrupted(None) if outcome.is_success else self._rejected(outcome)

    def _rejected(self, reply: httpx.Response) -> float:
        if reply.status_code not in RETRIED or self._failures >= self._sender.retries:
            raise errors.from_reply(reply)
        return max(retry_after_s(reply), self._backoff_s())

    def _interrupted(self, error: httpx.RequestError | None) -> float:
        away = self._has_begun and isinstance(error, NOTHING_SENT)
        if self._failures < self._sender.max_retries(away) and not isinstance(
            error, httpx.UnsupportedProtocol
        ):
            return self._backoff_s()
        if error is None:
            raise ServerError(
                f"the service at {self._sender.url} ended the stream without an answer"
            )
        raise errors.from_transport(error, self._sender.url, self._failures + 1) from error

    def _backoff_s(self) -> float:
        self._failures += 1
        self._begin()
        return backoff_s(self._failures - 1)
