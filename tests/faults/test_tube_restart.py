"""State of a broker after it ended abruptly: producers, log epochs, offsets, partly removed topics.

The abrupt end is a copy of the directory of a running broker: what had been written is there, nothing was closed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.io.files import Durability
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC
from penstock.tube.engine.broker.membership import MasterUpdate
from penstock.tube.engine.broker.offset_history import history_partition
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.storage.broker_storage import BrokerStorage
from penstock.tube.storage.notes import epochs_note
from tests.unit.tube.broker_client import Client
from tests.unit.tube.broker_client import running as broker

SMALL = TubeLimits(segment_bytes=2000)


def killed(path: Path) -> Path:
    """What a ``kill -9`` now would leave."""
    copy = path.with_name(f"{path.name}-killed")
    shutil.copytree(path, copy)
    return copy


async def send(client: Client, *datas: bytes, producer: int = 7, sequence: int) -> Any:
    request = pb.SendMessageRequestP2B(
        clientId="p", topicName="demo", partitionId=1, data=b"", flag=0, checkSum=-1, sentAddr=0,
        batch=pb.SendBatch(datas=datas), producer=pb.ProducerSequence(producerId=producer, sequence=sequence),
    )  # fmt: skip
    return await client.ask(MethodId.SEND_MESSAGE, request)


async def stored(client: Client) -> list[bytes]:
    found = await client.range(1, startOffset=0)
    return [message.payLoadData for message in found.messages]


@pytest.mark.parametrize("how", ["killed", "killed after a note", "closed"])
@pytest.mark.parametrize("limits", [TubeLimits(), SMALL])
async def test_a_producer_continues_at_the_end_of_the_log(tmp_path: Path, how: str, limits: TubeLimits) -> None:
    path = tmp_path / "a"
    async with broker(path, limits=limits) as (first, client):
        await send(client, *(b"%d" % n for n in range(50)), sequence=0)
        await send(client, b"other", producer=8, sequence=0)
        if how == "killed after a note":
            first.retain(first.clock())
        await send(client, *(b"%d" % n for n in range(50, 100)), sequence=50)
        copy = killed(path)
    async with broker(path if how == "closed" else copy, limits=limits) as (_, client):
        again = await send(client, *(b"%d" % n for n in range(90, 110)), sequence=90)
        assert (again.success, again.result.duplicates) == (True, 10)
        assert (await send(client, b"x", producer=8, sequence=0)).result.duplicates == 1
        found = [data for data in await stored(client) if data != b"other"]
        assert found == [b"%d" % n for n in range(110)]


async def test_a_batch_that_was_cut_is_completed_by_its_repetition(tmp_path: Path) -> None:
    path = tmp_path / "a"
    async with broker(path) as (_, client):
        await send(client, *(b"message-%d" % n for n in range(8)), sequence=0)
        copy = killed(path)
    (data,) = (copy / "tube" / "broker-1" / "log" / "demo-0").glob("*.tube")
    content = data.read_bytes()
    data.write_bytes(content[: content.index(b"message-5")])
    async with broker(copy) as (_, client):
        again = await send(client, *(b"message-%d" % n for n in range(8)), sequence=0)
        assert (again.success, again.result.duplicates) == (True, 5)
        assert await stored(client) == [b"message-%d" % n for n in range(8)]


async def test_readers_get_an_error_for_records_that_a_memory_topic_lost_in_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "a"
    async with broker(path, durability=Durability.MEMORY) as (running, client):
        for text in (b"kept", b"lost-1", b"lost-2"):
            await client.answer(client.send(text))
        seen = await client.range(startOffset=0)
        epoch = seen.range.logEpoch
        assert seen.range.nextOffset == 84
        await client.register()
        assert len((await client.get()).messages) == 3
        await client.confirm()
        await running.committed()
        copy = killed(path)
    # Of what was only in memory the files have the first message.
    (data,) = (copy / "tube" / "broker-1" / "log" / "demo-0").glob("*.tube")
    content = data.read_bytes()
    data.write_bytes(content[: content.index(b"lost-1") - 40])
    async with broker(copy, durability=Durability.MEMORY) as (again, client):
        # The group's position went back to the end: what comes now is delivered.
        assert again.engine.offsets.committed(("group", "demo", 0)) == 28
        for number in range(5):
            await client.answer(client.send(b"new-%d" % number))
        answer = await client.range(startOffset=84, logEpoch=epoch)
        lost = answer.range
        assert (answer.errCode, lost.truncatedTo, lost.lostStart, lost.lostEnd) == (500, 28, 28, 84)
        found = await client.range(startOffset=lost.truncatedTo, logEpoch=lost.logEpoch)
        assert [m.payLoadData for m in found.messages] == [b"new-%d" % n for n in range(5)]
        await client.register()
        assert (await client.get()).messages[0].payLoadData == b"new-0"


@pytest.mark.parametrize("durability", [Durability.DURABLE, Durability.FLUSHED])
async def test_an_abrupt_end_cuts_no_log_that_was_written(tmp_path: Path, durability: Durability) -> None:
    path = tmp_path / "a"
    async with broker(path, durability=durability) as (_, client):
        await client.answer(client.send(b"x"))
        epoch = (await client.range()).range.logEpoch
        copy = killed(path)
    async with broker(copy, durability=durability) as (_, client):
        assert (await client.range()).range.logEpoch == epoch > 0


async def test_an_orderly_end_begins_no_epoch(tmp_path: Path) -> None:
    epochs = set()
    for _ in range(2):
        async with broker(tmp_path, durability=Durability.MEMORY) as (_, client):
            await client.answer(client.send(b"x"))
            epochs.add((await client.range()).range.logEpoch)
    assert len(epochs) == 1


async def test_a_log_of_a_version_without_epochs_gets_one_at_its_end(tmp_path: Path) -> None:
    """Readers whose offset has no epoch, or 0, continue; not those beyond the end, whose records are lost."""
    async with broker(tmp_path) as (running, client):
        await client.answer(client.send(b"x"))
        running.storage.meta.commit([], notes={epochs_note("demo", 0): None})
    async with broker(tmp_path) as (_, client):
        await client.answer(client.send(b"y"))
        assert (await client.range(startOffset=28, logEpoch=0)).errCode == 200
        answer = await client.range(startOffset=56, logEpoch=0)
        assert (answer.errCode, answer.range.truncatedTo) == (500, 28)
        epoch = answer.range.logEpoch
        assert (await client.range(startOffset=56, logEpoch=epoch)).errCode == 200
    async with broker(tmp_path) as (_, client):
        assert (await client.range()).range.logEpoch == epoch, "it is stored"


async def test_a_topic_that_is_created_again_has_another_epoch(tmp_path: Path) -> None:
    path = tmp_path / "a"
    epochs = []
    async with broker(path) as (running, client):
        for _ in range(2):
            await client.answer(client.send(b"x"))
            epochs.append((await client.range()).range.logEpoch)
            running.commands.apply(MasterUpdate(removed_topics=["demo"]))
            running.create_topic("demo")
            await running.committed()
        await client.answer(client.send(b"new"))
        await client.answer(client.send(b"newer"))
        epochs.append((await client.range()).range.logEpoch)
        copy = killed(path)
    assert len(set(epochs)) == 3
    async with broker(copy) as (_, client):
        for epoch in epochs[:2]:
            lost = (await client.range(startOffset=28, logEpoch=epoch)).range
            assert (lost.truncatedTo, lost.lostEnd, lost.logEpoch) == (0, 28, epochs[2])
        assert (await client.range(startOffset=28, logEpoch=epochs[2])).errCode == 200


async def test_the_end_of_the_machine_cuts_a_flushed_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    async with broker(path, durability=Durability.FLUSHED) as (_, client):
        await client.answer(client.send(b"x"))
        before = (await client.range()).range.logEpoch
        copy = killed(path)
    monkeypatch.setattr("penstock.tube.broker.maintenance.boot_id", lambda: "another")
    epochs = set()
    for _ in range(2):
        async with broker(copy) as (_, client):  # how it was written counts, not how it is now
            epochs.add((await client.range()).range.logEpoch)
    assert len(epochs) == 1
    assert before not in epochs


async def test_a_removal_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "a"
    async with broker(path) as (running, client):
        await client.answer(client.send(b"x"))
        running.storage.meta.commit([], notes={"removing/demo": b"1"})
        copy = killed(path)
    disk = BrokerStorage(copy / "tube" / "broker-1")
    assert disk.files.names(copy / "tube" / "broker-1" / "log" / "demo-0") == []
    assert "removing/demo" not in disk.meta.notes()
    disk.close(clean=True)


async def test_a_topic_made_anew_knows_nothing_of_the_old_producers(tmp_path: Path) -> None:
    async with broker(tmp_path) as (running, client):
        await send(client, b"0", b"1", sequence=0)
        running.commands.apply(MasterUpdate(removed_topics=["demo"]))
        running.create_topic("demo")
        await running.committed()
        assert (await send(client, b"0", sequence=0)).result.duplicates == 0
    async with broker(tmp_path) as (_, client):
        assert (await send(client, b"0", b"1", sequence=0)).result.duplicates == 1


async def test_the_history_of_offsets_is_a_topic(tmp_path: Path) -> None:
    async with broker(tmp_path) as (running, client):
        await client.answer(client.send(b"x", 2))
        await client.register(2)
        await client.get(2)
        await client.confirm(2)
        running.retain(running.clock())
        partition, _ = history_partition("group")
        found = await client.range(partition, OFFSET_HISTORY_TOPIC, startOffset=0)
        while not found.messages:
            found = await client.range(partition, OFFSET_HISTORY_TOPIC, startOffset=0)
        data = found.messages[0].payLoadData
        size = int.from_bytes(data[:4], "big")
        assert b"$groupName$=group" in data[4 : 4 + size]
        told = json.loads(data[4 + size :])
        assert (told["ver"], told["group"], told["on"], told["bId"]) == (3, "group", True, 1)
        assert told["clients"][0]["cltId"] == "c"
        (record,) = told["records"]
        (store,) = record["offsets"]
        assert (record["topic"], store["iMin"], store["iMax"], store["dMax"]) == ("demo", 0, 28, 53)
        assert store["parts"] == [{"partId": 2, "iCfm": 28, "iFlt": 0, "recId": 0}]


async def test_positions_beyond_the_end_of_the_log_go_back_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A log lost its end (here: all of it), the positions of groups stayed: it is said, and nobody waits for ever."""
    log = tmp_path / "b" / "tube" / "broker-1" / "log" / "demo-0"
    async with broker(tmp_path / "b") as (_, client):
        for number in range(3):
            assert (await client.answer(client.send(b"%d" % number))).success
        await client.register()
        assert len((await client.get()).messages) == 3
        assert (await client.confirm()).currOffset == 84
    shutil.rmtree(log)
    async with broker(tmp_path / "b") as (running, client):
        assert running.engine.offsets.committed(("group", "demo", 0)) == 0
        assert any("was at offset 84 of partition 0 of demo" in str(vars(record)) for record in caplog.records)
        assert (await client.answer(client.send(b"new"))).appendOffset == 0
        await client.register()
        assert [message.payLoadData for message in (await client.get()).messages] == [b"new"]
