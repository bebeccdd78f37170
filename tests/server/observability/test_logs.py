"""Lines of the log."""

from __future__ import annotations

import logging
import sys

import pytest

from placer_server.observability.logs import JsonFormatter, TextFormatter


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_line_break_in_what_is_told_makes_no_second_line(formatter):
    record = logging.LogRecord(
        "n", logging.ERROR, "", 0, "solve %s failed", ("a\r\n12:00:00 INFO forged",), None
    )
    assert "forged" in formatter.format(record)
    assert len(formatter.format(record).splitlines()) == 1


def test_a_trace_keeps_its_lines_for_people():
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        record = logging.LogRecord("n", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    assert len(TextFormatter().format(record).splitlines()) > 2
