"""``python -m cukern``: the command line."""

import sys

from cukern.cli import main

sys.exit(main())
