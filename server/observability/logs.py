"""Log formats: text, or one JSON object per line; each line has the id of its request."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from ..settings import Settings

# Id of the request that is being answered.
REQUEST_ID: ContextVar[str] = ContextVar("placer_request_id", default="")

# Fields of a line about a request, in addition to its message.
FIELDS = ("method", "route", "status", "ms", "client")


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", "") or REQUEST_ID.get():
            content["request_id"] = request_id
        content.update((name, getattr(record, name)) for name in FIELDS if hasattr(record, name))
        if record.exc_info:
            content["trace"] = self.formatException(record.exc_info)
        return json.dumps(content)


class TextFormatter(logging.Formatter):
    """Formatter of text for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        request_id = REQUEST_ID.get()
        return f"{super().format(record)} [{request_id}]" if request_id else super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the message on one line.

        Otherwise a layer's name with a line break could forge a line of the log.
        """
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def config(settings: Settings) -> dict[str, Any]:
    """Return the logging configuration of uvicorn and of the service."""
    formatter = JsonFormatter if settings.log_format == "json" else TextFormatter
    logger = {"handlers": ["stderr"], "level": settings.log_level.upper(), "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "loggers": {"uvicorn": logger, "uvicorn.error": logger, "placer_server": logger},
    }
