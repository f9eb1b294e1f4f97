"""Limits of the test's process, as the operating system enforces them."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator

__all__ = ["descriptor_limit", "file_size_limit", "first_free_descriptor"]


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file grows beyond ``size`` bytes: a write across the limit is cut short, as on a disk that becomes full."""
    with _limit(resource.RLIMIT_FSIZE, size):
        yield


@contextlib.contextmanager
def descriptor_limit(count: int) -> Iterator[None]:
    """No descriptor from ``count`` on can be opened; open ones stay open, and garbage frees none."""
    gc.disable()
    try:
        with _limit(resource.RLIMIT_NOFILE, count):
            yield
    finally:
        gc.enable()


def first_free_descriptor() -> int:
    """Return the descriptor that the next file gets, after garbage has freed its own."""
    gc.collect()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


@contextlib.contextmanager
def _limit(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
