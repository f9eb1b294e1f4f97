"""A state directory in a bucket: lost responses, competing runs, storages without conditional requests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, StorageError, UnavailableError
from penstock.pipelines.ledger import ledger as ledger_module
from penstock.pipelines.ledger.ledger import Ledger, LedgerEntry
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.births import Birth, BirthLog, birth_directory
from penstock.pipelines.state_dir.checkpoint import Checkpoint, Position
from penstock.spark.files import object_storage as storage
from penstock.spark.files.object_storage import ObjectPath, StoragePath, storage_path
from tests.object_storage import ObjectStorage

ENTRY = 'v1\n{{"batchWatermarkMs":0}}\n{{"t":{{"1:0":{end}}}}}'
OLD, NEW = "1696374425000:1:StateStore", "1696374425000:2:StateStore"


def state_in(storage: ObjectStorage) -> ObjectPath:
    found = storage_path(f"{storage.url}/state")
    assert isinstance(found, ObjectPath)
    return found


@pytest.fixture(params=["local", "bucket"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    return tmp_path if request.param == "local" else state_in(request.getfixturevalue("object_storage"))


def entry(batch: int, token: str, **counts: Any) -> LedgerEntry:
    values: dict[str, Any] = dict.fromkeys(("read", "out", "dead", "filtered", "duplicates", "late"), 0)
    values |= {"start": {}, "end": {}, "late_watermark_ms": 0, "watermark_ms": 0, **counts}
    return LedgerEntry(sink="rows", batch=batch, fencing_token=token, **values)


def test_files_are_replaced_created_once_listed_and_removed(state: StoragePath) -> None:
    layout.write_json(layout.plan(state), {"a": 1})
    layout.write_json(layout.plan(state), {"a": 2})
    assert layout.read_json(layout.plan(state)) == {"a": 2}
    assert layout.create_json(layout.owner(state), {"pipeline": "one"})
    assert not layout.create_json(layout.owner(state), {"pipeline": "two"})
    with pytest.raises(ConfigError, match="of the pipeline 'one', not of 'two'"):
        layout.claim(state, "two")
    with pytest.raises(FileNotFoundError):
        layout.read_json(layout.replay(state))
    found = layout.listed(state, re.compile(r".*\.json"))
    assert sorted(match[0] for match in found) == ["pipeline.json", "plan.json"]
    assert layout.listed(layout.ledger(state), re.compile(".*")) == []
    for name in ("one", "two"):
        layout.write_text(layout.shared(state) / "rows" / name, name)
    assert layout.shared(state).exists()
    layout.remove_tree(layout.shared(state))
    assert not layout.shared(state).exists()
    assert layout.owner(state).exists()


def test_a_checkpoint_says_which_batch_is_begun_and_finished(state: StoragePath) -> None:
    checkpoint = Checkpoint(layout.checkpoint(state, "rows"))
    assert (checkpoint.exists(), checkpoint.position()) == (False, Position(0, None, None))
    checkpoint.create()
    query = checkpoint.query_id()
    checkpoint.create()
    assert checkpoint.query_id() == query
    checkpoint.begin(0, ENTRY.format(end=5))
    assert checkpoint.position() == Position(0, None, ENTRY.format(end=5))
    checkpoint.commit(0)
    assert checkpoint.position() == Position(1, ENTRY.format(end=5), None)
    assert checkpoint.planned(0).end == {"t": {"1:0": 5}}
    with pytest.raises(StorageError, match="cannot read the plan of batch 7"):
        checkpoint.planned(7)
    # A run that was paused begins a batch that the next one has begun with another end.
    with pytest.raises(StorageError, match="batch 0 ends at other offsets") as refused:
        checkpoint.begin(0, ENTRY.format(end=6))
    assert "lost its lease" in str(refused.value.why)
    checkpoint.begin(0, ENTRY.format(end=5))


def test_a_run_that_lost_its_lease_cannot_replace_a_ledger_entry(state: StoragePath) -> None:
    ledger = Ledger(layout.ledger(state))
    ledger.write(entry(3, OLD, read=1))
    # The next run repeats the batch, and then once more.
    for read in (2, 3):
        ledger.write(entry(3, NEW, read=read))
    with pytest.raises(StorageError, match="batch 3 of 'rows' is in the ledger already") as refused:
        ledger.write(entry(3, OLD, read=1))
    assert OLD in str(refused.value.why)
    assert NEW in str(refused.value.why)
    ledger.write(entry(10, NEW))
    assert [(each.batch, each.read) for each in ledger.entries("rows")] == [(3, 3), (10, 0)]
    last = ledger.last("rows")
    assert last is not None
    assert last.batch == 10


@pytest.mark.parametrize("paused_at", ["read", "create"])
def test_a_paused_run_finds_the_entry_that_was_written_meanwhile(
    object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch, paused_at: str
) -> None:
    """The later run writes between the moments in which the paused one reads and writes the entry."""
    ledger = Ledger(layout.ledger(state_in(object_storage)))
    name = "replace" if paused_at == "read" else "create"
    if paused_at == "read":
        ledger.write(entry(0, OLD, read=1))
    real = getattr(ObjectPath, name)

    def paused(self: ObjectPath, *arguments: Any) -> bool:
        monkeypatch.setattr(ObjectPath, name, real)
        ledger.write(entry(0, NEW, read=2))
        return bool(real(self, *arguments))

    monkeypatch.setattr(ObjectPath, name, paused)
    with pytest.raises(StorageError, match="is in the ledger already"):
        ledger.write(entry(0, OLD, read=3))
    assert [(each.fencing_token, each.read) for each in ledger.entries("rows")] == [(NEW, 2)]


@pytest.mark.parametrize(
    "kind",
    ["lost", pytest.param("busy", marks=pytest.mark.nightly), pytest.param("cut", marks=pytest.mark.nightly)],
)
def test_a_failed_request_is_repeated_and_not_taken_for_another_run(object_storage: ObjectStorage, kind: str) -> None:
    """Above all if the storage has performed the request, and only its response was lost."""
    state = state_in(object_storage)
    ledger, checkpoint = Ledger(layout.ledger(state)), Checkpoint(layout.checkpoint(state, "rows"))
    steps: list[Callable[[], object]] = [
        lambda: layout.claim(state, "one"),
        checkpoint.create,
        lambda: checkpoint.begin(0, ENTRY.format(end=5)),
        lambda: ledger.write(entry(0, OLD, read=1)),
        lambda: ledger.write(entry(0, NEW, read=2)),
        lambda: checkpoint.commit(0),
    ]
    for step in steps:
        object_storage.fail(kind)
        step()
        assert object_storage.repair() == 1
    object_storage.fail(kind, method="GET", count=2)
    assert [(each.fencing_token, each.read) for each in ledger.entries("rows")] == [(NEW, 2)]
    assert object_storage.repair() == 2
    assert checkpoint.position() == Position(1, ENTRY.format(end=5), None)


def test_of_many_processes_that_create_an_object_one_succeeds(object_storage: ObjectStorage) -> None:
    path = state_in(object_storage) / "commit.json"
    results: list[tuple[int, bool]] = []

    def create(n: int) -> None:
        results.append((n, path.create(b"%d" % n)))

    threads = [threading.Thread(target=create, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [n for n, created in results if created] == [int(path.read_bytes())]


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_storage_that_ignores_conditions_is_refused(object_storage: ObjectStorage, skipped: int) -> None:
    state = state_in(object_storage)
    layout.ready_directory(state)
    # The first request of the check has no condition.
    object_storage.fail("unconditional", path="/state/", skip=1 + skipped)
    with pytest.raises(StorageError, match="does not support If-") as refused:
        layout.ready_directory(state)
    assert ("If-None-Match", "If-Match")[skipped] in refused.value.what
    assert "two runs would overwrite each other" in str(refused.value.why)
    assert state.names() == []


def test_a_storage_that_refuses_the_version_that_it_returned_is_refused(object_storage: ObjectStorage) -> None:
    """As one behind a proxy that changes ETags: an update would be repeated forever."""
    state = state_in(object_storage)
    object_storage.fail("never", path="/state/", skip=3)
    with pytest.raises(StorageError, match="does not support If-Match") as refused:
        layout.ready_directory(state)
    assert "refused a request with the version that it had returned" in str(refused.value.why)
    assert object_storage.repair() == 1
    assert state.names() == []


def test_a_storage_that_cannot_be_reached_or_refuses_is_reported(
    object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ObjectPath("nowhere", "state", object_storage.endpoint, "us-east-1")
    for call in (missing.read_bytes, missing.names, lambda: missing.write_bytes(b""), lambda: missing.create(b"")):
        with pytest.raises(StorageError) as refused:
            call()
        assert refused.value.why == "the bucket does not exist"
    with pytest.raises(StorageError, match="state directory: cannot write to 's3://nowhere/state'"):
        layout.ready_directory(missing)
    monkeypatch.setattr("penstock.spark.files.object_storage._RETRY_S", 0)
    nobody = ObjectPath("lake", "state", "http://127.0.0.1:9", "us-east-1")
    with pytest.raises(UnavailableError, match="cannot be read or written") as unavailable:
        nobody.read_bytes()
    assert "127.0.0.1:9" in str(unavailable.value.why)
    assert "Debug" not in str(unavailable.value.why)


@pytest.mark.parametrize(
    ("variable", "profile"),
    [
        ("AWS_SHARED_CREDENTIALS_FILE", "lake"),
        ("AWS_SHARED_CREDENTIALS_FILE", "default"),
        ("AWS_CONFIG_FILE", "default"),
    ],
)
def test_profiles_of_aws_need_boto3(
    object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, profile: str
) -> None:
    path = state_in(object_storage) / "plan.json"
    layout.write_json(path, {"a": 1})
    file = tmp_path / "file"
    file.write_text(f"[{profile}]\naws_access_key_id = other\naws_secret_access_key = other\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(file if name == variable else tmp_path / "missing"))
    if profile != "default":
        monkeypatch.setenv("AWS_PROFILE", profile)
    assert json.loads(path.read_bytes()) == {"a": 1}


@pytest.mark.parametrize("text", ["[default]\nregion = eu-1\n", "[other]\nsso_session = s\n", "no file of options"])
def test_a_configuration_of_aws_without_credentials_needs_no_boto3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    """The role of the machine has them, which needs no profile."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "missing"))
    assert storage._profile() is None


def test_an_object_is_created_although_another_request_for_it_is_in_progress(object_storage: ObjectStorage) -> None:
    """AWS answers 409 then, also if the other request fails, and the object does not exist."""
    state = state_in(object_storage)
    object_storage.fail("conflict", path="/state/", count=2)
    assert layout.create_json(layout.owner(state), {"pipeline": "one"})
    assert layout.read_json(layout.owner(state)) == {"pipeline": "one"}
    found = layout.owner(state).stored()
    object_storage.fail("conflict", path="/state/")
    assert layout.owner(state).replace(b"{}", found.etag)
    assert object_storage.repair() == 3
    assert layout.owner(state).read_bytes() == b"{}"


def test_an_object_that_cannot_be_created_and_does_not_exist_is_reported(
    object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.spark.files.object_storage._RETRY_S", 0)
    object_storage.fail("conflict", path="/state/")
    with pytest.raises(UnavailableError, match=r"'s3://.*/state/plan\.json' cannot be created"):
        layout.create_json(layout.plan(state_in(object_storage)), {})


def test_a_state_directory_in_a_bucket_is_refused_for_a_source_of_files(object_storage: ObjectStorage) -> None:
    with pytest.raises(ConfigError, match="the source 'drop' reads files, and the state directory 's3://"):
        layout.local_directory(state_in(object_storage), "drop")


def test_births_of_sparkplug_are_objects(object_storage: ObjectStorage) -> None:
    """Two workers write and read the same births; a snapshot replaces those before it."""
    births = birth_directory(layout.checkpoint(state_in(object_storage), "rows"))
    one, other = (BirthLog.of_partition([births], "t/1:0") for _ in range(2))
    for offset in range(70):
        birth = Birth(offset, "plant", "node", None, None, None, ())
        one.add(birth)
        one.write([birth], offset)
    other.refresh()
    last = other.last("plant", "node", None, 70)
    assert last is not None
    assert last.offset == 69
    directory = births / "t%2F1%3A0"
    assert isinstance(directory, ObjectPath)
    names = directory.names()
    assert len([name for name in names if name.endswith(".snapshot.json")]) == 1
    assert len(names) < 10


def test_old_batches_of_the_ledger_are_put_together(state: StoragePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "SEGMENT", 3)
    ledger = Ledger(layout.ledger(state))
    for batch in range(9):
        ledger.write(entry(batch, NEW, read=batch))
    assert len(layout.listed(layout.ledger(state) / "rows", re.compile(r"[0-9]+\.json"))) == 3
    assert [each.read for each in ledger.entries("rows")] == list(range(9))
    assert ledger.counts("rows").read == 36
    with pytest.raises(StorageError, match="batch 1 of 'rows' is in the ledger already"):
        ledger.write(entry(1, OLD))
