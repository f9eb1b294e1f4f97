"""Data directories of earlier versions open, and nothing in them is lost or repeated."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

from penstock.mqtt.codec.packets import PubComp, Publish, PubRec, PubRel, Subscribe, Subscription
from penstock.node.fsck import check_directory
from penstock.pipelines.sinks.table import files
from tests.end_to_end.nodes import RunningNode
from tests.stored_directories import CONFIG, MqttConnection, extract, names, pipeline, reading


class Stored(NamedTuple):
    """A node over an archive, and what the clients that wrote it had been told."""

    node: RunningNode
    told: dict[str, Any]
    stopped: bool
    """Whether the node was stopped, not killed."""


BY_DAY = {names()[0], names()[-1]}
"""The oldest archive, of a killed node, and the newest one, of a stopped node. Each archive has a node of its own, the
others every night; all are examined for damage."""


@pytest.fixture(
    scope="module",
    params=[name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in names()],
)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    directory = tmp_path_factory.mktemp("stored")
    told = extract(request.param, directory)
    with RunningNode(directory, CONFIG) as node:
        yield Stored(node, told, request.param.endswith("-stopped"))


@pytest.mark.parametrize("name", names())
def test_nothing_is_damaged(name: str, tmp_path: Path) -> None:
    extract(name, tmp_path)
    assert [each for each in check_directory(tmp_path / "data").problems if each.damaged] == []


def test_the_node_is_ready(stored: Stored) -> None:
    with urllib.request.urlopen(f"http://{stored.node.ready['http']}/readyz", timeout=60) as response:
        assert response.status == 200


def test_keys_keep_value_version_and_token(stored: Stored) -> None:
    node, told, _ = stored
    found = {key: node.rows("kv", "get", key)[0] for key in told["keys"]}
    assert found == told["keys"]
    assert node.penstock("kv", "get", "deleted").returncode == 1
    older, newer = told["tokens"]
    assert node.penstock("kv", "set", "guarded", "c", "--fencing-token", older).returncode == 1
    assert node.penstock("kv", "set", "guarded", "c", "--fencing-token", newer).returncode == 0
    version = node.out("kv", "set", "another", "1").strip()
    assert all(version > row["version"] for row in told["keys"].values())


def test_a_session_continues_where_it_was(stored: Stored) -> None:
    node, told, _ = stored
    with MqttConnection(node.ready["mqtt"], "half-done") as connection:
        assert connection.connack.session_present
        release = connection.next()
        assert isinstance(release, PubRel)
        assert release.packet_id == told["released"]
        connection.send(PubComp(release.packet_id))
        waiting = {}
        for _ in range(3):
            publish: Any = connection.next()
            waiting[publish.topic] = (publish.payload, publish.qos, publish.properties.user_properties)
        assert waiting == {
            "queued/1": (b"waiting 1", 1, [("site", "berlin")]),
            "queued/2": (b"waiting 2", 2, [("site", "berlin")]),
            "shared/1": (b"waiting for the group", 1, []),
        }
        # Sent again, the QoS 2 message that was not released is acknowledged and not published a second time.
        connection.send(Publish("plant/unreleased", b"once", qos=2, dup=True, packet_id=77))
        assert connection.next() == PubRec(77)
    values = [row["value"] for row in node.rows("tube", "consume", "telemetry")]
    assert values.count("once") == 1


def test_a_retained_message_keeps_its_properties(stored: Stored) -> None:
    with MqttConnection(stored.node.ready["mqtt"], "new") as connection:
        connection.send(Subscribe(1, [Subscription("kept/#", 0)]))
        connection.next()
        publish: Any = connection.next()
        assert (publish.topic, publish.payload, publish.retain) == ("kept/setpoint", b"21.5", True)
        assert publish.properties.content_type == "text/plain"
        assert publish.properties.user_properties == [("site", "berlin")]


def test_records_keep_their_offsets_and_groups_continue(stored: Stored) -> None:
    node, told, _ = stored
    assert node.rows("tube", "consume", "telemetry")[: len(told["records"])] == told["records"]
    rest = node.rows("tube", "consume", "telemetry", "--group", "reader")
    read = [(row["partition"], row["offset"]) for row in (*told["read"], *rest)]
    every = {(row["partition"], row["offset"]) for row in told["records"]}
    assert set(read) == every
    if stored.stopped:  # a killed broker may have lost the last committed offsets of a group: decision 34
        assert len(read) == len(every)
    partitions = {row["topic"]: row["partitions"] for row in node.rows("tube", "topic", "list")}
    assert (partitions["telemetry"], partitions["orders"]) == (2, 1)


STOPPED = [name for name in names() if name.endswith("-stopped")]


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", STOPPED)
def test_a_pipeline_continues_exactly_once(name: str, tmp_path: Path) -> None:
    """A run starts Java: tests/spark/test_stored_pipeline.py continues the oldest one in the session of its suite."""
    extract(name, tmp_path)
    with RunningNode(tmp_path, CONFIG) as node:
        node.out("mqtt", "pub", "plant/telemetry", "--lines", stdin=f"{reading(12)}\n{reading(13)}\n".encode())
        pipeline(tmp_path, node, "run", "--once")
        assert sorted(column(tmp_path / "lake/rows", "celsius")) == [float(number) for number in range(14)]
        assert sorted(column(tmp_path / "lake/dead", "value")) == [b"not JSON", b"once"]
        pipeline(tmp_path, node, "reconcile")
    # A dedupe of an earlier version keeps its state where it was, on Java's heap; a new one uses RocksDB.
    offsets = next((tmp_path).rglob("checkpoints/rows/offsets"))
    newest = max((entry for entry in offsets.iterdir() if entry.name.isdecimal()), key=lambda entry: int(entry.name))
    assert ".HDFSBackedStateStoreProvider" in newest.read_text()


def column(table: Path, name: str) -> list[Any]:
    """A column of a table that a pipeline wrote: of its committed files alone."""
    return [value for file in files(table) for value in pq.ParquetFile(file).read([name])[name].to_pylist()]
