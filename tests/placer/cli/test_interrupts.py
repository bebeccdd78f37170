"""Ctrl-C ends a command, whatever it is doing."""

from __future__ import annotations

import subprocess
import sys

SWALLOWING = """
import contextlib, io, os, signal
from placer.cli import ended_by_interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)
with {guard}:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            import time
            time.sleep(5)
        except:
            pass
print("it ran on", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def _run(guard: str) -> subprocess.CompletedProcess[str]:
    code = SWALLOWING.format(guard=guard)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_code_that_catches_everything_does_not_run_on() -> None:
    ended = _run("ended_by_interrupts()")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "Aborted.\n")


def test_an_exception_would_be_lost_there() -> None:
    assert _run("contextlib.nullcontext()").stdout == "it ran on True\n"


def test_the_handler_of_others_is_left_alone() -> None:
    code = (
        "import signal\nfrom placer.cli import ended_by_interrupts\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with ended_by_interrupts():\n    signal.raise_signal(signal.SIGINT)\n"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "True\n"


def test_it_does_while_what_a_command_needs_is_imported() -> None:
    # a traceback: the first third of a second of every command.
    code = """
import os, signal, sys

# a program in the background of a shell ignores the signal
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupting:
    def find_spec(self, name, *_):
        if name == "placer.cli.command":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from placer.cli import main
main(["--version"])
"""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "Aborted.\n")
