"""The event loop of a server or a command, and what is set once per process for speed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["freeze_memory", "joins_writes", "loop_factory", "loop_name", "run", "tune_process"]

T = TypeVar("T")

MOST_DESCRIPTORS = 1 << 20
"""Beyond that, tables of the kernel cost more than anybody has clients."""
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def loop_name() -> str:
    """``uvloop`` where it is installed, unless ``PENSTOCK_LOOP=asyncio`` asks for the plain loop."""
    if os.environ.get("PENSTOCK_LOOP", "uvloop") != "asyncio":
        with contextlib.suppress(ImportError):
            import uvloop  # noqa: F401 - whether it is there

            return "uvloop"
    return "asyncio"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the loop: 12 to 27 % more packets with uvloop, nothing else differs."""
    if loop_name() == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


def joins_writes(loop: asyncio.AbstractEventLoop) -> bool:
    """True if the loop's transports collect writes until the end of the turn and send them as one."""
    return type(loop).__module__ == "uvloop"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end in a new loop."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def tune_process() -> None:
    """Set what a server process wants before it allocates much. Call once, early.

    glibc gives large buffers back to the kernel and faults them in again; keeping them doubled what a tube consumer
    got (1 KiB messages). The price: the resident size stays at its peak.

    The shorter switch interval lets a commit thread have the interpreter sooner while the loop is busy (+7 % of
    durable SETs measured; ten times shorter costs more than it gives).

    Descriptors: as many as the system lets the process have, since each client is one.
    """
    if sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        # A C library without mallopt (musl) simply keeps its own ways.
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 256 * 1024 * 1024)
            libc.mallopt(M_TRIM_THRESHOLD, 1024 * 1024 * 1024)
    sys.setswitchinterval(0.0005)
    _raise_descriptor_limit()


def _raise_descriptor_limit() -> None:
    """Let the process have as many descriptors as it may: shells give 1,024, which is as many clients.

    Nothing here uses ``select()``, for whose sake that number is so low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def freeze_memory() -> None:
    """Take everything allocated so far out of garbage collection; call once after start and recovery.

    A full collection of 300,000 recovered objects stops the loop for 32 ms; frozen, for none. The oldest generation is
    then collected less often, because what the hot path keeps is bytes, which hold no cycles.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 100)
