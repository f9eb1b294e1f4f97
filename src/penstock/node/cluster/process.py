"""The end of the process of a node that is not active any more: its last writes, and the process that replaces it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

__all__ = ["HANDED_OVER", "restart_process", "write_in_time"]

_log = logging.getLogger("penstock.cluster")

HANDED_OVER: Final = "its leadership was handed over"
"""Reason of the end after a handover, which is no error."""
_SAVE_S: Final = 5.0
"""Maximum seconds that a node without leadership writes commits to LMDB before it restarts, and that a handover waits
for its entry of the audit trail."""


def restart_process(reason: str) -> None:
    """Replace this process by a new one with the same arguments, in any thread; no other code of it runs any more."""
    level = logging.INFO if reason == HANDED_OVER else logging.ERROR
    _log.log(level, "this node is not active any more and restarts as a standby: %s", reason)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - its own command line
    finally:  # the interpreter was removed: nothing may continue
        os._exit(1)


def write_in_time(write: Callable[[], object]) -> None:
    """Call ``write`` in a thread, and wait :data:`_SAVE_S` at most: a disk may hang."""
    writing = threading.Thread(target=write, name="cluster save", daemon=True)
    writing.start()
    writing.join(_SAVE_S)
