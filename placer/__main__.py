"""``python -m placer``: the command, where its script is not on the path."""

from placer.cli import main

main()
