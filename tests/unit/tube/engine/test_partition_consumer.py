"""One partition's way from order to registration to release."""

from __future__ import annotations

import pytest

from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.strings import BrokerInfo, Partition
from penstock.tube.engine.client.consumer_state import FetchStep, GroupStart, PartitionConsumer

PARTITIONS = tuple(Partition(BrokerInfo(1, "h", 1), "demo", number) for number in range(2))


def register_answer(code: int, offset: int = 28) -> broker_pb2.RegisterResponseB2C:
    return broker_pb2.RegisterResponseB2C(success=code == 200, errCode=code, errMsg="", currOffset=offset, maxOffset=56)


def get_answer(code: int, messages: int = 0, *, start: int = 0, end: int = 28) -> broker_pb2.GetMessageResponseB2C:
    answer = broker_pb2.GetMessageResponseB2C(success=code == 200, errCode=code, currOffset=start, maxOffset=end)
    for _ in range(messages):
        answer.messages.add(messageId=1, checkSum=0, payLoadData=b"", flag=0)
    return answer


def reading() -> PartitionConsumer:
    ours = PartitionConsumer(PARTITIONS[0], GroupStart.LATEST, most_wait_ms=40)
    assert ours.next_step(0) is FetchStep.REGISTER
    assert ours.register_answer(register_answer(200), 0) is FetchStep.GET
    return ours


def test_verdict_travels_with_the_next_get() -> None:
    ours = reading()
    assert not ours.get_request("c", "g").lastPackConsumed
    assert ours.get_answer(get_answer(200, 2), 0) is FetchStep.DELIVER
    assert ours.leave_status == 1
    assert not ours.get_request("c", "g").lastPackConsumed
    assert ours.get_answer(get_answer(200, 2), 0) is FetchStep.DELIVER
    ours.confirmed()
    assert ours.leave_status == 0
    assert ours.get_request("c", "g").lastPackConsumed
    assert ours.leave_status == 1, "the get has confirmed it; its response may bring other messages"
    assert ours.get_answer(get_answer(503), 0) is FetchStep.WAIT
    assert ours.leave_status == 0, "the get may not have confirmed it"


def test_only_the_first_registration_may_begin_at_the_end() -> None:
    ours = PartitionConsumer(PARTITIONS[0], GroupStart.LATEST)
    assert ours.read_status == 1
    ours.register_answer(register_answer(200), 0)
    ours.disconnected()
    assert ours.read_status == 0
    assert ours.next_step(0) is FetchStep.REGISTER


def test_idle_partition_is_asked_less_and_less_often() -> None:
    ours = reading()
    waits = []
    for _ in range(5):
        assert ours.get_answer(get_answer(404), 100) is FetchStep.WAIT
        waits.append(ours.ready_at - 100)
    assert waits == [5, 10, 20, 40, 40]
    assert ours.next_step(139) is FetchStep.WAIT
    assert ours.next_step(140) is FetchStep.GET
    ours.get_answer(get_answer(200, 1), 0)
    ours.get_answer(get_answer(404), 0)
    assert ours.ready_at == 5


def test_success_without_messages_goes_on_at_once_unless_at_the_end() -> None:
    ours = reading()
    assert ours.get_answer(get_answer(200, start=0, end=280), 0) is FetchStep.GET
    assert ours.get_request("c", "g").lastPackConsumed
    assert ours.get_answer(get_answer(200, start=28, end=28), 0) is FetchStep.WAIT


@pytest.mark.parametrize(
    ("code", "step", "wait"),
    [
        (301, FetchStep.WAIT, 200),
        (403, FetchStep.WAIT, 2000),
        (411, FetchStep.REGISTER, 0),
        (412, FetchStep.DROP, 0),
        (415, FetchStep.DROP, 0),
        (452, FetchStep.WAIT, 10),
        (500, FetchStep.WAIT, 300),
        (503, FetchStep.WAIT, 200),
        (999, FetchStep.WAIT, 300),
    ],
)
def test_other_answers_to_a_get(code: int, step: FetchStep, wait: int) -> None:
    ours = reading()
    assert ours.get_answer(get_answer(code), 0) is step
    assert ours.ready_at == wait
    assert ours.registered == (code != 411)


def test_occupied_partition_is_tried_again_then_left() -> None:
    ours = PartitionConsumer(PARTITIONS[0], GroupStart.EARLIEST)
    steps = [ours.register_answer(register_answer(410), 0) for _ in range(4)]
    assert steps == [FetchStep.WAIT, FetchStep.WAIT, FetchStep.WAIT, FetchStep.DROP]
    ours = PartitionConsumer(PARTITIONS[0], GroupStart.EARLIEST)
    assert ours.register_answer(register_answer(415), 0) is FetchStep.WAIT, "the next heartbeat brings a token"
    assert (
        PartitionConsumer(PARTITIONS[0], GroupStart.EARLIEST).register_answer(register_answer(503), 0) is FetchStep.WAIT
    )
    assert (
        PartitionConsumer(PARTITIONS[0], GroupStart.EARLIEST).register_answer(register_answer(403), 0) is FetchStep.DROP
    )


def test_broker_with_extensions_waits_itself() -> None:
    ours = PartitionConsumer(PARTITIONS[0], GroupStart.EARLIEST, long_poll_ms=500, want_offsets=True)
    answer = register_answer(200)
    ours.register_answer(answer, 0)
    assert not ours.get_request("c", "g").HasField("maxWaitMs")
    answer.extensions = 1
    ours.register_answer(answer, 0)
    request = ours.get_request("c", "g")
    assert (request.maxWaitMs, request.wantOffsets) == (500, True)
    assert ours.get_answer(get_answer(404), 0) is FetchStep.GET


def test_start_offset_and_seek() -> None:
    ours = PartitionConsumer(PARTITIONS[0], GroupStart.LATEST, offset=56)
    starts = [ours.start_offset]
    ours.register_answer(register_answer(200), 0)
    starts.append(ours.start_offset)
    assert starts == [56, None], "a later registration goes on where the group is"
    ours.get_answer(get_answer(404), 0)
    ours.seek(28)
    assert (ours.start_offset, ours.moves) == (28, 1)
    assert ours.next_step(0) is FetchStep.REGISTER
    assert not ours.get_request("c", "g").lastPackConsumed
