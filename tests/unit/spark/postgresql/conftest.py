"""One server for all tests of PostgreSQL, which takes a second to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgresql import Postgres, running_postgres


@pytest.fixture(scope="package")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server
