"""A broker engine with staged rows, with tasks and drivers as its clients; it does the shell's work, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.tube.codec.envelope import Request, decode_response
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import TopicConfig
from penstock.tube.engine.broker.group_offsets import GroupOffsets
from penstock.tube.engine.broker.topics import Topics
from penstock.tube.engine.broker_engine import BrokerEngine
from penstock.tube.engine.sessions import RequestContext
from penstock.tube.engine.transactions.handler import Publication
from penstock.tube.engine.transactions.staging import Staging, StagingLimits
from penstock.tube.storage.notes import decode_sequences, encode_sequences, read_sequences, sequences_note
from penstock.tube.storage.staging_store import StagedWrite, StagingDirectory, write_staged
from penstock.tube.storage.store import LogWrite, Store
from tests.unit.runtime.recorded_disk import RecordedDisk

NOW = 1_700_000_000_000
STAGING = Path("/tube/staging")
Rows = dict[tuple[str, int], list[bytes]]


class Turn:
    """What one commit makes durable."""

    def __init__(self) -> None:
        self.works: list[tuple[Store, LogWrite]] = []
        self.notes: dict[str, bytes | None] = {}
        self.early: dict[str, bytes | None] = {}
        self.staged: list[StagedWrite] = []
        self.removed: list[Path] = []
        self.decided: list[Publication] = []
        self.answers: dict[int, bytes] = {}


class StagingTalk:
    """A broker with topics ``a`` (2 partitions) and ``b`` (1), which can be killed at any moment.

    ``disk`` and ``notes`` are what an earlier process left. `commit` is what the shell does at the end of a turn, in
    the order in which `Disk.commit` does it.
    """

    def __init__(
        self,
        disk: RecordedDisk | None = None,
        notes: dict[str, bytes] | None = None,
        *,
        limits: StagingLimits | None = None,
        now: int = NOW,
    ) -> None:
        self.disk = disk if disk is not None else RecordedDisk()
        self.notes = dict(notes or {})
        self.now = now
        self.stores: dict[tuple[str, int], Store] = {}
        shelf = StagingDirectory(self.disk, STAGING)
        self.shelf = shelf
        staging = Staging(shelf, limits if limits is not None else StagingLimits())
        self.lost = staging.restore(self.notes, shelf.recover())
        self.staging = staging
        last = max((self._open(name, 0).last_time for name in ("a", "b")), default=0)
        self.engine = BrokerEngine(Topics(self._open), GroupOffsets(), staging=staging, last_time=last)
        for (topic, number), store in self.stores.items():
            note = self.notes.get(sequences_note(topic, number))
            if note is not None:
                offset, rows = decode_sequences(note)
                known = [*rows, *read_sequences(store, offset)]
                found = [row for row in known if self.engine.transactions.restored(row[1])]
                self.engine.produce.producers.restore(topic, found)
        for name, partitions in (("a", 2), ("b", 1)):
            config = TopicConfig(name, partitions=partitions, stores=1)
            self.engine.topics.apply(self.engine.topics.default, [config])
        self.serial = 0
        self.answers: dict[int, bytes] = {}

    def _open(self, topic: str, number: int) -> Store:
        store = self.stores.get((topic, number))
        if store is None:
            store = self.stores[topic, number] = Store(self.disk, Path(f"/tube/log/{topic}-{number}"), number)
        return store

    # Clients.

    def send(self, **fields: Any) -> int:
        """Ask; the serial of the answer, which `commit` may have to bring."""
        transaction = pb.Transaction(**{"query": "q", "run": "r1", "batch": 0, **fields})
        request = pb.SendMessageRequestP2B(
            clientId="task", topicName="", partitionId=0, data=b"", flag=0, checkSum=-1, sentAddr=0,
            transaction=transaction,
        )  # fmt: skip
        self.serial += 1
        payload = request.SerializeToString()
        asked = Request(self.serial, ServiceType.BROKER_WRITE, MethodId.SEND_MESSAGE, payload)
        answer = self.engine.receive(asked, RequestContext(self.now, "", "task", self.serial), self.now)
        if answer is not None:
            self.answers[self.serial] = answer.body
        return self.serial

    def ask(self, **fields: Any) -> Any:
        """Ask and let the broker commit until it answers."""
        serial = self.send(**fields)
        for _ in range(100):
            self.commit()
            if serial in self.answers:
                return self.answer(serial)
        raise AssertionError("no answer")

    def answer(self, serial: int) -> Any:
        response = decode_response(serial, self.answers.pop(serial))
        assert response.status == 0, response.text
        return pb.SendMessageResponseB2P.FromString(response.payload)

    def begin(self, **fields: Any) -> Any:
        return self.ask(step=pb.Transaction.BEGIN, **fields)

    def stage(self, attempt: str, rows: Rows, *, task: int = 0, at: int = 0, **fields: Any) -> Any:
        return self.ask(
            step=pb.Transaction.STAGE,
            attempt=pb.StagedAttempt(task=task, attempt=attempt, rows=at),
            rows=[
                pb.StagedRows(topicName=topic, partitionId=partition, batch=pb.SendBatch(datas=datas))
                for (topic, partition), datas in rows.items()
            ],
            **fields,
        )

    def settle(self, step: int, *winners: tuple[str, int], name: str = "t", **fields: Any) -> Any:
        attempts = [pb.StagedAttempt(attempt=attempt, rows=rows) for attempt, rows in winners]
        return self.ask(step=step, winners=attempts, transactionId=name, **fields)

    # The shell.

    def take(self) -> Turn:
        """The end of a loop turn."""
        turn = Turn()
        transactions, producers = self.engine.transactions, self.engine.produce.producers
        transactions.publish(self.now)
        turn.staged, turn.removed = self.shelf.take_unwritten()
        turn.notes, self.staging.notes = self.staging.notes, {}
        turn.decided = transactions.take_decided()
        for topic, number in producers.changed:
            name = sequences_note(topic, number)
            if name not in self.notes:
                turn.early[name] = encode_sequences(self.stores[topic, number].written_end, [])
        producers.changed.clear()
        for store in self.engine.dirty_stores:
            assert isinstance(store, Store)
            turn.works.append((store, store.take_unwritten()))
        self.engine.dirty_stores.clear()
        turn.answers = {serial: body for _, serial, body in transactions.answered}
        transactions.answered.clear()
        return turn

    def write(self, turn: Turn) -> None:
        """The committing thread."""
        self._note(turn.early)
        for store, work in turn.works:
            store.write(work)
        for store, work in turn.works:
            store.sync(work)
        if turn.staged:
            write_staged(self.disk, STAGING, turn.staged)
        self._note(turn.notes)
        for path in turn.removed:
            self.disk.remove(path)

    def _note(self, notes: dict[str, bytes | None]) -> None:
        # Notes are durable at once, all or none (LMDB): they stand in the record of the disk as one moment.
        if not notes:
            return
        for name, note in notes.items():
            if note is None:
                self.notes.pop(name, None)
            else:
                self.notes[name] = note
        self.disk.note(("notes", dict(self.notes)))

    def written(self, turn: Turn) -> None:
        """The commit returned."""
        for store, work in turn.works:
            store.written(work)
        self.shelf.written(turn.staged)
        publishing = self.engine.transactions.publishing
        assert publishing is not None
        for publication in turn.decided:
            publishing.begin(publication)
        self.answers.update(turn.answers)
        for serial in turn.answers:
            self.disk.note(("answered", serial))

    def commit(self) -> None:
        turn = self.take()
        self.write(turn)
        self.written(turn)

    # Readers, and the end of a process.

    def published(self) -> Rows:
        """What readers see, by topic and partition."""
        found: Rows = {}
        for topic, partition in (("a", 0), ("a", 1), ("b", 0)):
            read = self._open(topic, 0).read(partition, 0, max_bytes=1 << 30)
            answer = pb.GetMessageResponseB2C.FromString(b"\x08\x01\x10\x01" + b"".join(read.messages))
            if answer.messages:
                found[topic, partition] = [message.payLoadData for message in answer.messages]
        return found

    def killed(self) -> StagingTalk:
        """A new process over what this one left."""
        return StagingTalk(RecordedDisk(self.disk.files()), self.notes, now=self.now + 1000)
