"""The command ``placer``, the composition root: each command imports what it needs when it runs.

command.py          all commands, and errors as exit codes with the line of the user's code
profiling.py        profile, of several files and hosts too
solving.py          solve, suggest
estimating.py       estimate
measuring.py        measure, refine
showing.py          show, compare
other_engines.py    export, evaluate
serving.py          serve
machine.py          doctor, demo, cache
option_fields.py    options made from options objects
options.py          options that several commands share, and readers of their words
model_arguments.py  a model and its inputs as words
files.py            JSON in and out
terminal.py         the streams, and the messages on stderr
interrupts.py       Ctrl-C
"""

from placer.cli.interrupts import ended_by_interrupts

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command; errors become one or two lines and an exit code.

    Args:
        arguments: the words of the command line; by default ``sys.argv``.
    """
    with ended_by_interrupts():
        from placer.cli.command import run

        run(arguments)
