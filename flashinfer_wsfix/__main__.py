"""``python -m flashinfer_wsfix``, and what the console script calls."""

import sys

from .cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
