"""The command ``placer``: the composition root; it may import everything, and does when a command
needs it.

command.py    the commands put together, errors as exit codes
blame.py      the line of the user's own code that an error came from
profiling.py  profile
solving.py    solve, suggest
measuring.py  measure
refining.py   refine
showing.py    show, compare
machine.py    serve, doctor, demo
joining.py    profiles of several files and hosts
options.py    the options that several commands share
files.py      JSON in and out
terminal.py   the streams, and what goes to stderr
interrupts.py Ctrl-C
"""

from placer.cli.interrupts import ended_by_interrupts

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command; errors become one or two lines and an exit code.

    Args:
        arguments: of the command line; ``sys.argv`` if None.
    """
    with ended_by_interrupts():
        from placer.cli.command import run

        run(arguments)
