"""The command ``placer``, the composition root: each command imports what it needs when it runs.

command.py          all commands, and errors as exit codes
profiling.py        profile
solving.py          solve, suggest
measuring.py        measure
refining.py         refine
showing.py          show, compare
serving.py          serve
machine.py          doctor, demo
caching.py          cache
option_fields.py    options made from options objects
options.py          options that several commands share
option_words.py     devices, layers and sizes as words
model_arguments.py  a model and its inputs as words
joining.py          profiles of several files and hosts
files.py            JSON in and out
terminal.py         the streams, and the messages on stderr
interrupts.py       Ctrl-C
blame.py            the line of the user's own code that caused an error
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
