"""`python -m penstock`: the command line."""

import sys

from penstock.cli.__main__ import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
