"""Parts that the conversations in tests/engine/tube do not cover: ids over time, bounds, values for the shell."""

from __future__ import annotations

from typing import Any

from penstock.tube.codec.envelope import Request
from penstock.tube.codec.proto import broker_pb2 as pb
from tests.engine.tube.broker_harness import NOW, SESSION_MS, Talk


def test_message_ids_rise_when_the_clock_does_not() -> None:
    talk = Talk()
    ids = [talk.send(b"x").messageId for _ in range(3)]
    talk.now -= 60_000
    ids.append(talk.send(b"x").messageId)
    talk.now += 120_000
    ids.append(talk.send(b"x").messageId)
    assert ids == sorted(set(ids))


def test_positions_to_store_and_stores_to_write_are_handed_out_once() -> None:
    talk = Talk()
    talk.send(b"a")
    talk.register()
    assert [store.directory.name for store in talk.engine.dirty_stores] == ["demo-0"]  # type: ignore[attr-defined]
    assert talk.offsets.take_dirty() == [(("group", "demo", 0), 0)]
    talk.commit()
    talk.get()
    assert (talk.engine.dirty_stores, talk.offsets.dirty) == ({}, set())
    talk.get(lastPackConsumed=True)
    assert talk.offsets.take_dirty() == [(("group", "demo", 0), 28)]


def test_answers_that_confirm_a_position_wait_for_its_commit() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register()
    talk.get()
    base: dict[str, Any] = {"clientId": "c1", "groupName": "group", "topicName": "demo", "partitionId": 0}
    waits = []
    for consumed in (True, False):
        message = pb.CommitOffsetRequestC2B(**base, lastPackConsumed=consumed)
        answer = talk.answer(Request(7, 2, 18, message.SerializeToString()))
        assert answer is not None
        waits.append(answer.wait)
    for read_status in (0, 1):
        talk.register()
        register = pb.RegisterRequestC2B(**base, opType=32, readStatus=read_status)
        answer = talk.answer(Request(7, 2, 15, register.SerializeToString()))
        assert answer is not None
        waits.append(answer.wait)
    assert waits == [True, False, True, False]


def test_removing_a_topic_ends_its_readers() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register()
    stores = talk.engine.remove_topic("demo")
    assert len(stores) == 1
    assert len(talk.engine.registrations) == 0
    assert talk.offsets.take_dirty() == [(("group", "demo", 0), None)]
    talk.engine.tick(NOW + SESSION_MS)
    assert talk.engine.next_deadline() is None
