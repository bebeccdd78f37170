"""All commands, and their errors as one or two lines and an exit code."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.markup import escape
from typer.core import TyperGroup

import placer
from placer import errors
from placer.cli import (
    estimating,
    machine,
    measuring,
    other_engines,
    profiling,
    running,
    serving,
    showing,
    solving,
)
from placer.cli.terminal import err, settle_streams
from placer.errors import PlacerError

# packages whose lines are never the user's own
_OWN = ("placer", "placer_client", "placer_server")

EXIT_CODES = (
    "Exit codes: 0 done; 2 bad input; 3 infeasible: no placement is possible; 4 the time limit"
    " passed before a placement was found; 5 the server could not be reached or failed; 1 anything"
    " else."
)


_ELSEWHERE = {
    "explain": "'placer show FILE' explains a placement; 'placer solve FILE --explain' also finds"
    " what limits it.",
    "apply": "Python applies a placement: placer.DataFlow(model).update_flow(placement). 'placer"
    " measure' runs a batch under it.",
}
"""What to do instead, for commands that users may look for."""


class _Naming(TyperGroup):
    """Commands whose errors name the wrong value; typer 0.29 names only the right ones."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is asked for; see typer."""
        if args and args[0] in _ELSEWHERE:
            ctx.fail(f"No such command {args[0]!r}. {_ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is asked for."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                first = error.__cause__.errors()[0]
                if first["type"] == "value_error":  # typer's own, which names the value
                    error.message = str(first["ctx"]["error"])
                else:
                    error.message += f", not {first['input']!r}"
            raise


app = typer.Typer(
    cls=_Naming,
    help=f"Find where each layer of a PyTorch model should run.\n\n{EXIT_CODES}",
    epilog="JSON goes to stdout when it is piped or with --json, and to the file of -o; a terminal"
    " gets tables.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

for command in (
    profiling.profile,
    solving.solve,
    solving.solve_together,
    solving.suggest,
    running.run,
    estimating.estimate,
    measuring.measure,
    measuring.refine,
    showing.show,
    showing.compare,
    other_engines.export,
    other_engines.evaluate,
    machine.cache,
    serving.serve,
    machine.doctor,
    machine.demo,
):
    app.command(command.__name__.replace("_", "-"))(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(placer.__version__)
        raise typer.Exit(0)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, help="print the version")
    ] = False,
) -> None:
    """Handle the options that go before a command."""


def run(arguments: list[str] | None) -> None:
    """Run the command, see ``placer.cli.main``."""
    settle_streams()
    try:
        try:
            with _plain_warnings():
                app(args=arguments)
        finally:
            # flush here, where a full disk or a reader that has left still becomes an exit code
            sys.stdout.flush()
    except PlacerError as error:
        if os.environ.get("PLACER_DEBUG"):
            raise
        _fail(f"{error}{blamed(error)}", _exit_code(error))
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        if os.environ.get("PLACER_DEBUG"):
            raise
        _fail(f"{type(error).__name__}: {error} (PLACER_DEBUG=1 shows where)", 1)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show a UserWarning as a line, without the place in the sources that issued it."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if category is not UserWarning:
                usual(message, category, *place, **more)
                return
            err.print(
                f"[yellow]warning:[/] {escape(str(message))}", soft_wrap=True, highlight=False
            )

        warnings.showwarning = show
        yield


def _exit_code(error: PlacerError) -> int:
    kinds = {
        errors.InputError: 2,
        errors.CaptureError: 2,  # The model fails on the inputs.
        errors.InfeasibleError: 3,
        errors.SolveLimitError: 4,
        errors.ServerError: 5,
    }
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), 1)


def _fail(message: str, code: int) -> NoReturn:
    first, *rest = message.strip().splitlines() or ["failed"]
    err.print(f"[bold red]error:[/] {escape(first)}", soft_wrap=True, highlight=False)
    if rest:
        err.print(escape(rest[0]), soft_wrap=True, highlight=False)
    sys.exit(code)


def blamed(error: BaseException) -> str:
    """Return the last line of the user's own code in the traceback of an error's cause.

    Args:
        error: the error that is reported; its ``__cause__`` has the traceback.

    Returns:
        Text such as `` (train.py, line 33)``, or an empty text.
    """
    cause = error.__cause__
    if cause is None:
        return ""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        if _is_users(frame.filename):
            return f" ({_short(frame.filename)}, line {frame.lineno})"
    return ""


def _is_users(file: str) -> bool:
    """Return whether a file is neither Placer's nor installed.

    Generated code has no file, and is not the user's.
    """
    path = Path(file)
    # Debian has such folders in addition to the folders of sysconfig.
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    paths = sysconfig.get_paths()
    others = [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others += [Path(folder) for name in _OWN for folder in _folders(name)]
    return path.is_file() and not any(path.is_relative_to(folder) for folder in others)


def _folders(name: str) -> list[str]:
    """Return the folders of a package, installed or in a checkout."""
    found = find_spec(name)
    return list(found.submodule_search_locations or ()) if found else []


def _short(file: str) -> str:
    """Return a path relative to the working directory, if it is below."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
