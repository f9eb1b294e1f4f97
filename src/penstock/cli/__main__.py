"""``python -m penstock.cli``: the command line, for processes that start commands with their own interpreter."""

import sys

from penstock.cli.main import main
from penstock.runtime.io.process_end import end_with_parent

__all__ = ["main"]

if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
