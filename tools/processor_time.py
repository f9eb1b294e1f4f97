"""Run a command and write the processor time that it took, including processes that its own processes left behind.

Usage: python -m tools.processor_time FILE COMMAND [ARGUMENT ...]

Java, which a session of Spark starts, outlives the Python process that started it: no process waits for it, so the
times that a shell shows omit it. This process becomes the parent of such processes (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["MEASURED", "main", "processor_s", "spent_s"]

MEASURED = "PROCESSOR_TIME_ROOT"
"""Environment variable of the command: the process below which all of its processes are."""
_SUBREAPER = 36
"""Linux: PR_SET_CHILD_SUBREAPER."""
_ENDING_S = 15.0
"""Time that processes have to end after the command."""


def spent_s() -> float:
    """Return the processor time of all processes that this process has waited for, and that they have waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def processor_s(root: int) -> float:
    """Return the processor time of the process ``root`` and of all processes below it, whether they run or not."""
    ticks, found = 0, [root]
    while found:
        folder = Path(f"/proc/{found.pop()}")
        with contextlib.suppress(OSError):  # it has ended
            # The times of the process itself and of those that it has waited for.
            ticks += sum(map(int, (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:15]))
            for task in (folder / "task").iterdir():
                found += map(int, (task / "children").read_text(encoding="ascii").split())
    return ticks / os.sysconf("SC_CLK_TCK")


def main(file: Path, command: list[str]) -> int:
    """Run ``command``; write the processor time in seconds to ``file`` and return the exit status."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    # Ctrl-C is for the command, which also gets it.
    signal.signal(signal.SIGINT, lambda *_: None)
    child = subprocess.Popen(command, env=os.environ | {MEASURED: str(os.getpid())})
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = None
    while status is None:
        pid, ended = os.wait()
        if pid == child.pid:
            status = os.waitstatus_to_exitcode(ended)
    child.returncode = status
    deadline = time.monotonic() + _ENDING_S
    with contextlib.suppress(ChildProcessError):  # all have ended
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
    file.write_text(f"{spent_s():.2f}\n", encoding="ascii")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
