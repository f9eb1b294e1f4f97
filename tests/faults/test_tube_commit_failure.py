"""The disk says no: nothing is acknowledged any more, with the reason; reading goes on; a restart keeps the rest."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OutOfDescriptorsError, RefusedError, StorageError, UnavailableError
from penstock.runtime.io import commit_queue
from penstock.runtime.io.files import DirectFile, DirectFiles, DiskFullError
from penstock.tube.broker import commits
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.exactly_once import BatchId
from penstock.tube.producer import Producer
from tests.resource_limits import descriptor_limit, first_free_descriptor
from tests.unit.tube.broker_client import Client, running
from tests.unit.tube.servers import Tube, until


class FailingFile(DirectFile):
    __slots__ = ("_owner",)

    def __init__(self, fd: int, owner: FailingFiles, path: Path) -> None:
        super().__init__(fd, path=path)
        self._owner = owner

    def _write(self, position: int, data: bytes) -> None:
        self._owner.maybe_fail("write")
        super()._write(position, data)

    def sync(self) -> None:
        self._owner.maybe_fail("sync")
        super().sync()


class FailingFiles(DirectFiles):
    """Fails each ``kind`` of operation with ``error`` from the moment that is set."""

    kind = ""
    error = errno.EIO
    path = ""

    def maybe_fail(self, kind: str) -> None:
        if kind == self.kind:
            full = self.error == errno.ENOSPC and kind != "sync"
            raise (DiskFullError if full else OSError)(self.error, os.strerror(self.error), self.path)

    def create(self, path: Path) -> DirectFile:
        self.path = str(path)
        self.maybe_fail("create")
        made = super().create(path)
        return FailingFile(os.dup(made._fd), self, path)


@pytest.mark.parametrize(("kind", "error"), [("write", errno.EIO), ("sync", errno.EIO), ("sync", errno.ENOSPC)])
async def test_after_a_failed_commit_nothing_is_acknowledged(tmp_path: Path, kind: str, error: int) -> None:
    files = FailingFiles()
    files.error = error
    broker = TubeBroker(tmp_path, files=files)
    told: list[StorageError] = []
    broker.on_failure = told.append
    address = await broker.start("127.0.0.1", 0)
    broker.create_topic("demo")
    client = await Client.connect(address)
    assert (await client.answer(client.send(b"before"))).success
    await client.register()

    files.kind = kind
    refused = await client.answer(client.send(b"lost"))
    assert (refused.success, refused.errCode) == (False, 503)
    assert os.strerror(error) in refused.errMsg
    files.kind = ""  # even when the disk recovers: what it holds is no longer known
    refused = await client.answer(client.send(b"refused"))
    assert (refused.success, refused.errCode) == (False, 503)
    assert os.strerror(error) in refused.errMsg
    result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    broker.append("demo", 0, b"x", 0, None, result.set_result)
    assert await result is told[0], "rules repeat what was refused for now, but not this"

    got = await client.get()
    assert ([message.payLoadData for message in got.messages], got.maxOffset) == ([b"before"], 28)
    assert (await client.confirm()).errCode == 503
    assert len(told) == 1
    assert (broker.stats["failed"], broker.failure) == (1, told[0])
    await client.close()
    await broker.close()

    again = TubeBroker(tmp_path)
    client = await Client.connect(await again.start("127.0.0.1", 0))
    again.create_topic("demo")
    found = await client.range(startOffset=0)
    assert found.messages[0].payLoadData == b"before"
    assert (await client.answer(client.send(b"after"))).success
    await client.close()
    await again.close()


async def test_all_requests_of_a_failed_commit_get_its_error(tmp_path: Path) -> None:
    files = FailingFiles()
    broker = TubeBroker(tmp_path, files=files)
    address = await broker.start("127.0.0.1", 0)
    broker.create_topic("demo")
    clients = [await Client.connect(address) for _ in range(3)]
    files.kind = "create"
    serials = [(client, client.send(b"x", n)) for n, client in enumerate(clients) for _ in range(20)]
    answers = [await client.answer(serial) for client, serial in serials]
    assert {answer.errCode for answer in answers} == {503}
    for client in clients:
        await client.close()
    await broker.close()


async def test_a_failed_disk_is_not_a_broker_without_staged_rows(tmp_path: Path) -> None:
    """Rows would be sent without a transaction, and be doubled when the batch is repeated."""
    files = FailingFiles()
    broker = TubeBroker(tmp_path, files=files)
    client = await Client.connect(await broker.start("127.0.0.1", 0))
    broker.create_topic("demo")
    begin = pb.SendMessageRequestP2B(
        clientId="t", topicName="", partitionId=0, data=b"", flag=0, checkSum=-1, sentAddr=0
    )
    begin.transaction.CopyFrom(BatchId("q", "run", 0).ask(pb.Transaction.BEGIN))
    files.kind = "create"
    # Both wait for the same commit.
    serials = [client.send(b"x"), client.write(MethodId.SEND_MESSAGE, begin)]
    _, answer = [await client.answer(serial) for serial in serials]
    assert answer.errCode == 503
    assert answer.HasField("transaction")
    await client.close()
    await broker.close()


async def test_errors_of_producers_name_the_broker_that_stores_nothing_and_the_cause(tmp_path: Path) -> None:
    files = FailingFiles()
    running = Tube(tmp_path)
    master = await running.start_master()
    broker = TubeBroker(tmp_path / "1", masters=[running.masters], heartbeat_s=0.02, files=files)
    host, port = await broker.start("127.0.0.1", 0)
    await master.create_topic("demo", ready_s=60)
    async with Producer(running.masters, delivery_timeout_s=3.0, topic_timeout_s=0.2) as producer:
        await producer.send("demo", b"before")
        files.kind = "write"
        with pytest.raises(UnavailableError) as late:
            await producer.send("demo", b"lost")
        assert f"broker 1:{host}:{port}" in str(late.value.why)
        assert os.strerror(errno.EIO) in str(late.value.why)
        await until(lambda: master.engine.cluster.brokers[1].failure)
    async with Producer(running.masters, topic_timeout_s=0.2) as producer:
        with pytest.raises(RefusedError) as caught:
            await producer.send("demo", b"refused")
    assert caught.value.what == "tube: topic 'demo' has no partition"
    assert f"broker 1 ({host}:{port}) does not store records: " in str(caught.value.why)
    assert os.strerror(errno.EIO) in str(caught.value.why)
    await broker.close()
    await running.close()


@pytest.mark.parametrize("kind", ["create", "write"])
async def test_without_disk_space_sends_wait_and_are_answered_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(vars(commit_queue), "_RETRY_S", 0.001)
    files = FailingFiles()
    files.error = errno.ENOSPC
    broker = TubeBroker(tmp_path, files=files)
    client = await Client.connect(await broker.start("127.0.0.1", 0))
    broker.create_topic("demo")
    files.kind = kind
    serials = [client.send(b"%d" % number) for number in range(5)]
    await until(lambda: broker.stalled is not None)
    stalled = broker.stalled
    assert stalled is not None
    assert "demo-0" in stalled.path
    assert broker.failure is None
    files.kind = ""
    assert all([(await client.answer(serial)).success for serial in serials])
    assert broker.stats["failed"] == 0
    await client.close()
    await broker.close()

    again = TubeBroker(tmp_path)
    client = await Client.connect(await again.start("127.0.0.1", 0))
    again.create_topic("demo")
    assert [m.payLoadData for m in (await client.range(startOffset=0)).messages] == [b"%d" % n for n in range(5)]
    await client.close()
    await again.close()


async def test_without_a_file_descriptor_sends_wait_and_are_answered_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first send to a topic creates its files; nothing was written before, so the broker need not be restarted."""
    monkeypatch.setitem(vars(commit_queue), "_RETRY_S", 0.001)
    broker = TubeBroker(tmp_path)
    client = await Client.connect(await broker.start("127.0.0.1", 0))
    broker.create_topic("demo")
    await broker.committed()
    with descriptor_limit(first_free_descriptor() + 1):  # for the data of the segment, not for its index
        serials = [client.send(b"%d" % number) for number in range(5)]
        await until(lambda: broker.stalled is not None)
        assert isinstance(broker.stalled, OutOfDescriptorsError)
        assert broker.stalled.what == "tube-1: a commit waits for a file descriptor"
    assert all([(await client.answer(serial)).success for serial in serials])
    assert (broker.failure, broker.stats["failed"]) == (None, 0)
    assert [m.payLoadData for m in (await client.range(startOffset=0)).messages] == [b"%d" % n for n in range(5)]
    await client.close()
    await broker.close()


async def test_without_a_file_descriptor_staged_rows_are_published_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "PUBLISH_AGAIN_S", 0.001)
    step = pb.Transaction
    async with running(tmp_path) as (broker, client):

        def ask(batch: int, **fields: Any) -> int:
            request = pb.SendMessageRequestP2B(
                clientId="t", topicName="", partitionId=0, data=b"", flag=0, checkSum=-1, sentAddr=0,
                transaction=pb.Transaction(query="q", run="r", batch=batch, **fields),
            )  # fmt: skip
            return client.write(MethodId.SEND_MESSAGE, request, timeout_ms=None)

        await client.answer(client.send(b"before"))  # the files of the log are open
        await client.answer(ask(0, step=step.BEGIN))
        for name in "ab":
            rows = pb.StagedRows(topicName="demo", partitionId=0, batch=pb.SendBatch(datas=[name.encode()] * 2))
            attempt = pb.StagedAttempt(task=ord(name), attempt=name)
            await client.answer(ask(0, step=step.STAGE, attempt=attempt, rows=[rows]))
        winners = [pb.StagedAttempt(task=ord(name), attempt=name, rows=2) for name in "ab"]
        with descriptor_limit(first_free_descriptor()):
            committed = ask(0, step=step.COMMIT, winners=winners, transactionId="t")
            await until(lambda: broker.stalled is not None or broker.failure is not None)
            assert broker.failure is None
            assert broker.stalled is not None
            assert broker.stalled.what == "tube: the rows of a committed batch wait for a file descriptor"
            await client.answer(client.send(b"between"))
        assert (await client.answer(committed)).success
        await until(lambda: broker.stalled is None)
        stored = [m.payLoadData for m in (await client.range(startOffset=0)).messages]
        assert stored == [b"before", b"between", b"a", b"a", b"b", b"b"]
