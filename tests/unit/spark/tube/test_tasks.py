from __future__ import annotations

import gc

import pytest
from pyspark import TaskContext

from penstock.spark.tube import source
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.source import TubeReader
from tests.unit.spark.fake_tube import FakeBroker, FakeTube

BASE = {"tubemq.master": "127.0.0.1:8715", "subscribe": "a", "tubemq.timeoutMs": "1"}


def read_everything() -> int:
    broker = FakeBroker(1, 8123, logs={"a": [(0, b"x"), (1, b"y")]}, partitions={"a": 2})
    reader = TubeReader(SourceOptions.parse(BASE), FakeTube(broker))
    return sum(rows.num_rows for task in reader.partitions() for rows in reader.read(task))


def test_objects_loaded_by_an_executor_are_excluded_from_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    source._freeze_gc.cache_clear()
    assert read_everything() == 2
    assert frozen == []  # no task of Spark: whoever reads here may have garbage of its own
    monkeypatch.setattr(TaskContext, "get", object)
    assert read_everything() == read_everything() == 2
    assert frozen == [1]
    source._freeze_gc.cache_clear()
