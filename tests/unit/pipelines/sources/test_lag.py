"""Lag in records and seconds, against a tube of numbers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.errors import UnavailableError
from penstock.pipelines.sources.lag import Lag, PollingMeter, measure
from penstock.pipelines.sources.readers import DeltaSourceReader, FilesSourceReader, QueryInput
from penstock.pipelines.spec.sources import DeltaSource, FilesSource
from penstock.pipelines.state_dir import layout
from penstock.spark.files import source as files
from penstock.spark.tube.offsets import Bounds, Slice, TopicPartition
from penstock.spark.tube.tube_client import TubeClient
from penstock.tube.reader import MessageBatch

NOW_MS = 1_000_000
P0, P1 = TopicPartition("t", 1, 0), TopicPartition("t", 1, 1)


class Numbers:
    """Partitions that share one store, as (partition, append time) by position."""

    def __init__(self, *records: tuple[TopicPartition, int], oldest: int = 0) -> None:
        self.records = records
        self.oldest = oldest
        self.away = False
        self.ranges = True

    def __enter__(self) -> Numbers:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def partitions(self, _topics: Iterable[str], *, max_age_s: float) -> list[TopicPartition]:
        if self.away:
            raise UnavailableError("away")
        return [P0, P1]

    def bounds(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, Bounds]:
        return dict.fromkeys(partitions, Bounds(self.oldest, 28 * len(self.records)))

    def replaced(self, *_: object) -> dict[TopicPartition, int]:
        return {}

    def has_ranges(self, _partition: TopicPartition) -> bool:
        return self.ranges

    def weigh(self, piece: Slice) -> int:
        return len(self._of(piece))

    def plan(self, piece: Slice, most: int) -> tuple[int, int]:
        found = self._of(piece)[:most]
        return found[-1] + 28, len(found)

    def read(self, piece: Slice) -> Iterator[MessageBatch]:
        found = self._of(piece)
        yield MessageBatch.from_payloads(
            found, [self.records[p // 28][1] for p in found], [0] * len(found), [b""] * len(found)
        )

    def _of(self, piece: Slice) -> list[int]:
        return [p for p in range(piece.start, piece.end, 28) if self.records[p // 28][0] == piece.partition]


def there_is(tube: TubeClient) -> Mapping[TopicPartition, Bounds]:
    return tube.bounds(tube.partitions(["t"], max_age_s=0.0))


def lag(tube: Numbers, end: dict[str, int]) -> Lag:
    return measure(cast(TubeClient, tube), tube.bounds([P0, P1]), {"t": end}, NOW_MS)


def test_records_and_the_age_of_the_oldest() -> None:
    tube = Numbers((P0, NOW_MS - 9_000), (P1, NOW_MS - 8_000), (P0, NOW_MS - 2_000), (P1, NOW_MS - 1_000))
    assert lag(tube, {"1:0": 112, "1:1": 112}) == Lag(0, 0.0)
    assert lag(tube, {"1:0": 28, "1:1": 112}) == Lag(1, 2.0)
    assert lag(tube, {"1:0": 0, "1:1": 0}) == Lag(4, 9.0)
    # What lies behind P0's position in the store belongs to P1.
    assert lag(tube, {"1:0": 84, "1:1": 112}) == Lag(0, 0.0)
    # New partitions are read from their oldest record on; what is gone is no lag.
    assert lag(tube, {"1:1": 112}) == Lag(2, 9.0)
    tube.oldest = 56
    assert lag(tube, {"1:0": 0, "1:1": 0}) == Lag(2, 2.0, unread=1.0)
    # Brokers that are not asked for the oldest.
    tube.ranges = False
    assert lag(tube, {"1:0": 0, "1:1": 0}) == Lag(2, None, unread=1.0)
    tube.ranges = True
    # A clock behind the broker's.
    assert measure(cast(TubeClient, tube), tube.bounds([P0]), {"t": {"1:0": 0}}, 0).seconds == 0.0


def test_the_unread_share_of_what_retention_has_left() -> None:
    # Of records 2 to 11: 10 are stored.
    tube = Numbers(*((P0, NOW_MS) for _ in range(12)), oldest=56)
    assert lag(tube, {"1:0": 28 * 4, "1:1": 336}) == Lag(8, 0.0, unread=0.8)
    assert lag(tube, {"1:0": 336, "1:1": 336}) == Lag(0, 0.0)
    assert lag(tube, {"1:0": 28, "1:1": 336}) == Lag(10, 0.0, unread=1.0), "the oldest of them is deleted already"
    tube.oldest = 0
    assert lag(tube, {"1:0": 0, "1:1": 336}).unread == 0.0, "nothing was deleted yet"


def test_the_meter_measures_when_asked_and_a_last_time() -> None:
    tube = Numbers((P0, NOW_MS - 3_000))
    measured = threading.Event()

    def measure_all(tube: TubeClient, ends: Mapping[str, Any]) -> dict[str, Lag]:
        bounds = there_is(tube)
        measured.set()
        return {name: measure(tube, bounds, end, NOW_MS) for name, end in ends.items()}

    meter = PollingMeter(lambda: cast(TubeClient, tube), measure_all)
    meter.start()
    ends: dict[str, Any] = {"rows": {"t": {"1:0": 0, "1:1": 0}}}
    assert meter.lag_of("rows") is None
    meter.request(ends)
    assert measured.wait(60)
    meter.close({"rows": {"t": {"1:0": 28, "1:1": 28}}})
    assert meter.lag_of("rows") == Lag(0, 0.0)
    tube.away = True
    other = PollingMeter(lambda: cast(TubeClient, tube), measure_all)
    other.start()
    other.close(ends)
    assert other.lag_of("rows") is None


def test_the_last_measurement_is_made_also_if_the_thread_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = PollingMeter(lambda: cast(TubeClient, Numbers()), lambda _tube, ends: dict.fromkeys(ends, Lag(7, None)))
    meter.start()
    wake = meter._asked.set

    def end() -> None:
        wake()
        meter._thread.join()

    monkeypatch.setattr(meter._asked, "set", end)
    meter.close({"rows": {}})
    assert meter.lag_of("rows") == Lag(7, None)


def test_a_meter_that_was_never_started_ends() -> None:
    PollingMeter(lambda: cast(TubeClient, Numbers()), lambda _tube, _ends: {}).close({})


def test_the_lag_of_a_change_feed(tmp_path: Path) -> None:
    rows = pa.table({"k": [1, 2, 3]})
    feed = {"delta.enableChangeDataFeed": "true"}
    write_deltalake(tmp_path, rows, configuration=feed)
    DeltaTable(tmp_path).update(predicate="k > 1", updates={"k": "k + 10"})
    table_id = str(DeltaTable(tmp_path).metadata().id)
    ends: dict[str, Any] = {name: {table_id: {"version": n}} for n, name in enumerate(("all", "update", "none"))}

    def measured() -> dict[str, Lag | None]:
        now = committed_ms + 5_000
        meter = DeltaSourceReader("t", DeltaSource(format="delta", path=str(tmp_path))).meter(lambda: now)
        meter.start()
        meter.close(ends)
        return {name: meter.lag_of(name) for name in ends}

    log = tmp_path / "_delta_log" / f"{1:020}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    committed_ms = next(action["commitInfo"]["timestamp"] for action in actions if "commitInfo" in action)
    found = measured()
    assert found["all"] is not None
    assert found["all"].records == 3 + 2 * 2
    assert (found["update"], found["none"]) == (Lag(4, 5.0), Lag(0, 0.0))
    log.write_text("\n".join(json.dumps(action) for action in actions if "commitInfo" not in action))
    assert measured()["update"] == Lag(4, None), "the time of the changes is not known"
    log.unlink()
    assert measured() == dict.fromkeys(ends)


def test_files_of_a_batch_are_counted_without_reading_their_whole_list_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, state = tmp_path / "a", tmp_path / "state"
    file.write_text("x")
    (entry,) = files.list_new_files(str(tmp_path), "lines", 0, set())
    log = files.FileLog(layout.file_log(state, "rows", "source"))
    log.append([entry] * 50)
    reader = FilesSourceReader("source", FilesSource(format="files", path=str(tmp_path)), state)
    parsed: list[object] = []

    def counted(line: bytes) -> Any:
        parsed.append(line)
        return json.loads(line)

    monkeypatch.setattr(files, "json", SimpleNamespace(loads=counted, dumps=json.dumps))
    begin, end = ({"files": {"0": at}} for at in (48, 50))
    for _ in range(10):
        assert reader.count(QueryInput("rows", "source", state), begin, end) == 2
    assert len(parsed) == 50
