"""Exact ranges by registration, on a model of Apache's broker: what the protocol lets it do, it does at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DataLossError, RefusedError, UnavailableError
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.encoded_messages import decode_get
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.engine.client.apache_range_reader import (
    Answer,
    FetchedMessages,
    GetResult,
    PartitionRef,
    Pause,
    RangeSession,
    SendRequest,
    commit_offset,
    read_range,
)

ENTRY = 28
PLACE = PartitionRef("t", 0)


@dataclass
class Model:
    """A store of Apache's: ``log`` has the partition of each message, ``oldest`` of them are gone."""

    log: list[int]
    oldest: int = 0
    walk: Callable[[], int] = lambda: 3  # entries that a get looks at, at most
    not_yet: Callable[[], bool] = lambda: False  # a 404 although there is something
    limited: Callable[[], bool] = lambda: False
    forgets: Callable[[], bool] = lambda: False  # the session ends
    removed: Callable[[], bool] = lambda: False  # somebody has the group's position forgotten
    grow: Callable[[], int] = lambda: 0  # messages that come between two questions
    held_by: dict[str, str] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    flying: dict[str, int] = field(default_factory=dict)
    asked: list[MethodId] = field(default_factory=list)
    before: Callable[[MethodId], None] = lambda _: None

    def message(self, index: int) -> broker_pb2.TransferedMessage:
        # Ids are not in order, and recur.
        return broker_pb2.TransferedMessage(
            messageId=(index * 7919) % 13, checkSum=index % 5, payLoadData=b"%d" % index, flag=0
        )

    def own(self, start: int, end: int) -> list[bytes]:
        return [b"%d" % n for n in range(start // ENTRY, min(end // ENTRY, len(self.log))) if self.log[n] == 0]

    def answer(self, step: SendRequest) -> Answer:
        self.asked.append(step.method)
        self.before(step.method)
        for _ in range(self.grow()):
            self.log.append(len(self.log) % 3)
        if self.removed():
            self.stored.clear()
            self.flying.clear()
        request = step.request
        group = request.groupName
        if isinstance(request, broker_pb2.RegisterRequestC2B):
            return self.register(request, group)
        if self.held_by.get(group) == request.clientId and self.forgets():
            del self.held_by[group]
        held = self.held_by.get(group) == request.clientId
        if isinstance(request, broker_pb2.CommitOffsetRequestC2B):
            if not held:
                return broker_pb2.CommitOffsetResponseB2C(success=False, errCode=401, errMsg="who?", currOffset=-1)
            self.stored[group] = self.stored.get(group, 0) + self.flying.pop(group, 0)
            return broker_pb2.CommitOffsetResponseB2C(
                success=True, errCode=200, errMsg="OK", currOffset=self.stored[group]
            )
        return GetResult(*decode_get(self.get(group, held=held).SerializeToString()))

    def register(self, request: broker_pb2.RegisterRequestC2B, group: str) -> broker_pb2.RegisterResponseB2C:
        if self.held_by.get(group, request.clientId) != request.clientId:
            return broker_pb2.RegisterResponseB2C(success=False, errCode=410, errMsg="held", currOffset=-1)
        if request.opType == 32:
            assert request.readStatus == 1, "0 would count what is in flight"
            found = self.held_by.pop(group, None)
            code = 200 if found else 411
            return broker_pb2.RegisterResponseB2C(success=found is not None, errCode=code, errMsg="", currOffset=-1)
        assert request.qryPriorityId == 303
        self.held_by[group] = request.clientId
        self.flying.pop(group, None)
        low, high = self.oldest * ENTRY, len(self.log) * ENTRY
        position = min(max(request.currOffset, low), high)
        self.stored[group] = position - position % ENTRY
        return broker_pb2.RegisterResponseB2C(
            success=True, errCode=200, errMsg="OK!", currOffset=self.stored[group], maxOffset=high
        )

    def get(self, group: str, *, held: bool) -> broker_pb2.GetMessageResponseB2C:
        def no(code: int, text: str) -> broker_pb2.GetMessageResponseB2C:
            return broker_pb2.GetMessageResponseB2C(
                success=False, errCode=code, errMsg=text, currOffset=-1, minLimitTime=7
            )

        if not held:
            return no(ErrCode.HB_NO_NODE, "no session")
        if self.limited():
            return no(ErrCode.SERVER_CONSUME_SPEED_LIMIT, "slowly")
        position = max(self.stored.get(group, 0), self.oldest * ENTRY)
        self.stored[group] = position
        if position >= len(self.log) * ENTRY or self.not_yet():
            return no(ErrCode.NOT_FOUND, "nothing there")
        first = position // ENTRY
        seen = range(first, min(first + max(self.walk(), 1), len(self.log)))
        found = [self.message(n) for n in seen if self.log[n] == 0]
        if found:
            self.flying[group] = len(seen) * ENTRY
        else:
            self.stored[group] += len(seen) * ENTRY  # committed at once
            if len(self.log) == seen.stop:
                return no(ErrCode.NOT_FOUND, "Can't found Message by index!")
        return broker_pb2.GetMessageResponseB2C(success=True, errCode=200, messages=found, currOffset=position)


def read(model: Model, start: int, end: int, session: RangeSession | None = None) -> tuple[list[bytes], list[Pause]]:
    """What the range gives, and the pauses; the positions of what is fetched must follow one another."""
    session = session or RangeSession("me", ["g"])
    steps = read_range(session, PLACE, start, end)
    found: list[bytes] = []
    pauses: list[Pause] = []
    position = start
    answer: Answer | None = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            assert position == max(start, end)
            return found, pauses
        answer = None
        if isinstance(step, SendRequest):
            answer = model.answer(step)
        elif isinstance(step, FetchedMessages):
            assert step.start == position < step.end <= end
            position = step.end
            found += [message.payLoadData for message in step.messages.parsed()]
        else:
            pauses.append(step)
            assert len(pauses) < 1000


@given(st.data())
def test_any_range_is_read_exactly(data: st.DataObject) -> None:
    chance = random.Random(data.draw(st.integers(0, 1 << 30)))
    rate = data.draw(st.sampled_from([0.0, 0.1, 0.4]))
    model = Model(
        data.draw(st.lists(st.integers(0, data.draw(st.integers(0, 3))), max_size=60)),
        walk=lambda: chance.randint(1, 9),
        not_yet=lambda: chance.random() < rate,
        limited=lambda: chance.random() < rate / 2,
        forgets=lambda: chance.random() < rate / 4,
        removed=lambda: chance.random() < rate / 4,
        grow=lambda: chance.randint(0, 2) if chance.random() < rate else 0,
    )
    start, end = sorted(data.draw(st.integers(0, len(model.log))) * ENTRY for _ in range(2))
    session = RangeSession("me", ["g", "h"])
    found, _ = read(model, start, end, session)
    assert found == model.own(start, end)
    assert not model.held_by, "nobody is kept out"
    assert model.stored.get(session.group, end) == end, "there, or removed again"
    assert read(model, start, end)[0] == found, "the same again"


def test_a_range_up_to_the_end_needs_no_look_behind_it() -> None:
    model = Model([0, 1, 0, 1], walk=lambda: 10)
    assert read(model, 0, 4 * ENTRY)[0] == [b"0", b"2"]
    register, get, commit = MethodId.PARTITION_REGISTER, MethodId.GET_MESSAGES, MethodId.COMMIT_OFFSET
    assert model.asked == [register, get, commit, register, register]
    assert read(model, ENTRY, ENTRY)[0] == []


def test_equal_messages_are_cut_at_the_first() -> None:
    # The one at the end is in the batch; so is another of the same id and data, before or behind it.
    model = Model([0] * 30, walk=lambda: 30)
    model.message = lambda index: broker_pb2.TransferedMessage(  # type: ignore[method-assign]
        messageId=index % 5, checkSum=1, payLoadData=b"%d" % (index % 10), flag=0
    )
    assert read(model, 0, 7 * ENTRY)[0] == [b"%d" % n for n in range(7)]


def test_another_attempt_holds_the_partition() -> None:
    model = Model([0, 0, 0], held_by={"g": "dead", "h": "dead"})
    session = RangeSession("me", ["g", "h", "i"])
    assert len(read(model, 0, 3 * ENTRY, session)[0]) == 3
    assert session.held == "i"
    # All are taken, and one becomes free.
    model.held_by = {"g": "dead", "h": "dead"}
    session = RangeSession("me", ["g", "h"])
    tries = iter(range(100))

    def leave(_: MethodId) -> None:
        if next(tries) == 4:
            del model.held_by["g"]

    model.before = leave
    found, pauses = read(model, 0, 3 * ENTRY, session)
    assert len(found) == 3
    assert pauses


def test_pauses_for_an_occupied_partition_are_short_first_and_become_longer() -> None:
    """A commit of an offset occupies the partition for a few milliseconds, a consumer that has ended for seconds."""
    model = Model([0], held_by={"g": "other"})
    tries = iter(range(100))

    def leave(_: MethodId) -> None:
        if next(tries) == 7:
            model.held_by.clear()

    model.before = leave
    found, pauses = read(model, 0, ENTRY)
    assert len(found) == 1
    assert [pause.ms for pause in pauses] == [20, 40, 80, 160, 320, 500, 500]


def test_offsets_removed_before_the_read_raise_data_loss() -> None:
    model = Model([0] * 10, oldest=4)
    with pytest.raises(DataLossError, match=r"offset 28 is no longer stored \(earliest 112\)") as caught:
        read(model, ENTRY, 8 * ENTRY)
    assert caught.value.end == 4 * ENTRY


@pytest.mark.parametrize("method", [MethodId.GET_MESSAGES, MethodId.COMMIT_OFFSET])
def test_offsets_removed_during_the_read_raise_data_loss(method: MethodId) -> None:
    model = Model([0] * 20)
    seen: list[MethodId] = []

    def expire(now: MethodId) -> None:
        seen.append(now)
        if seen.count(method) == 2:
            model.oldest = 12

    model.before = expire
    with pytest.raises(DataLossError, match=r"began at 336|no longer stored") as caught:
        read(model, 0, 18 * ENTRY)
    assert caught.value.end == 12 * ENTRY


def test_a_log_that_became_shorter() -> None:
    model = Model([0] * 10)
    with pytest.raises(DataLossError, match="the log ends at 280, not at 336"):
        read(model, 0, 12 * ENTRY)
    with pytest.raises(DataLossError, match="the log ends at 280, not at 336"):
        read(model, 12 * ENTRY, 12 * ENTRY)


@pytest.mark.parametrize(
    ("method", "code", "kind"),
    [
        (MethodId.PARTITION_REGISTER, 403, RefusedError),
        (MethodId.PARTITION_REGISTER, 503, UnavailableError),
        (MethodId.GET_MESSAGES, 412, RefusedError),
        (MethodId.GET_MESSAGES, 503, UnavailableError),
        (MethodId.COMMIT_OFFSET, 500, RefusedError),
    ],
)
def test_refusals(method: MethodId, code: int, kind: type[Exception]) -> None:
    model = Model([0] * 10)
    steps = read_range(RangeSession("me", ["g"]), PLACE, 0, ENTRY)
    step = next(steps)
    while isinstance(step, SendRequest) and step.method is not method:
        step = steps.send(model.answer(step))
    assert isinstance(step, SendRequest)
    answer = model.answer(step)
    said = answer.said if isinstance(answer, GetResult) else answer
    said.errCode, said.errMsg = code, "no"
    with pytest.raises(kind, match=r"topic 't' partition 0.*no"):
        steps.send(answer)


def test_to_stand_at_a_position() -> None:
    model = Model([0] * 10)
    steps = commit_offset(RangeSession("me", ["lake"]), PLACE, 3 * ENTRY)
    answer: Answer | None = None
    for _ in range(2):
        step = steps.send(answer)
        assert isinstance(step, SendRequest)
        answer = model.answer(step)
    with pytest.raises(StopIteration):
        steps.send(answer)
    assert (model.stored, model.held_by) == ({"lake": 3 * ENTRY}, {})
