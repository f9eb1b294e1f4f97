"""The end of commands: at SIGTERM as at an error, and with the process that started them, also if that is killed and
can end nothing.

For the latter the parent holds one end of a pipe, and the child reads the other one: the pipe ends with the parent.
Linux can send a signal instead (``PR_SET_PDEATHSIG``), but at the end of the thread that started the child, and not to
its children.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

__all__ = ["END_S", "end_at_sigterm", "end_with_parent", "parent_pipe"]

END_S: Final = 5.0
"""Seconds between SIGTERM and SIGKILL: a sample and its Spark remove their temporary files."""
_VARIABLE: Final = "PENSTOCK_PARENT_PIPE"


def end_at_sigterm(first: Callable[[], object] = lambda: None) -> None:
    """End this process at SIGTERM as at an error, after a call of ``first``: by default Python ends at once, and
    temporary files remain."""

    def end(number: int, _frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        first()
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


@contextmanager
def parent_pipe() -> Iterator[tuple[int, dict[str, str]]]:
    """Hold a pipe while a child may run; yield the descriptor that it inherits, and the variable that names it.

    The child calls :func:`end_with_parent`. If the block ends before the child, the child ends as well.
    """
    watched, held = os.pipe()
    try:
        yield watched, {_VARIABLE: str(watched)}
    finally:
        os.close(watched)
        os.close(held)


def end_with_parent() -> None:
    """End this process and its children when the parent ends that started it with a :func:`parent_pipe`; without one
    do nothing."""
    text = os.environ.pop(_VARIABLE, "")
    if not text.isdigit() or os.getpgrp() != os.getpid():  # otherwise the group has processes of others
        return
    descriptor = int(text)
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - it has no keyword
    threading.Thread(target=_watch, args=(descriptor,), name="parent", daemon=True).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    # The output has no reader any more, and the main thread may wait for Java.
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(END_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)
