"""``python -m penstock.cli``: the command line, for processes that start commands with their own interpreter."""

import sys

from penstock.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
