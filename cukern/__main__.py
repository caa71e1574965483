"""``python -m cukern`` is the command line."""

import sys

from cukern.cli import main

sys.exit(main())
