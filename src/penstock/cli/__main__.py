"""The process of a command: ``penstock``, or ``python -m penstock.cli`` for processes that start commands with their
own interpreter.

Until the command is called, there is no garbage collection: modules and the parser stay until the end.
"""

import gc
import sys

gc.disable()

from penstock.cli.main import main  # noqa: E402 - typer makes most of the objects

__all__ = ["main"]

if __name__ == "__main__":
    from penstock.runtime.io.process_end import end_with_parent

    end_with_parent()
    sys.exit(main())
