"""Exact ranges of a partition from any TubeMQ broker, by a consumer that registers only at the broker.

Apache's brokers have no ranges: a get returns any number of messages from the group's stored offset on. But a
registration sets the start offset, every response reports the offset at which it began, and a commit reports the offset
at which it ended. So a range is read with gets whose offsets are checked, and messages of the last get beyond the end
are dropped: a registration *at* the end returns the first message beyond it. The batch must be read before that
message: everything up to the end of the batch was already written then, so the result is final.

No IO: :func:`read_range` yields :data:`RangeStep` objects; its driver sends the response to a :class:`SendRequest` into
the generator, and None for other steps.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from penstock.errors import DataLossError, RefusedError, UnavailableError
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.encoded_messages import EncodedMessages
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2

__all__ = [
    "Answer",
    "FetchedMessages",
    "GetResult",
    "PartitionRef",
    "Pause",
    "RangeSession",
    "RangeStep",
    "RangeSteps",
    "SendRequest",
    "commit_offset",
    "read_range",
]

Request = broker_pb2.RegisterRequestC2B | broker_pb2.GetMessageRequestC2B | broker_pb2.CommitOffsetRequestC2B

_REGISTER, _UNREGISTER = 31, 32
_KEEP_POSITION = 1
"""readStatus of an unregistration: the last fetched messages are not consumed (0 would commit an offset after the
end)."""
_FROM_MEMORY_TOO = 303
"""qryPriorityId: include messages that are not in the broker's files yet. Otherwise a reader would miss the newest
messages."""
_RETRY_MS = 20
_LONGEST_OCCUPIED_MS = 500
"""Longest pause for a partition that another consumer holds. The first one is ``_RETRY_MS``, since another commit of
an offset holds it for a few milliseconds; they double, since a consumer that has ended holds it for seconds."""


class GetResult(NamedTuple):
    """The response to a get: the response without messages, and its messages."""

    said: broker_pb2.GetMessageResponseB2C
    messages: EncodedMessages


Answer = broker_pb2.RegisterResponseB2C | GetResult | broker_pb2.CommitOffsetResponseB2C


class PartitionRef(NamedTuple):
    """A partition of a topic by its wire id."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"topic {self.topic!r} partition {self.partition}"


class SendRequest(NamedTuple):
    """A step: send ``request``, continue with the response."""

    method: MethodId
    request: Request


class Pause(NamedTuple):
    """A step: wait ``ms``. The driver raises an error after many consecutive waits."""

    ms: int
    why: str


class FetchedMessages(NamedTuple):
    """A step: messages of the range, of the offsets ``[start, end)``, from a get that began at ``start``."""

    start: int
    end: int
    messages: EncodedMessages


RangeStep = SendRequest | Pause | FetchedMessages
RangeSteps = Generator[RangeStep, "Answer | None", None]
Positioned = Generator[RangeStep, "Answer | None", int]


class RangeSession:
    """The names that the client uses while it reads one range.

    ``groups``: names to register under; if another reader holds one, the next is used.

    ``client_id`` must be unique to each attempt: two tasks with one client id would silently move each other's offset.
    """

    def __init__(self, client_id: str, groups: Sequence[str]) -> None:
        self.client_id = client_id
        self.held: str | None = None
        """The group that registered last; None if all names tried so far are in use."""
        self._groups = groups
        self._turn = 0

    @property
    def group(self) -> str:
        """The group of the last registration."""
        return self._groups[self._turn % len(self._groups)]

    def next_group(self) -> bool:
        """Use the next name; return False after the last one, when the first one follows."""
        self._turn += 1
        return self._turn % len(self._groups) != 0

    def register(self, ref: PartitionRef, op: int, position: int | None = None) -> SendRequest:
        """Return a registration (31) or its end (32); the driver adds the credentials."""
        request = broker_pb2.RegisterRequestC2B(
            opType=op,
            clientId=self.client_id,
            groupName=self.group,
            topicName=ref.topic,
            partitionId=ref.partition,
            readStatus=_KEEP_POSITION if op == _UNREGISTER else 0,
            qryPriorityId=_FROM_MEMORY_TOO,
        )
        if position is not None:
            request.currOffset = position
        return SendRequest(MethodId.PARTITION_REGISTER, request)

    def leave(self, ref: PartitionRef) -> SendRequest:
        """End the registration without changing the group's stored offset."""
        return self.register(ref, _UNREGISTER)

    def get(self, ref: PartitionRef) -> SendRequest:
        """Get the next messages from the group's stored offset."""
        return SendRequest(
            MethodId.GET_MESSAGES,
            broker_pb2.GetMessageRequestC2B(
                clientId=self.client_id,
                partitionId=ref.partition,
                groupName=self.group,
                topicName=ref.topic,
                lastPackConsumed=False,
                manualCommitOffset=False,
                escFlowCtrl=True,
            ),
        )

    def commit(self, ref: PartitionRef) -> SendRequest:
        """Commit the messages of the last get."""
        return SendRequest(
            MethodId.COMMIT_OFFSET,
            broker_pb2.CommitOffsetRequestC2B(
                clientId=self.client_id,
                topicName=ref.topic,
                partitionId=ref.partition,
                groupName=self.group,
                lastPackConsumed=True,
            ),
        )


def read_range(session: RangeSession, ref: PartitionRef, start: int, end: int) -> RangeSteps:
    """Yield the steps that read the messages of ``ref`` in ``[start, end)``, in order, each once; then release the
    partition.

    ``start`` and ``end`` are offsets (multiples of 28). If the driver closes the generator early, the registration ends
    with its session.

    Raises:
        DataLossError: part of the range is no longer stored, or was never written. RefusedError: the broker refuses;
        415: it requires a token that the session lacks.
    """
    yield from _register(session, ref, start, end)
    position = start
    while position < end:
        messages, reached = yield from _fetch(session, ref, position, end)
        if len(messages) and reached > end:
            messages = messages.first_messages((yield from _count_before(session, ref, end, reached, messages)))
        if reached > position:
            yield FetchedMessages(position, min(reached, end), messages)
            position = reached
    yield from commit_offset(session, ref, end)


def commit_offset(session: RangeSession, ref: PartitionRef, position: int) -> RangeSteps:
    """Store ``position`` as the group's offset, and unregister from the partition."""
    yield from _register(session, ref, position, position)
    answer = yield session.leave(ref)
    assert isinstance(answer, broker_pb2.RegisterResponseB2C)
    if answer.errCode not in {ErrCode.SUCCESS, ErrCode.HB_NO_NODE}:
        raise _refused(ref, answer.errCode, answer.errMsg)


def _register(session: RangeSession, ref: PartitionRef, start: int, end: int) -> RangeSteps:
    """Register at ``start``; the log must reach ``end``."""
    pause_ms = _RETRY_MS
    while True:
        answer = yield session.register(ref, _REGISTER, start)
        assert isinstance(answer, broker_pb2.RegisterResponseB2C)
        if answer.errCode == ErrCode.SUCCESS:
            session.held = session.group
            break
        if answer.errCode == ErrCode.PARTITION_OCCUPIED:
            if not session.next_group():
                yield Pause(pause_ms, f"{ref}: {answer.errMsg}")
                pause_ms = min(2 * pause_ms, _LONGEST_OCCUPIED_MS)
        elif answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
            raise UnavailableError(f"tube: {ref}: the broker does not serve now: {answer.errMsg}", applied=False)
        else:
            raise _refused(ref, answer.errCode, answer.errMsg)
    # The broker silently replaces an offset outside of the log by the nearest one, with code 200.
    if answer.currOffset > start:
        raise DataLossError(
            f"tube: {ref}: offset {start} is no longer stored (earliest {answer.currOffset})",
            end=answer.currOffset,
            why="retention removed it before it was read",
            hint="raise the topic's retention, or start from the earliest offset and accept the gap",
        )
    reachable = answer.currOffset if answer.currOffset < start else answer.maxOffset
    if reachable < end:
        raise DataLossError(
            f"tube: {ref}: the log ends at {reachable}, not at {end}",
            why="the range was planned on a longer log: the broker lost its newest messages in a crash",
        )


def _fetch(
    session: RangeSession, ref: PartitionRef, position: int, end: int
) -> Generator[RangeStep, Answer | None, tuple[EncodedMessages, int]]:
    """Return the messages of one get at ``position``, and the offset of the first entry that it did not reach."""
    while True:
        answer = yield session.get(ref)
        assert isinstance(answer, GetResult)
        got, messages = answer
        if got.errCode == ErrCode.HB_NO_NODE:  # the session ended: the reader was slow, or the broker restarted
            yield from _register(session, ref, position, end)
            continue
        if got.errCode == ErrCode.SERVER_CONSUME_SPEED_LIMIT:
            yield Pause(max(got.minLimitTime, _RETRY_MS), f"{ref}: {got.errMsg}")
            continue
        if got.errCode == ErrCode.SERVICE_UNAVAILABLE:
            raise UnavailableError(f"tube: {ref}: the broker does not serve now: {got.errMsg}", applied=False)
        if got.errCode not in {ErrCode.SUCCESS, ErrCode.NOT_FOUND}:
            raise _refused(ref, got.errCode, got.errMsg)
        if got.errCode == ErrCode.SUCCESS and got.currOffset < position:
            yield from _register_again(session, ref, position, end)
            continue
        if got.errCode == ErrCode.SUCCESS and got.currOffset > position:
            raise DataLossError(
                f"tube: {ref}: a get at offset {position} began at {got.currOffset}",
                end=got.currOffset,
                why="retention removed records of the range while it was read",
                hint="raise the topic's retention, or start from the earliest offset and accept the gap",
            )
        done = yield session.commit(ref)
        assert isinstance(done, broker_pb2.CommitOffsetResponseB2C)
        if done.errCode in {ErrCode.UNAUTHORIZED, ErrCode.HB_NO_NODE}:
            yield from _register(session, ref, position, end)
            continue
        if done.errCode != ErrCode.SUCCESS:
            raise _refused(ref, done.errCode, done.errMsg)
        if done.currOffset < position:
            yield from _register_again(session, ref, position, end)
            continue
        if done.currOffset > position:
            return (messages if got.errCode == ErrCode.SUCCESS else messages.first_messages(0)), done.currOffset
        # Code 404 does not imply that the end is reached: messages may not be in the files yet.
        yield Pause(_RETRY_MS, f"{ref}: nothing can be read at offset {position} yet: {got.errMsg}")


def _register_again(session: RangeSession, ref: PartitionRef, position: int, end: int) -> RangeSteps:
    """Register at ``position`` again: the broker's stored offset was lower.

    Either the broker removed the offset of an earlier user of the name, or it lost the end of its log; the registration
    shows which one.
    """
    yield Pause(_RETRY_MS, f"{ref}: the position of group {session.group!r} was forgotten repeatedly")
    yield from _register(session, ref, position, end)


def _count_before(
    session: RangeSession, ref: PartitionRef, end: int, reached: int, messages: EncodedMessages
) -> Positioned:
    """Return the number of ``messages`` before ``end``, of a batch that reached beyond it."""
    yield from _register(session, ref, end, reached)
    position = end
    while position < reached:
        beyond, position = yield from _fetch(session, ref, position, reached)
        if len(beyond):
            # Compared by content and order: message ids are not ordered, and may be repeated.
            first = next(iter(beyond))
            return next((index for index, message in enumerate(messages) if message == first), len(messages))
    return len(messages)


def _refused(ref: PartitionRef, code: int, text: str) -> RefusedError:
    return RefusedError(f"tube: {ref}: the broker refuses: {text}", code=code, text=text)
