"""Fixtures with etcd, for all suites."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.etcd import EtcdCluster


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three running members of etcd."""
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    cluster.start()
    yield cluster
    cluster.close()
