"""The program that ``spark-submit`` is given: ``penstock pipeline run``, in the session that Spark has set up.

On the machines of a cluster there may be no command ``penstock``, only Python and the package.
"""

from __future__ import annotations

import sys

from penstock.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(["pipeline", "run", "--spark-master", "submitted", *sys.argv[1:]]))
