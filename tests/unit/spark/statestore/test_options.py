from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.spark.statestore.options import SnapshotOptions, StoreFeedOptions, StoreReadOptions, StoreWriteOptions
from penstock.spark.tube.options import COLUMNS, HEADERS, SourceOptions
from penstock.statestore.hlc import Hlc

BASE = {"statestore.broker": "mqtt://127.0.0.1:1883"}


def test_options_of_a_batch() -> None:
    assert StoreReadOptions.parse(BASE).for_batch() == SnapshotOptions("mqtt://127.0.0.1:1883", "*", 1, 10.0)
    given = {"KEYS": "a/*", "minpartitions": "3", "statestore.timeoutms": "500", "includeexpiry": "true"}
    assert StoreReadOptions.parse({"statestore.BROKER": "wss://h:1", **given}).for_batch() == SnapshotOptions(
        "wss://h:1", "a/*", 3, 0.5, include_expiry=True
    )
    with pytest.raises(ConfigError, match="startingVersion is not supported for a batch"):
        StoreReadOptions.parse(BASE | {"startingVersion": "latest"}).for_batch()
    with pytest.raises(ConfigError, match=r"statestore\.broker is not set"):
        StoreReadOptions.parse({}).for_batch()


def test_include_writer_requires_the_change_topic() -> None:
    given = BASE | {"includeWriter": "true"}
    with pytest.raises(ConfigError, match=r"tubemq\.topic is not set"):
        StoreReadOptions.parse(given).for_batch()
    changes = StoreReadOptions.parse(given | TUBE).for_batch().changes
    assert changes is not None
    assert changes.topics == ("changes",)


TUBE = {"tubemq.master": "127.0.0.1:8715", "tubemq.topic": "changes"}


def test_a_stream_reads_the_topic_of_the_changes() -> None:
    options = StoreReadOptions.parse(
        BASE | TUBE | {"keys": "a/*", "minPartitions": "2", "maxOffsetsPerTrigger": "5", "failOnDataLoss": "false"}
    ).for_stream()
    source = SourceOptions(
        "127.0.0.1:8715",
        ("changes",),
        max_messages=5,
        min_partitions=2,
        fail_on_data_loss=False,
        group=options.source.group,
        columns=(*COLUMNS, HEADERS),
    )
    assert options == StoreFeedOptions(
        source, "a/*", "snapshot", SnapshotOptions("mqtt://127.0.0.1:1883", "a/*", 2, 10.0)
    )


@pytest.mark.parametrize(
    ("text", "starting"),
    [
        ("Earliest", "earliest"),
        ("latest", "latest"),
        ("1700000000000", Hlc(1700000000000, 0, "")),
        ("001700000000000:00003:StateStore", Hlc(1700000000000, 3, "StateStore")),
    ],
)
def test_a_stream_without_a_snapshot_needs_no_broker(text: str, starting: object) -> None:
    options = StoreReadOptions.parse(TUBE | {"startingVersion": text}).for_stream()
    assert (options.starting, options.snapshot) == (starting, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (BASE, r"tubemq.topic is not set[\s\S]*set statestore.capture_topic in the node's configuration"),
        (BASE | {"tubemq.topic": "changes"}, "tubemq.master is not set"),
        (TUBE, "statestore.broker is not set"),
    ],
)
def test_missing_stream_options_are_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreReadOptions.parse(given).for_stream()


def test_options_of_a_write() -> None:
    given = {"orderby": "time", "fencingtoken": "12:3:me", "checkpointlocation": "/x", "queryName": "q"}
    assert StoreWriteOptions.parse(BASE | given) == StoreWriteOptions(
        "mqtt://127.0.0.1:1883", "time", Hlc(12, 3, "me"), 10.0
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"statestore.broker": ""}, "statestore.broker is not set"),
        ({"startingVersion": "yesterday"}, "'yesterday' is neither a version nor one of snapshot, earliest, latest"),
        ({"startingOffsets": "latest"}, r"startingOffsets is not supported[\s\S]*set startingVersion"),
        ({"statestore.broker": "amqp://127.0.0.1:1883"}, "cannot be used"),
        ({"keys": ""}, "keys is empty"),
        ({"minPartitions": "0"}, "'0' is not a number above 0"),
        ({"statestore.timeoutMs": "1s"}, "'1s' is not a number above 0"),
        ({"key": "a"}, r"the aio-statestore source has no option 'key'[\s\S]*did you mean keys"),
        ({"path": "a"}, "path is not supported"),
    ],
)
def test_invalid_read_options_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreReadOptions.parse(BASE | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fencingToken": "12:3"}, "'12:3' is not a version"),
        ({"keys": "a"}, "has no option 'keys'"),
        ({"statestore.broker": "http://h"}, "cannot be used"),
    ],
)
def test_invalid_write_options_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreWriteOptions.parse(BASE | given)
