"""Power is lost after any operation of the master's store: every acknowledged topic and setting is recovered.

As for the state store (``test_statestore_power_loss.py``): the log's writes and fsyncs are recorded, LMDB is copied
after each of its transactions, and for prefixes of the record the store is opened on what the disk may hold then.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from penstock.runtime.io.files import SECTOR, Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.tube.engine.master.settings import ConsumeControl, Removal, Setting, TopicSetting, key_of
from penstock.tube.master.metadata import SCHEMA, TABLES, SettingStore
from tests.faults.lmdb_copies import LmdbCopies, notes_of
from tests.unit.runtime.recorded_disk import Op, RecordedDisk, after_power_loss

Settings = dict[tuple[str, str], Setting]


class _Unfollowed(LoggedEnvironment):
    """LMDB is updated by the commit that finds no room in the log."""

    def _follow(self) -> None: ...


def opened(path: Path, disk: RecordedDisk) -> SettingStore:
    tables = LmdbEnvironment(
        path, "tube settings", "master that has them", TABLES, schema=SCHEMA, durability=Durability.DURABLE
    )
    return SettingStore(path, environment=_Unfollowed(tables, files=disk, segment_bytes=6 * SECTOR))


def some_changes(random: Random, commit: int) -> list[Setting | Removal]:
    changes: list[Setting | Removal] = []
    for _ in range(random.randrange(1, 4)):
        name = f"topic-{random.randrange(12)}"
        chance = random.random()
        if chance < 0.6:
            changes.append(TopicSetting(name, commit, 1, delete_policy="x" * random.randrange(200)))
        elif chance < 0.8:
            changes.append(ConsumeControl("group", name, reason=f"{commit}"))
        else:
            changes.append(Removal(*key_of(TopicSetting(name))))
    return changes


def after(settings: Settings, changes: list[Setting | Removal]) -> Settings:
    """The settings after ``changes``, one after the other."""
    found = dict(settings)
    for change in changes:
        if isinstance(change, Removal):
            found.pop(key_of(change), None)
        else:
            found[key_of(change)] = change
    return found


def test_every_acknowledged_setting_is_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(21)
    disk = RecordedDisk()
    path = tmp_path / "master"
    copies = LmdbCopies(path, tmp_path, disk)
    states: list[Settings] = [{}]
    with monkeypatch.context() as patch:
        copies.after_transactions(patch)
        store = opened(path, disk)
        copies.copy()
        first = len(disk.ops)
        for number in range(1, 40):
            changes = some_changes(random, number)
            states.append(after(states[-1], changes))
            disk.note(("begun", number))
            store.put(changes)
            disk.note(("acknowledged", number))
        ops = list(disk.ops)
        store.close()
    assert copies.count > 4
    tried = sum(check(tmp_path, ops[:end], states, random) for end in range(first + 1, len(ops) + 1, 3))
    assert tried > 100


def check(folder: Path, ops: list[Op], states: list[Settings], random: Random) -> int:
    """Recover from every disk after ``ops``: the settings of a commit that began, none older than acknowledged."""
    notes = notes_of(ops)
    tried = 0
    for name, disk in after_power_loss(ops, {}, random):
        path = folder / "recovered"
        shutil.copytree(folder / f"copy-{notes['lmdb']}", path)
        store = opened(path, RecordedDisk({path / log.name: data for log, data in disk.files().items()}))
        found = {key_of(setting): setting for setting in store.load()}
        store.close()
        shutil.rmtree(path)
        assert found in states[notes.get("acknowledged", 0) : notes.get("begun", 0) + 1], (len(ops), name)
        tried += 1
    return tried
