"""Apache TubeMQ and Kafka for all tests of a run: one JVM of clients, one start of the servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.kafka import KafkaBroker
from tests.interop.tube_java import topics
from tests.interop.tube_java.clients import JavaClients
from tests.interop.tube_java.jars import Jars, prepare
from tests.interop.tube_java.server import JavaTube


@pytest.fixture(scope="session")
def java() -> Jars:
    """The jars; skips where there is no JDK or Maven."""
    return prepare()


@pytest.fixture(scope="session")
def java_tube(java: Jars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaTube]:
    """Apache's servers, starting: ``ready()`` waits for them."""
    tube = JavaTube(java, tmp_path_factory.mktemp("java_tube"), topics.THEIRS, topics.OURS)
    yield tube
    tube.close()


@pytest.fixture(scope="session")
def java_clients(java: Jars, java_tube: JavaTube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaClients]:
    """Apache's clients. The servers start beside them, since they take longest."""
    assert java_tube is not None
    clients = JavaClients(java, tmp_path_factory.mktemp("java_clients") / "log")
    yield clients
    clients.close()


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker of Kafka. Tests that stop it start it again."""
    kafka = KafkaBroker(tmp_path_factory.mktemp("kafka"))
    kafka.start()
    yield kafka
    kafka.stop()
