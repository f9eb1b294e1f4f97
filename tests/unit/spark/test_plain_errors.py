"""Errors of data sources as Spark's processes report them."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator

import pytest

from penstock.errors import ConfigError
from penstock.spark.plain_errors import plain_errors
from penstock.spark.tube.source import TubeDataSource, TubeStreamReader


def deeper(text: str) -> ConfigError:
    try:
        raise ValueError(text)
    except ValueError as error:
        raise ConfigError("topic 'a' does not exist", hint="create it") from error


@plain_errors
class Reader:
    def partitions(self) -> list[int]:
        raise deeper("lower layer")

    def read(self, partition: int) -> Iterator[int]:
        yield partition
        raise deeper("lower layer")

    def commit(self, end: str) -> None:
        raise KeyError(end)


def reported(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_an_error_of_ours_has_no_inner_frames() -> None:
    with pytest.raises(ConfigError) as caught:
        Reader().partitions()
    text = reported(caught.value)
    assert "deeper" not in text
    assert "lower layer" not in text
    assert text.endswith("penstock.errors.ConfigError: topic 'a' does not exist\n  hint: create it\n")
    rows = Reader().read(3)
    assert next(rows) == 3
    with pytest.raises(ConfigError) as caught:
        next(rows)
    assert "deeper" not in reported(caught.value)


def test_other_exceptions_keep_their_traceback() -> None:
    with pytest.raises(KeyError) as caught:
        Reader().commit("end")
    assert "raise KeyError(end)" in reported(caught.value)


def test_spark_sees_the_signatures_of_the_methods() -> None:
    # Spark takes a latestOffset with parameters for admission control.
    assert list(inspect.signature(TubeStreamReader.latestOffset).parameters)[1:] == ["start", "limit"]
    with pytest.raises(ConfigError, match="startingOffsets 17") as caught:
        TubeDataSource({"tubemq.master": "a:1", "subscribe": "a", "startingOffsets": "17"}).schema()
    assert "parse_offset_spec" not in reported(caught.value)
