"""Produce requests, their checks, and invalid requests to a broker."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import RefusedError, StorageError, UnavailableError
from penstock.tube.codec.envelope import Request
from penstock.tube.codec.message import check_sum
from penstock.tube.codec.methods import METHODS, MethodId, PeerRole
from penstock.tube.codec.proto import broker_pb2 as pb
from tests.engine.tube.broker_harness import NOW, Talk, texts


def request(method: int = 13, service: int = 3, payload: bytes = b"", **more: Any) -> Request:
    return Request(7, service, method, payload, **more)


def valid_send() -> bytes:
    return pb.SendMessageRequestP2B(
        clientId="p", topicName="demo", partitionId=0, data=b"a", flag=0, checkSum=-1, sentAddr=0
    ).SerializeToString()


def test_a_send_returns_message_id_append_time_and_offset() -> None:
    talk = Talk()
    first = talk.send(b"a")
    assert (first.success, first.errCode, first.errMsg) == (True, 200, str(first.messageId))
    assert (first.appendTime, first.appendOffset, first.requireAuth) == (NOW, 0, False)
    second = talk.send(b"b", 10001, flag=1, checkSum=check_sum(b"b"))
    assert second.appendOffset == 0
    third = talk.send(b"c", 2)
    assert third.appendOffset == 28
    assert 1 << 56 < first.messageId < second.messageId < third.messageId < 1 << 63


def test_the_answer_waits_for_the_commit_unless_memory_is_enough() -> None:
    talk = Talk()
    answer = talk.answer(request(payload=valid_send()))
    assert answer is not None
    assert answer.wait
    talk.stores["demo", 0].immediate = True
    answer = talk.answer(request(payload=valid_send()))
    assert answer is not None
    assert not answer.wait


def test_go_sends_under_the_read_service() -> None:
    assert Talk().raw(request(service=2, payload=valid_send())).status == 0


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"clientId": ""}, 400),
        ({"topicName": " "}, 400),
        ({"topicName": "unknown"}, 403),
        ({"topicName": "closed"}, 403),
        ({"topicName": "removed"}, 403),
        ({"partitionId": 3}, 403),
        ({"partitionId": 20001}, 403),
        ({"partitionId": -10000}, 403),
        ({"data": b""}, 400),
        ({"data": bytes((1 << 20) + (10 << 10) + 1)}, 400),
        ({"checkSum": 5}, 403),
    ],
)
def test_sends_that_are_refused(fields: dict[str, Any], code: int) -> None:
    talk = Talk()
    talk.topic("closed", accept_publish=False)
    talk.topic("removed", status=1)
    answer = talk.send(**{"data": b"x", **fields})
    assert (answer.success, answer.errCode) == (False, code)
    assert not answer.HasField("messageId")
    assert talk.engine.checks.refused == 1


def test_the_size_limit_is_the_topic_s() -> None:
    talk = Talk()
    talk.topic("large", max_message_bytes=2 << 20)
    assert talk.send(bytes((2 << 20) + (10 << 10)), topicName="large").success
    talk.topic("huge", max_message_bytes=100 << 20)
    assert talk.send(bytes((20 << 20) + (10 << 10) + 1), topicName="huge").errCode == 400


def test_a_disk_that_does_not_keep_up() -> None:
    talk = Talk()
    talk.engine.produce.max_unwritten_bytes = 500
    codes = [talk.send(bytes(200)).errCode for _ in range(4)]
    assert codes == [200, 200, 419, 419]
    talk.commit()
    assert talk.send(b"x").success


def test_stopped_or_failed_writing() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register()
    talk.engine.checks.write_stopped = True
    assert talk.send(b"a").errCode == 503
    talk.engine.checks.write_stopped = False
    talk.engine.checks.failure = StorageError("commit failed: no space left")
    answer = talk.send(b"a")
    assert answer.errCode == 503
    assert "no space left" in answer.errMsg
    assert texts(talk.get()) == [b"a"]
    assert talk.confirm().errCode == 503


def test_late_requests_are_dropped_and_a_missing_timeout_is_answered() -> None:
    talk = Talk()
    send = valid_send()
    assert talk.answer(request(payload=send, timeout=100), waited_ms=101) is None
    assert talk.engine.dropped_late == 1
    assert talk.answer(request(payload=send, timeout=100), waited_ms=100) is not None
    for timeout in (None, 0):
        assert talk.answer(request(payload=send, timeout=timeout), waited_ms=99_999) is not None


@pytest.mark.parametrize(
    ("method", "service", "status"),
    [
        (0, 2, 2),  # the C++ client when it closes
        (10, 2, 2),
        (23, 2, 2),
        (11, 2, 1),
        (12, 3, 1),
        (14, 3, 1),
        (19, 2, 1),
        (13, 1, 1),
        (17, 3, 1),
        (17, 4, 1),
        (17, 99, 1),
        (1, 1, 1),
    ],
)
def test_methods_that_do_not_belong_here(method: int, service: int, status: int) -> None:
    response = Talk().raw(request(method, service))
    assert response.status == status
    assert response.exception
    assert "#" not in (response.text or "")


def test_unreadable_requests_are_fatal_errors() -> None:
    talk = Talk()
    for payload in (b"", b"\xff", pb.SendMessageRequestP2B(clientId="p").SerializePartialToString()):
        assert talk.raw(request(payload=payload)).status == 2
    assert talk.raw(request(17, 2, b"\x0a\x01\xff")).status == 2


def test_messages_of_the_node_itself() -> None:
    talk = Talk()
    results = [talk.engine.append("demo", None, b"%d" % n, 0, "t", NOW) for n in range(7)]
    assert [result.partition for result in results] == [0, 1, 2, 10000, 10001, 10002, 0]
    assert results[6].append_offset == 28 * 3
    with pytest.raises(RefusedError, match="unknown") as refused:
        talk.engine.append("nowhere", None, b"x", 0, None, NOW)
    assert refused.value.code == 403
    with pytest.raises(RefusedError, match="no partition 7"):
        talk.engine.append("demo", 7, b"x", 0, None, NOW)
    talk.engine.checks.failure = StorageError("disk gone")
    with pytest.raises(UnavailableError, match="disk gone"):
        talk.engine.append("demo", None, b"x", 0, None, NOW)


def test_many_message_types_do_not_fill_memory() -> None:
    talk = Talk()
    for n in range(5000):
        talk.send(b"x", msgType=f"type-{n}")
    assert len(talk.engine.produce._keys) <= 4096


def test_the_method_table_agrees_with_the_handlers() -> None:
    assert set(Talk().engine._handlers) | {MethodId.GET_MESSAGES} == {
        row.id for row in METHODS.values() if row.answers is PeerRole.BROKER
    }


def test_a_disk_without_space() -> None:
    talk = Talk()
    assert talk.send(b"x").success
    talk.engine.checks.out_of_space = "out of disk space"
    refused = talk.send(b"x")
    assert (refused.errCode, refused.errMsg) == (419, "out of disk space")
    with pytest.raises(UnavailableError, match="out of disk space"):
        talk.engine.append("demo", None, b"x", 0, None, 0)
    talk.engine.checks.out_of_space = ""
    assert talk.send(b"x").success
