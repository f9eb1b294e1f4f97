from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.spark.store_options import StoreReadOptions, StoreWriteOptions
from penstock.statestore.hlc import Hlc

BASE = {"statestore.broker": "mqtt://127.0.0.1:1883"}


def test_options_as_spark_hands_them_over() -> None:
    assert StoreReadOptions.parse(BASE) == StoreReadOptions("mqtt://127.0.0.1:1883", "*", 1, 10.0)
    assert StoreReadOptions.parse(
        {"statestore.BROKER": "wss://h:1", "KEYS": "a/*", "minpartitions": "3", "statestore.timeoutms": "500"}
    ) == StoreReadOptions("wss://h:1", "a/*", 3, 0.5)
    given = {"orderby": "time", "fencingtoken": "12:3:me", "checkpointlocation": "/x", "queryName": "q"}
    assert StoreWriteOptions.parse(BASE | given) == StoreWriteOptions(
        "mqtt://127.0.0.1:1883", "time", Hlc(12, 3, "me"), 10.0
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"statestore.broker": ""}, "statestore.broker is not set"),
        ({"statestore.broker": "127.0.0.1:1883"}, "cannot be used"),
        ({"keys": ""}, "keys is empty"),
        ({"minPartitions": "0"}, "'0' is not a number above 0"),
        ({"statestore.timeoutMs": "1s"}, "'1s' is not a number above 0"),
        ({"key": "a"}, r"'key' is not known to the aio-statestore source[\s\S]*did you mean keys"),
        ({"path": "a"}, "path is not supported"),
    ],
)
def test_what_a_read_cannot_use(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreReadOptions.parse(BASE | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fencingToken": "12:3"}, "'12:3' is not a version"),
        ({"keys": "a"}, "'keys' is not known"),
        ({"statestore.broker": "http://h"}, "cannot be used"),
    ],
)
def test_what_a_write_cannot_use(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreWriteOptions.parse(BASE | given)
