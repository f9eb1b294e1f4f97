"""External programs that some tests need: present, or skipped with a printed reason, or required."""

from __future__ import annotations

import os
import shutil

import pytest

__all__ = ["require_tool", "skip_or_fail"]


def skip_or_fail(reason: str) -> None:
    """Skip the test for ``reason``; with ``PENSTOCK_REQUIRE=all`` a missing tool is a failure."""
    if os.environ.get("PENSTOCK_REQUIRE") == "all":
        pytest.fail(f"{reason} (PENSTOCK_REQUIRE=all: nothing may be skipped)")
    pytest.skip(reason)


def require_tool(name: str) -> str:
    """The path of the program ``name``; skips (or fails) the test where it is not installed."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if path is None:
        skip_or_fail(f"{name} is not installed: `make system` installs it")
        raise AssertionError
    return path
