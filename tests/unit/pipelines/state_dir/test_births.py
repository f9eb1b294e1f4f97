"""Births of Sparkplug in files: what applies at an offset, by whichever process it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.pipelines.state_dir import births
from penstock.pipelines.state_dir.births import Birth, BirthLog, MetricDefinition

TEMPERATURE = (MetricDefinition("temperature", 1, 10),)
PRESSURE = (MetricDefinition("pressure", 1, 10),)
PARTITION = "source/plant/1/0"


def birth(
    offset: int,
    device: str | None = None,
    metrics: tuple[MetricDefinition, ...] | None = TEMPERATURE,
    node: str = "press",
) -> Birth:
    return Birth(offset, "plant", node, device, 1000 + offset, None, metrics)


def log(*directories: Path) -> BirthLog:
    """Return the log as another process reads it."""
    made = BirthLog.of_partition(directories, PARTITION)
    made.refresh()
    return made


def written(path: Path, *found: Birth, batch_start: int = 0) -> BirthLog:
    made = log(path)
    for each in found:
        made.add(each)
    made.write(found, batch_start)
    return made


def last(found: BirthLog, offset: int, device: str | None = None) -> int | None:
    one = found.last("plant", "press", device, offset)
    return None if one is None else one.offset


def test_the_last_birth_before_an_offset_applies(tmp_path: Path) -> None:
    written(tmp_path, birth(10), birth(30, metrics=PRESSURE))
    found = log(tmp_path)
    assert [last(found, at) for at in (10, 11, 30, 31)] == [None, 10, 10, 30]
    again = found.last("plant", "press", None, 31)
    assert again == birth(30, metrics=PRESSURE)
    assert again.by_alias[1].name == "pressure"
    assert found.last("plant", "other", None, 31) is None


def test_births_and_deaths_of_an_edge_node_end_those_of_its_devices(tmp_path: Path) -> None:
    written(
        tmp_path,
        *(birth(10), birth(20, "pump"), birth(25, "valve"), birth(30, "valve", None)),
        *(birth(40), birth(50, "pump"), birth(60, metrics=None)),
    )
    found = log(tmp_path)
    assert [last(found, at, "pump") for at in (20, 21, 41, 51, 61)] == [None, 20, None, 50, None]
    assert [last(found, at, "valve") for at in (26, 31)] == [25, None]
    assert last(found, 61) is None
    assert [each.offset for each in found.alive("plant", "press", 30)] == [10, 20, 25]
    assert [each.offset for each in found.alive("plant", "press", 31)] == [10, 20]
    assert found.alive("plant", "press", 61) == []


def test_other_partitions_are_separate(tmp_path: Path) -> None:
    written(tmp_path, birth(10))
    other = BirthLog.of_partition([tmp_path], "source/plant/1/1")
    other.refresh()
    assert last(other, 99) is None
    names = [path.name for path in tmp_path.iterdir()]
    assert names == ["source%2Fplant%2F1%2F0"]


def test_a_process_sees_what_another_has_written_since(tmp_path: Path) -> None:
    first = log(tmp_path)
    written(tmp_path, birth(10))
    assert last(first, 99) is None
    first.refresh()
    assert last(first, 99) == 10


def test_births_that_are_written_again_change_nothing(tmp_path: Path) -> None:
    written(tmp_path, birth(10), birth(20, "pump"))
    written(tmp_path, birth(10))
    found = written(tmp_path, birth(10), birth(20, "pump"), birth(30))
    assert len(list((tmp_path / "source%2Fplant%2F1%2F0").iterdir())) == 2
    assert [each.offset for each in found.alive("plant", "press", 99)] == [30]


def test_each_sink_of_a_query_stores_what_is_read_and_uses_what_another_has(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    written(first, birth(10), birth(20, "pump"))
    both = log(second, first)
    assert last(both, 99, "pump") == 20
    # The second sink is behind, and reads the birth of the device that the first one has read.
    both.write([birth(20, "pump"), birth(30, "valve")], 20)
    assert [last(log(path), 99, device) for path in (first, second) for device in ("pump", "valve")] == [20, 30, 20, 30]
    assert (last(log(first), 99), last(log(second), 99)) == (10, None)


def test_a_snapshot_replaces_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(births, "_MOST_FILES", 4)
    reader = log(tmp_path)
    for offset in range(10, 60, 10):
        found = log(tmp_path)
        made = [birth(offset), birth(offset + 1, "pump"), birth(offset + 2, node=f"other-{offset}")]
        for each in made:
            found.add(each)
        found.write(made, offset)
        if offset == 20:
            reader.refresh()
    names = sorted(path.name for path in (tmp_path / "source%2Fplant%2F1%2F0").iterdir())
    assert [(int(name[:20]), "snapshot" in name) for name in names] == [(50, True), (52, False)]
    reader.refresh()
    for process in (reader, log(tmp_path)):
        # From the start of the batch on, all is as before.
        assert [last(process, at) for at in (50, 51)] == [40, 50]
        assert [last(process, at, "pump") for at in (50, 51, 52)] == [41, None, 51]
        assert [each.offset for node in range(10, 60, 10) for each in process.alive("plant", f"other-{node}", 99)] == [
            *(12, 22, 32, 42, 52)
        ]


def test_a_crash_while_a_snapshot_replaces_files_brings_no_dead_device_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(births, "_MOST_FILES", 3)
    for each in (birth(10), birth(20, "pump"), birth(30, "pump", None)):
        written(tmp_path, each)
    (born,) = (tmp_path / "source%2Fplant%2F1%2F0").glob("*20-*")
    text = born.read_text()
    written(tmp_path, birth(40, "valve"), batch_start=40)
    # The worker ended after it had deleted the file with the death, and before it deleted that with the birth.
    born.write_text(text)
    assert [last(log(tmp_path), 99, device) for device in (None, "pump", "valve")] == [10, None, 40]
    for offset in (50, 60, 70):
        written(tmp_path, birth(offset, "valve"), batch_start=offset)
    assert [last(log(tmp_path), 99, device) for device in (None, "pump", "valve")] == [10, None, 70]
    assert not born.exists()


def test_files_that_are_deleted_with_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    found = written(tmp_path, birth(10))
    for path in (tmp_path / "source%2Fplant%2F1%2F0").iterdir():
        path.unlink()
    found.refresh()
    assert last(found, 99) is None


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    written(tmp_path, birth(10))
    (path,) = (tmp_path / "source%2Fplant%2F1%2F0").iterdir()
    path.write_text("{")
    with pytest.raises(StorageError, match="births of Sparkplug are not readable"):
        log(tmp_path)
