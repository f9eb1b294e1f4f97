"""The change data feed of tables that ``deltalake`` has written, compared with what it reads itself."""

from __future__ import annotations

import itertools
import json
import shutil
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.schema import PrimitiveType

from penstock.errors import ConfigError, DataLossError, PenstockError
from penstock.spark.files import delta_log
from penstock.spark.files.change_feed import (
    ChangeFeed,
    DeltaStreamReader,
    Offsets,
    count_changes,
    read_changes,
)
from penstock.spark.files.delta_log import DeltaLog
from penstock.spark.files.feed_options import FeedOptions

FIELDS: list[pa.Field[Any]] = [
    pa.field("k", pa.int64()),
    pa.field("text", pa.string()),
    pa.field("amount", pa.decimal128(20, 2)),
    pa.field("at", pa.timestamp("us", "UTC")),
    pa.field("day", pa.date32()),
    pa.field("p", pa.int32()),
]
SCHEMA = pa.schema(FIELDS)
AMOUNT = Decimal("123456789012345678.91")
FEED = {"delta.enableChangeDataFeed": "true"}


def rows(*keys: int) -> pa.Table:
    at = datetime(2026, 1, 1, 6, tzinfo=UTC)
    made = [{"k": k, "text": f"ö{k}", "amount": AMOUNT, "at": at, "day": date(2026, 1, 2), "p": k % 2} for k in keys]
    return pa.Table.from_pylist(made, schema=SCHEMA)


def create(path: Path, **configuration: str) -> None:
    DeltaTable.create(
        str(path), deltalake.Schema.from_arrow(SCHEMA), partition_by=["p"], configuration=configuration or FEED
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with all kinds of versions; tests copy it before they change it."""
    path = tmp_path_factory.mktemp("feed") / "ta ble"
    create(path)
    write_deltalake(path, rows(1, 2, 3), mode="append")  # version 1
    DeltaTable(path).update(predicate="k = 2", new_values={"text": "'new'"})
    DeltaTable(path).delete("k = 3")
    merge = DeltaTable(path).merge(rows(1, 9), "new.k = old.k", "new", "old")
    merge.when_matched_delete().when_not_matched_insert_all().execute()
    DeltaTable(path).optimize.compact()  # changes nothing: without a version if there is nothing to compact
    write_deltalake(path, rows(7), mode="append")
    DeltaTable(path).optimize.compact()
    write_deltalake(path, rows(8), mode="overwrite")
    return path


@pytest.fixture
def table(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "ta ble")
    return tmp_path / "ta ble"


def changes(table: Path, start: Offsets, end: Offsets, feed: ChangeFeed | None = None) -> list[dict[str, Any]]:
    """Each change: its row, type, version, and coordinates."""
    found = []
    files = (feed or ChangeFeed(table)).files(start, end)
    for batch in read_changes(table, files):
        for record in batch.to_pylist():
            assert record["headers"] == [{"key": "change_type", "value": record["header.change_type"].encode()}]
            place = (record["partition"], record["topic"], record["offset"])
            row = json.loads(record["value"], parse_float=Decimal)
            found.append({**row, "change": record["header.change_type"], "version": place[0], "place": place})
    assert count_changes(table, files) == len(found)
    assert len({change["place"] for change in found}) == len(found)
    return found


def between(table: Path, first: int, last: int) -> tuple[Offsets, Offsets]:
    name = str(DeltaTable(table).metadata().id)
    return {name: {"version": first}}, {name: {"version": last + 1}}


def test_changes_are_those_that_deltalake_reads(table: Path) -> None:
    newest = DeltaTable(table).version()
    found = changes(table, *between(table, 0, newest))
    expected = pa.table(DeltaTable(table).load_cdf(starting_version=0)).to_pylist()
    assert sorted((c["k"], c["text"], c["p"], c["change"], c["version"]) for c in found) == sorted(
        (c["k"], c["text"], c["p"], c["_change_type"], c["_commit_version"]) for c in expected
    )
    assert {change["change"] for change in found} == {"insert", "delete", "update_preimage", "update_postimage"}
    assert [change["version"] for change in found] == sorted(change["version"] for change in found)
    assert {(c["amount"], c["at"], c["day"]) for c in found} == {(AMOUNT, "2026-01-01T06:00:00+00:00", "2026-01-02")}
    # The same rows in the same order, wherever the range begins.
    for first in range(newest + 1):
        again = changes(table, *between(table, first, newest))
        assert again == [change for change in found if change["version"] >= first]


def test_a_new_query_reads_the_rows_and_then_their_changes(table: Path) -> None:
    options = FeedOptions(str(table), None, None, max_versions=2, max_files=1)
    name = str(DeltaTable(table).metadata().id)
    newest = DeltaTable(table).version()
    write_deltalake(table, rows(10, 11), mode="append")
    reader = DeltaStreamReader({**lowered(options), "start": json.dumps(ChangeFeed(table).start("snapshot"))})
    assert reader.initialOffset() == {name: {"version": newest + 1, "snapshot": 0}}
    batches = [reader.initialOffset()]
    for version in range(12, 18):
        write_deltalake(table, rows(version), mode="append")
    reader.prepareForTriggerAvailableNow()
    write_deltalake(table, rows(99), mode="append")
    while (end := reader.latestOffset(batches[-1])) != batches[-1]:
        batches.append(end)
    # Three files of the snapshot, then one file a version, and one version a batch.
    assert [b[name] for b in batches[:4]] == [
        {"version": newest + 1, "snapshot": 0},
        {"version": newest + 1, "snapshot": 1},
        {"version": newest + 1, "snapshot": 2},
        {"version": newest + 2},
    ]
    assert batches[-1] == {name: {"version": newest + 8}}
    found = [changes(table, start, end) for start, end in itertools.pairwise(batches)]
    assert [[row["k"] for row in batch] for batch in found][3:] == [[12], [13], [14], [15], [16], [17]]
    assert sorted(row["k"] for batch in found[:3] for row in batch) == [8, 10, 11]
    assert {row["change"] for batch in found for row in batch} == {"insert"}
    # Reread in other pieces, as `reconcile` does.
    assert changes(table, batches[0], batches[-1]) == [row for batch in found for row in batch]
    (partition,) = reader.partitions(batches[3], batches[4])
    assert [batch.num_rows for batch in reader.read(partition)] == [1]
    # Spark 4.1 passes no start; after a restart it first asks for the partitions of an empty range.
    restarted = DeltaStreamReader({**lowered(options), "start": json.dumps(batches[0])})
    restarted.partitions(batches[3], batches[3])
    assert restarted.latestOffset() == batches[4]


def lowered(options: FeedOptions) -> dict[str, str]:
    """Options as Spark passes them."""
    return {name.lower(): text for name, text in options.as_texts().items()}


def test_a_batch_has_whole_versions_up_to_its_limits(table: Path) -> None:
    newest = DeltaTable(table).version()
    start, end = between(table, 0, newest)
    feed, (name,) = ChangeFeed(table), start
    assert feed.latest(start) == end
    assert feed.batch(start, end, FeedOptions(str(table), None, None, 3, 100)) == {name: {"version": 3}}
    assert feed.batch(start, end, FeedOptions(str(table), None, None, 100, 1000)) == end
    # Version 1 has two files, more than the limit; version 0 has none.
    assert feed.batch(start, end, FeedOptions(str(table), None, None, 100, 1)) == {name: {"version": 2}}
    assert feed.start("latest") == end
    assert feed.start(2) == {name: {"version": 2}}
    with pytest.raises(ConfigError, match=f"has no version {newest + 2}"):
        feed.start(newest + 2)


def test_changes_of_a_schema_are_in_the_rows_of_their_versions(table: Path) -> None:
    newest = DeltaTable(table).version()
    DeltaTable(table).alter.add_columns([deltalake.Field("more", PrimitiveType("long"))])
    write_deltalake(
        table, rows(1).append_column("more", pa.array([5])).drop_columns(["text"]), mode="append", schema_mode="merge"
    )
    before, after = changes(table, *between(table, newest, newest + 2))[-2:]
    assert "more" not in before
    assert (after["more"], after.get("text")) == (5, None)


def test_a_table_that_lost_versions_or_was_created_again_is_refused(table: Path) -> None:
    newest = DeltaTable(table).version()
    start, end = between(table, 1, newest)
    feed = ChangeFeed(table)
    feed.files(start, end)
    log = table / "_delta_log"

    def again(versions: int) -> None:
        shutil.rmtree(table)
        create(table)
        for n in range(versions):
            write_deltalake(table, rows(n), mode="append")

    moved = table.parent / "moved"
    shutil.copytree(table, moved)
    again(newest + 3)
    with pytest.raises(DataLossError, match="is not the one that was read before"):
        feed.latest({next(iter(end)): {"version": newest + 1}})  # a reader that has been open all the time
    with pytest.raises(DataLossError, match="is not the one that was read before"):
        ChangeFeed(table).files(start, end)
    with pytest.raises(DataLossError, match="is not the one that was read before"):
        ChangeFeed(table).files({next(iter(end)): {"version": 0}}, end)
    again(0)
    with pytest.raises(DataLossError, match="its newest version is 0"):
        ChangeFeed(table).latest(end)
    shutil.rmtree(table)
    shutil.move(moved, table)

    # The log begins at a checkpoint: from the version behind it on, all changes are known.
    DeltaTable(table, version=3).create_checkpoint()
    for version in range(3):
        (log / f"{version:020}.json").unlink()
    first = {next(iter(end)): {"version": 3}}
    assert changes(table, first, end)[0]["version"] == 3
    (log / f"{3:020}.json").unlink()
    assert changes(table, {next(iter(end)): {"version": 4}}, end)[0]["version"] == 4
    with pytest.raises(DataLossError, match="is no longer in its log"):
        ChangeFeed(table).files(first, end)


@pytest.mark.parametrize("is_old", [False, True])
def test_new_versions_are_found_without_listing_the_log(
    table: Path, monkeypatch: pytest.MonkeyPatch, *, is_old: bool
) -> None:
    """But for once a minute: a listing takes a time that grows with the log."""
    if is_old:
        DeltaTable(table).create_checkpoint()
        (table / "_delta_log" / f"{0:020}.json").unlink()
    feed = ChangeFeed(table)
    newest = DeltaTable(table).version()
    start, end = between(table, newest + 1, newest)
    assert feed.latest(start) == end
    monkeypatch.setattr(DeltaLog, "_listed", None)
    assert feed.latest(start) == end
    for n in (1, 2):
        write_deltalake(table, rows(n), mode="append")
    end = between(table, 0, newest + 2)[1]
    assert feed.latest(start) == end
    assert [change["k"] for change in changes(table, start, end, feed)] == [1, 2]


def test_a_log_may_be_cleaned_up_while_it_is_read(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, read = DeltaLog(table), delta_log.lines

    def removed(path: Path) -> list[str]:
        path.unlink()
        return read(path)

    table_id = str(DeltaTable(table).metadata().id)
    DeltaTable(table).create_checkpoint()
    monkeypatch.setattr(delta_log, "lines", removed)
    assert log.oldest_id() == table_id, "the checkpoint has it as well"
    shutil.rmtree(table)
    (table / "_delta_log").mkdir(parents=True)
    (table / "_delta_log" / f"{0:020}.json").touch()
    with pytest.raises(DataLossError, match=r"version 0 of .* is no longer in its log") as caught:
        log.oldest_id()
    assert "removed while the log was read" in (caught.value.why or "")


def test_removed_rows_have_the_partitions_of_their_time(table: Path) -> None:
    newest = DeltaTable(table).version()
    moved = rows(5).set_column(5, "p", pa.array(["x"]))
    write_deltalake(table, moved, mode="overwrite", schema_mode="overwrite", partition_by=["day"])
    write_deltalake(table, rows(6), mode="overwrite", schema_mode="overwrite", partition_by=["k"])
    found = changes(table, *between(table, newest + 1, newest + 2))
    assert [(c["change"], c["k"], c["p"], c["day"]) for c in found] == [
        ("delete", 8, 0, "2026-01-02"),
        ("insert", 5, "x", "2026-01-02"),
        ("delete", 5, "x", "2026-01-02"),
        ("insert", 6, 0, "2026-01-02"),
    ]


def test_a_partition_that_is_null_may_be_left_out(table: Path) -> None:
    """As delta-spark does in the entries of removed files."""
    newest = DeltaTable(table).version()
    entry = {"remove": {"path": "x", "dataChange": True, "extendedFileMetadata": True, "partitionValues": {}}}
    (table / "_delta_log" / f"{newest + 1:020}.json").write_text(json.dumps(entry))
    (file,) = ChangeFeed(table).files(*between(table, newest + 1, newest + 1))
    assert (file.change, file.columns) == ("delete", {"p": None})


def test_footers_are_read_once(table: Path) -> None:
    files = ChangeFeed(table).files(*between(table, 0, DeltaTable(table).version()))
    known: dict[str, int] = {}
    count = count_changes(table, files, known)
    assert known
    for file in files:
        Path(file.path).unlink(missing_ok=True)
    assert count_changes(table, files, known) == count
    with pytest.raises(DataLossError):
        count_changes(table, files)


def test_removed_files_are_a_loss_of_data(table: Path) -> None:
    newest = DeltaTable(table).version()
    start, end = between(table, 0, newest)
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(DataLossError, match=r"of version 1 of the Delta table .* no longer exists"):
        changes(table, start, end)
    # A query that starts now does not need them.
    name = next(iter(start))
    now = {name: {"version": newest, "snapshot": 0}}
    newest = DeltaTable(table).version()
    assert [c["k"] for c in changes(table, now, {name: {"version": newest + 1}})] == [8]


def test_a_table_without_a_feed_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "t"
    with pytest.raises(ConfigError, match="is not a Delta table"):
        ChangeFeed(table).check()
    create(table, **{"delta.enableChangeDataFeed": "false"})
    write_deltalake(table, rows(1), mode="append")
    for refused in (ChangeFeed(table).check, lambda: ChangeFeed(table).start("latest")):
        with pytest.raises(ConfigError, match="has no change data feed") as caught:
            refused()
        assert "set change_data_feed: true" in (caught.value.hint or "")
    DeltaTable(table).alter.set_table_properties(FEED)
    write_deltalake(table, rows(2), mode="append")
    ChangeFeed(table).check()
    with pytest.raises(PenstockError, match=r"version 1 of .* has no change data feed"):
        ChangeFeed(table).start(1)
    start, end = between(table, 2, 3)
    assert [c["k"] for c in changes(table, start, end)] == [2]
    (name,) = start
    assert [c["k"] for c in changes(table, {name: {"version": 3, "snapshot": 0}}, end)] in ([1, 2], [2, 1])


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ({"remove": {"path": "x", "dataChange": True, "partitionValues": {"p": "1"}, "deletionVector": {"a": 1}}},
         "it has deletion vectors"),
        ({"remove": {"path": "x", "dataChange": True}}, "removes a file without its value of 'p'"),
        ({"metaData": {"id": "other", "schemaString": '{"fields": []}', "configuration": FEED}}, "is not the one"),
    ],
)  # fmt: skip
def test_versions_that_cannot_be_read_are_refused(table: Path, action: dict[str, Any], says: str) -> None:
    newest = DeltaTable(table).version()
    start, _ = between(table, newest, newest)
    (table / "_delta_log" / f"{newest + 1:020}.json").write_text(json.dumps(action))
    with pytest.raises(PenstockError, match=says):
        ChangeFeed(table).latest(start)
