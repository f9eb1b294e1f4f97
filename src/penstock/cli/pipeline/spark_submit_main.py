"""Main program for ``spark-submit``: ``penstock pipeline run`` in the session of Spark.

Machines of a cluster may have Python and the package, but no command ``penstock``.
"""

from __future__ import annotations

import sys

from penstock.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(["pipeline", "run", "--spark-master", "submitted", *sys.argv[1:]]))
