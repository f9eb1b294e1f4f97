"""Batches in one send, and producers whose messages are stored once: extensions of method 13."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.tube.codec.codes import EXTENSIONS
from penstock.tube.codec.envelope import Request
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.broker.produce_handler import MAX_BATCH, MAX_BATCH_BYTES
from tests.engine.tube.broker_harness import NOW, Talk, texts


def test_a_batch_is_stored_together_and_answered_once() -> None:
    talk = Talk()
    talk.fill(b"before")
    answer = talk.send_batch(b"a", b"bb", b"ccc", partition=1)
    assert (answer.success, answer.errCode, answer.appendOffset, answer.appendTime) == (True, 200, 28, NOW)
    assert answer.errMsg == str(answer.messageId)
    assert (answer.result.count, answer.result.duplicates, answer.result.extensions) == (3, 0, EXTENSIONS)
    talk.register(1)
    assert not texts(talk.get(1))  # not before its commit
    talk.commit()
    found = talk.get(1)
    assert texts(found) == [b"a", b"bb", b"ccc"]
    assert [m.messageId for m in found.messages] == [answer.messageId + k for k in range(3)]


def test_flags_and_types_may_differ_within_a_batch() -> None:
    talk = Talk()
    data = b"\0\0\0\3k=v1"
    talk.send_batch(b"0", data, b"2", flags=[0, 1, 0], types=["x", "y", ""], flag=0)
    talk.commit()
    talk.register(filterCondStr=["y"])
    found = talk.get()
    assert [(m.payLoadData, m.flag) for m in found.messages] == [(data, 1)]
    talk.send_batch(b"3", b"4", msgType="y")
    talk.commit()
    assert texts(talk.get(lastPackConsumed=True)) == [b"3", b"4"]


@pytest.mark.parametrize(
    ("datas", "fields", "code"),
    [
        ([b"x", b""], {}, 400),
        ([b"x"] * (MAX_BATCH + 1), {}, 400),
        ([bytes(MAX_BATCH_BYTES // 4)] * 5, {}, 400),
        ([b"x", b"y"], {"flags": [1]}, 400),
        ([b"x", b"y"], {"types": ["a", "b", "c"]}, 400),
        ([b"x"], {"types": ["t" * 1025]}, 400),
        ([b"x"], {"topicName": "other"}, 403),
        ([b"x"], {"partition": 3}, 403),
        ([b"x"], {"producer": (0, 0)}, 400),
        ([b"x"], {"producer": (7, -1)}, 400),
        ([b"x"], {"clientId": " "}, 400),
    ],
)
def test_a_batch_is_refused_as_a_whole(datas: list[bytes], fields: dict[str, Any], code: int) -> None:
    talk = Talk()
    answer = talk.send_batch(*datas, **fields)
    assert (answer.success, answer.errCode) == (False, code)
    assert not talk.engine.dirty_stores
    assert talk.engine.produce.messages == 0


def test_an_empty_batch_queries_the_extensions_of_the_broker() -> None:
    talk = Talk()
    answer = talk.send_batch()
    assert (answer.success, answer.result.extensions, answer.result.count) == (True, EXTENSIONS, 0)
    assert not talk.engine.dirty_stores
    assert talk.send_batch(producer=(5, 0, 3)).result.expectedSequence == 3


def test_stored_messages_are_not_stored_again() -> None:
    talk = Talk()
    assert talk.send_batch(b"0", b"1", producer=(9, 0)).result.duplicates == 0
    again = talk.send_batch(b"0", b"1", producer=(9, 0))
    assert (again.success, again.result.duplicates, again.result.count, again.appendOffset) == (True, 2, 2, -1)
    overlapping = talk.send_batch(b"1", b"2", producer=(9, 1))
    assert (overlapping.result.duplicates, overlapping.appendOffset) == (1, 56)
    single = talk.send(b"3", producer=pb.ProducerSequence(producerId=9, sequence=3))
    assert (single.result.count, single.appendOffset) == (1, 84)
    talk.commit()
    talk.register()
    assert texts(talk.get()) == [b"0", b"1", b"2", b"3"]


def test_a_gap_is_refused_and_named() -> None:
    talk = Talk()
    talk.send_batch(b"0", producer=(9, 0))
    answer = talk.send_batch(b"2", producer=(9, 2))
    assert (answer.errCode, answer.result.expectedSequence) == (400, 1)
    assert "expected 1" in answer.errMsg
    assert talk.send_batch(b"1", producer=(9, 1)).success


def test_producers_and_partitions_count_apart() -> None:
    talk = Talk()
    talk.send_batch(b"0", producer=(9, 0))
    assert talk.send_batch(b"0", producer=(8, 0)).result.duplicates == 0
    assert talk.send_batch(b"0", partition=1, producer=(9, 0)).result.duplicates == 0
    assert not talk.send_batch(b"5", partition=10_000, producer=(9, 5)).success
    # One whose earlier messages were answered long ago, and that the broker forgot.
    assert talk.send_batch(b"5", partition=10_000, producer=(9, 5, 5)).success


def test_the_answer_to_a_duplicate_waits_for_the_commit_of_the_first() -> None:
    talk = Talk()
    request = pb.SendMessageRequestP2B(
        clientId="p", topicName="demo", partitionId=0, data=b"x", flag=0, checkSum=-1, sentAddr=0
    )
    request.producer.producerId = 4
    for _ in range(2):
        answer = talk.answer(Request(1, 3, 13, request.SerializeToString()))
        assert answer is not None
        assert answer.wait


def test_a_disk_that_does_not_keep_up_takes_no_batch() -> None:
    talk = Talk()
    talk.engine.produce.max_unwritten_bytes = 100
    assert talk.send_batch(bytes(200)).success
    assert talk.send_batch(b"x", b"y").errCode == 419
