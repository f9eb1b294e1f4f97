"""Power is lost after any operation of the MQTT session store: what a commit that returned wrote is recovered.

As for the state store (``test_statestore_power_loss.py``): the log's writes and fsyncs are recorded, LMDB is copied
after each of its transactions, and for prefixes of the record the store is opened on what the disk may hold then.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.engine.model.journal import Journal, Recovered, SessionRow
from penstock.mqtt.engine.model.message import Message, message_of
from penstock.mqtt.storage import SessionStore
from tests.faults.lmdb_copies import LmdbCopies, notes_of
from tests.unit.runtime.recorded_disk import RecordedDisk, after_power_loss

SEGMENT = 8 * 512
SESSION = 1


class State(NamedTuple):
    """What a start must find."""

    retained: dict[str, bytes]
    deliveries: dict[int, bytes]
    progress: dict[int, int]

    def copied(self) -> State:
        return State(dict(self.retained), dict(self.deliveries), dict(self.progress))


def state_of(found: Recovered) -> State:
    return State(
        {row.topic_wire[2:].decode(): row.payload for row in found.retained},
        {row.number: row.message.payload for row in found.deliveries},
        {row.number: row.packet_id for row in found.progress},
    )


class Client:
    """One session whose messages come, are sent and acknowledged at random, and retained messages."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.journal = Journal()
        self.journal.session(SessionRow(SESSION, "c", "", None, 5, 60, 0, None, 0, awaited=True))
        self.journal.start_at(SESSION + 1)
        self.waiting: dict[int, Message] = {}
        self.state = State({}, {}, {})

    def act(self, commit: int) -> State:
        """Record some changes; the state after them."""
        retained, deliveries, progress = self.state.copied()
        for _ in range(self.random.randrange(1, 4)):
            chance, payload = self.random.random(), b"%d " % commit + bytes(self.random.randrange(300))
            topic = f"t/{self.random.randrange(8)}"
            if chance < 0.4:
                payload = payload if chance < 0.3 else b""  # deletes
                self.journal.retained(topic, message_of(Publish(topic, payload, 1, retain=True), 0))
                retained.pop(topic, None)
                if payload:
                    retained[topic] = payload
            elif chance < 0.8 or not self.waiting:
                message = message_of(Publish(topic, payload, 1), 0)
                number = self.journal.queue(SESSION, message, 1, 0, b"", 0, awaited=True)
                self.waiting[number] = message
                deliveries[number] = payload
            else:
                number = self.random.choice(list(self.waiting))
                if number in progress:
                    self.journal.done(number, self.waiting.pop(number))
                    del progress[number], deliveries[number]
                else:
                    self.journal.sent(SESSION, number, number % 60_000 + 1, awaited=True)
                    progress[number] = number % 60_000 + 1
        self.state = State(retained, deliveries, progress)
        return self.state


def test_every_acknowledged_change_is_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(17)
    disk = RecordedDisk()
    path = tmp_path / "store"
    copies = LmdbCopies(path, tmp_path, disk)
    client = Client(random)
    states = [State({}, {}, {})]
    with monkeypatch.context() as patch:
        copies.after_transactions(patch)
        store = SessionStore(path, files=disk, segment_bytes=SEGMENT)
        # LMDB follows when the log is full, in the commit that finds no place.
        patch.setattr("penstock.runtime.io.wal.LoggedEnvironment._follow", lambda _: None)
        store.open(0)
        copies.copy()
        first = len(disk.ops)
        for number in range(1, 50):
            states.append(client.act(number))
            batch = client.journal.cut(0)
            disk.note(("begun", number))
            store.commit(batch)
            disk.note(("acknowledged", number))
        ops = list(disk.ops)
        store.close()
    assert copies.count > 4
    tried = sum(check(tmp_path, ops[:end], states, random) for end in range(first + 1, len(ops) + 1, 4))
    assert tried > 100


def check(folder: Path, ops: list[Any], states: list[State], random: Random) -> int:
    notes = notes_of(ops)
    tried = 0
    for name, after in after_power_loss(ops, {}, random):
        path = folder / "recovered"
        shutil.copytree(folder / f"copy-{notes['lmdb']}", path)
        logs = {path / log.name: data for log, data in after.files().items()}
        store = SessionStore(path, files=RecordedDisk(logs), segment_bytes=SEGMENT)
        found = state_of(store.open(0))
        store.close()
        shutil.rmtree(path)
        assert found in states[notes.get("acknowledged", 0) : notes.get("begun", 0) + 1], (len(ops), name)
        tried += 1
    return tried
