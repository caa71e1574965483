"""``python -m cukern``: the command line."""

from cukern.cli import main

main()
