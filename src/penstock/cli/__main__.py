"""The process of a command: ``penstock``, or ``python -m penstock.cli`` for processes that start commands with their
own interpreter.

Until the command is called, there is no garbage collection: modules and the parser stay until the end.
"""

import gc
import sys
from collections.abc import Sequence

gc.disable()

from penstock.cli.process import run  # noqa: E402 - modules are most of the objects

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; returns the exit status."""
    try:
        return run(sys.argv[1:], _with_typer)
    finally:
        # The process ends: a last collection would visit all objects for nothing.
        gc.freeze()


def _with_typer(args: Sequence[str]) -> int:
    from penstock.cli.main import call

    return call(args)


if __name__ == "__main__":
    from penstock.runtime.io.process_end import end_with_parent

    end_with_parent()
    sys.exit(main())
