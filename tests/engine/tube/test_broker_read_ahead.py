"""Prefetched gets of old messages return the same as gets that are not prefetched."""

from __future__ import annotations

import pytest

from penstock.tube.engine.broker.fetch_handler import PendingRead
from penstock.tube.engine.interfaces import LogRead
from tests.engine.tube.broker_harness import Talk, texts
from tests.unit.runtime.recorded_disk import RecordedDisk

MESSAGES = [b"%d|" % n + bytes(8000) for n in range(160)]
"""More than two gets bring."""


@pytest.fixture
def old() -> Talk:
    """A broker that was started anew, with `MESSAGES`, every fourth of type ``odd``, in one partition."""
    before = Talk()
    for n, message in enumerate(MESSAGES):
        before.send(message, msgType="odd" if n % 4 == 0 else "even")
    before.fill(b"of another partition", partition=1)
    for store in before.stores.values():
        store.close()
    talk = Talk()
    talk.disk = RecordedDisk(before.disk.files())
    talk.register()
    return talk


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where stores were read from, as it happens."""
    starts: list[int] = []
    read = PendingRead.read

    def noted(self: PendingRead) -> LogRead:
        starts.append(self.start)
        return read(self)

    monkeypatch.setattr(PendingRead, "read", noted)
    return starts


def work(talk: Talk) -> None:
    """What the shell does when the answer has left."""
    while talk.engine.fetch.ahead.due:
        talk.engine.fetch.ahead.work()


def test_the_next_get_finds_its_messages_read(old: Talk, reads: list[int]) -> None:
    first = old.get()
    work(old)
    assert len(reads) == 2
    second = old.get(lastPackConsumed=True)
    assert (len(reads), reads[1]) == (2, second.currOffset)
    work(old)
    third = old.get(lastPackConsumed=True)
    work(old)
    assert texts(first) + texts(second) + texts(third) == MESSAGES
    assert (third.maxOffset, third.currDataDlt, len(reads)) == (161 * 28, 0, 3)
    assert old.get(lastPackConsumed=True).errCode == 404


def test_a_batch_that_was_not_consumed_comes_again(old: Talk, reads: list[int]) -> None:
    first = old.get()
    work(old)
    assert texts(old.get(lastPackConsumed=False)) == texts(first)
    assert texts(old.get(lastPackConsumed=True))[0] == MESSAGES[len(first.messages)]
    assert len(reads) == 3


def test_messages_appended_meanwhile_follow_the_prefetched_ones(old: Talk) -> None:
    got = texts(old.get())
    work(old)
    old.fill(b"new")
    while len(answer := old.get(lastPackConsumed=True).messages):
        got += [message.payLoadData for message in answer]
        work(old)
    assert got == [*MESSAGES, b"new"]


def test_prefetched_reads_keep_the_filter(old: Talk) -> None:
    old.register(filterCondStr=["odd"], clientId="c1")
    got = texts(old.get())
    work(old)
    while len(answer := old.get(lastPackConsumed=True).messages):
        got += [message.payLoadData for message in answer]
        work(old)
    assert got == MESSAGES[::4]


def test_a_seek_is_not_answered_with_messages_prefetched_for_another_offset(old: Talk) -> None:
    old.get()
    work(old)
    old.register(currOffset=28 * 5)
    assert texts(old.get())[0] == MESSAGES[5]


def test_damage_is_left_out_when_it_was_found_ahead(old: Talk) -> None:
    first = len(old.get().messages)
    store = old.stores["demo", 0]
    lost = first + 3
    file = store._files.open(store._segments[0].data_path)
    position = int(store._segments[0].index()["position"][lost]) + 200
    file.write(position, b"\x01")
    work(old)
    got = texts(old.get(lastPackConsumed=True))
    assert got == [message for message in MESSAGES[first : first + len(got) + 1] if message is not MESSAGES[lost]]
    assert store.damaged_reads == 1


def test_a_removed_topic_is_not_read_ahead(old: Talk, reads: list[int]) -> None:
    old.get()
    old.engine.remove_topic("demo")
    work(old)
    assert len(reads) == 1
