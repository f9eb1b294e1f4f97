"""Prepares the programs of other languages that tests run: ``python -m tests.interop.programs``.

Resolves and builds into the user's cache folder, so that the tests themselves download nothing. The first time takes
minutes; after that it is instant.
"""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests import kustomize
from tests.histories import porcupine as histories
from tests.interop import statestore_go
from tests.interop import test_statestore_rust as rust
from tests.interop.kafka import find_jars
from tests.interop.tube_java.jars import prepare

__all__ = ["main"]

BUILD_S = 900.0


def main() -> int:
    """Prepare each; 1 if one cannot be prepared here, with the reason on standard error."""
    status = 0
    for name, make in (
        ("the checker of histories", histories.prepare),
        ("kustomize", kustomize.prepare),
        ("Apache TubeMQ", prepare),
        ("Kafka", find_jars),
        ("the Go SDK", statestore_go.prepare),
        ("the Rust SDK", _rust),
    ):
        try:
            make()
        except (pytest.skip.Exception, pytest.fail.Exception) as reason:
            sys.stderr.write(f"programs: {name}: {reason}\n")
            status = 1
        else:
            sys.stdout.write(f"programs: {name}: ready\n")
    return status


def _rust() -> None:
    if not rust.is_current():
        asyncio.run(rust.build(BUILD_S))


if __name__ == "__main__":
    sys.exit(main())
