"""One Spark session and one node for the whole suite: each takes seconds to start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock.spark
from penstock.pipelines.catalyst import COLUMN_SETTINGS, keep_classes
from penstock.pipelines.run import driver
from penstock.spark.environment import jars
from penstock.spark.environment.java import SHORT_LIVED
from tests.interop.kafka import KafkaBroker
from tests.spark.node import Node
from tests.spark.pipelines import Setup, Shared


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    conf = {
        "spark.sql.streaming.stopTimeout": "30s",
        "spark.driver.extraJavaOptions": f"{SHORT_LIVED} -Xmn512m",
        # Hundreds of queries of one session fill the default of 1 GB.
        "spark.driver.memory": "2g",
        "spark.ui.enabled": "false",
        # A worker has 15 s to start and connect; on a machine that does much else it needs more.
        "spark.python.authenticate.socketTimeout": "60s",
        **COLUMN_SETTINGS,
        **driver.STATE_SETTINGS,
    }
    if jars.is_set_up():
        # Here, since a JVM that runs takes no more jars.
        conf |= jars.delta_settings()
    session = penstock.spark.session("tests", conf=conf, log_level="OFF")
    keep_classes(session)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(Path(tmp_path_factory.mktemp("node"))) as node:
        yield node


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker of Kafka. Tests that stop it start it again."""
    broker = KafkaBroker(tmp_path_factory.mktemp("kafka"))
    broker.start()
    yield broker
    broker.stop()


_numbers = itertools.count()


@pytest.fixture
def new_topic(node: Node) -> Callable[..., str]:
    """Makes a topic of its own for the test."""

    def make(partitions: int = 2, stores: int = 1) -> str:
        name = f"topic_{next(_numbers)}"
        node.create_topic(name, partitions, stores)
        return name

    return make


@pytest.fixture
def setup_of(
    spark: SparkSession, node: Node, new_topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Setup]]:
    """Makes a pipeline out of its file's text, on a topic of its own, that runs in the session of the tests."""
    monkeypatch.setattr(driver, "session", lambda *_args, **_options: Shared(spark))
    yield lambda text, partitions=2: Setup(node, new_topic(partitions), tmp_path, text)
    for query in spark.streams.active:
        query.stop()
