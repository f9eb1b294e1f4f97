"""Exact ranges of a partition from any TubeMQ broker, as a consumer that registers at the broker alone.

Apache's brokers know no ranges: a get brings what it likes from the group's position on. But a registration says where
to begin, every answer says where it began, and a commit says where it ended. So a range is read by asking, checking
every position and cutting what the last get brought beyond the end: from the message on that a registration *at* the
end brings first. The order matters: the batch, then the look at the end. Then everything up to where the batch reached
was already written when the look was taken, and what it finds is final.

Nothing here reads or waits. :func:`read_range` gives one :data:`Step` after the other; whoever drives it sends back the
answer to an :class:`Ask`, and nothing to the others.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from penstock.errors import DataLossError, RefusedError, UnavailableError
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.encoded import Encoded
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2

__all__ = ["Answer", "Ask", "Fetched", "Got", "Pause", "Place", "Session", "Step", "read_range", "stand_at"]

Request = broker_pb2.RegisterRequestC2B | broker_pb2.GetMessageRequestC2B | broker_pb2.CommitOffsetRequestC2B

_REGISTER, _UNREGISTER = 31, 32
_KEEP_POSITION = 1
"""readStatus of an unregistration: what was fetched last does not count (0 would move the position past the end)."""
_FROM_MEMORY_TOO = 303
"""qryPriorityId: also what is not in the broker's files yet. With less a reader would miss the newest messages."""
_RETRY_MS = 20
_OCCUPIED_MS = 500


class Got(NamedTuple):
    """The answer to a get: all but its messages, and these."""

    said: broker_pb2.GetMessageResponseB2C
    messages: Encoded


Answer = broker_pb2.RegisterResponseB2C | Got | broker_pb2.CommitOffsetResponseB2C


class Place(NamedTuple):
    """What is read: a partition by its wire id."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"topic {self.topic!r} partition {self.partition}"


class Ask(NamedTuple):
    """Send ``request``; go on with the answer."""

    method: MethodId
    request: Request


class Pause(NamedTuple):
    """Nothing can be done for so long. It is for the driver to give up after many in a row."""

    ms: int
    why: str


class Fetched(NamedTuple):
    """Messages of the range: those of the positions ``[start, end)``, of a get that began at ``start``."""

    start: int
    end: int
    messages: Encoded


Step = Ask | Pause | Fetched
Steps = Generator[Step, "Answer | None", None]
Positioned = Generator[Step, "Answer | None", int]


class Session:
    """Who asks, for one range. ``groups``: names to register under; where another attempt holds one, the next is taken.

    ``client_id`` must be new for each attempt: two tasks with one name would move each other's position, unnoticed.
    """

    def __init__(self, client_id: str, groups: Sequence[str]) -> None:
        self.client_id = client_id
        self.held: str | None = None
        """The group that registered last; None before: those that were tried belong to others."""
        self._groups = groups
        self._turn = 0

    @property
    def group(self) -> str:
        """The group of the last registration."""
        return self._groups[self._turn % len(self._groups)]

    def next_group(self) -> bool:
        """Take another name; False: all were tried, it is the first one's turn again."""
        self._turn += 1
        return self._turn % len(self._groups) != 0

    def register(self, place: Place, op: int, position: int | None = None) -> Ask:
        """A registration (31) or its end (32); the driver adds what says that the client may."""
        request = broker_pb2.RegisterRequestC2B(
            opType=op,
            clientId=self.client_id,
            groupName=self.group,
            topicName=place.topic,
            partitionId=place.partition,
            readStatus=_KEEP_POSITION if op == _UNREGISTER else 0,
            qryPriorityId=_FROM_MEMORY_TOO,
        )
        if position is not None:
            request.currOffset = position
        return Ask(MethodId.PARTITION_REGISTER, request)

    def leave(self, place: Place) -> Ask:
        """End the registration; the group's position stays where it is."""
        return self.register(place, _UNREGISTER)

    def get(self, place: Place) -> Ask:
        """The next messages from the group's position."""
        return Ask(
            MethodId.GET_MESSAGES,
            broker_pb2.GetMessageRequestC2B(
                clientId=self.client_id,
                partitionId=place.partition,
                groupName=self.group,
                topicName=place.topic,
                lastPackConsumed=False,
                manualCommitOffset=False,
                escFlowCtrl=True,
            ),
        )

    def commit(self, place: Place) -> Ask:
        """What the last get brought is done with."""
        return Ask(
            MethodId.COMMIT_OFFSET,
            broker_pb2.CommitOffsetRequestC2B(
                clientId=self.client_id,
                topicName=place.topic,
                partitionId=place.partition,
                groupName=self.group,
                lastPackConsumed=True,
            ),
        )


def read_range(session: Session, place: Place, start: int, end: int) -> Steps:
    """The messages of ``place`` in ``[start, end)``, in order, each once; then the partition is given back.

    ``start`` and ``end`` are positions of the store (multiples of 28). The driver ends the generator early where its
    user wants no more; the registration then ends with its session.

    Raises:
        DataLossError: part of the range is not kept any more, or never was.
        RefusedError: the broker refuses; 415: it wants a token that the session lacks.
    """
    yield from _register(session, place, start, end)
    position = start
    while position < end:
        messages, reached = yield from _fetch(session, place, position, end)
        if len(messages) and reached > end:
            messages = messages.until((yield from _cut(session, place, end, reached, messages)))
        if reached > position:
            yield Fetched(position, min(reached, end), messages)
            position = reached
    yield from stand_at(session, place, end)


def stand_at(session: Session, place: Place, position: int) -> Steps:
    """Leave the group's stored position at exactly ``position``, registered by nobody."""
    yield from _register(session, place, position, position)
    answer = yield session.leave(place)
    assert isinstance(answer, broker_pb2.RegisterResponseB2C)
    if answer.errCode not in {ErrCode.SUCCESS, ErrCode.HB_NO_NODE}:
        raise _refused(place, answer.errCode, answer.errMsg)


def _register(session: Session, place: Place, start: int, end: int) -> Steps:
    """Register at ``start``, of a log that must reach ``end``."""
    while True:
        answer = yield session.register(place, _REGISTER, start)
        assert isinstance(answer, broker_pb2.RegisterResponseB2C)
        if answer.errCode == ErrCode.SUCCESS:
            session.held = session.group
            break
        if answer.errCode == ErrCode.PARTITION_OCCUPIED:
            if not session.next_group():
                yield Pause(_OCCUPIED_MS, f"{place}: {answer.errMsg}")
        elif answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
            raise UnavailableError(f"tube: {place}: the broker does not serve now: {answer.errMsg}", applied=False)
        else:
            raise _refused(place, answer.errCode, answer.errMsg)
    # The broker puts a position that it does not have silently where it has one, and says 200.
    if answer.currOffset > start:
        raise DataLossError(
            f"tube: {place}: offset {start} is no longer kept (earliest {answer.currOffset})",
            end=answer.currOffset,
            why="retention removed it before it was read",
            do="raise the topic's retention, or start from the earliest offset and accept the gap",
        )
    reachable = answer.currOffset if answer.currOffset < start else answer.maxOffset
    if reachable < end:
        raise DataLossError(
            f"tube: {place}: the log ends at {reachable}, not at {end}",
            why="the range was planned on a log that had more: the broker lost its newest messages in a crash",
        )


def _fetch(
    session: Session, place: Place, position: int, end: int
) -> Generator[Step, Answer | None, tuple[Encoded, int]]:
    """What one get brings at ``position``, and how far it walked: the position of the next entry it did not see."""
    while True:
        answer = yield session.get(place)
        assert isinstance(answer, Got)
        got, messages = answer
        if got.errCode == ErrCode.HB_NO_NODE:  # the session ended: the reader was slow, or the broker restarted
            yield from _register(session, place, position, end)
            continue
        if got.errCode == ErrCode.SERVER_CONSUME_SPEED_LIMIT:
            yield Pause(max(got.minLimitTime, _RETRY_MS), f"{place}: {got.errMsg}")
            continue
        if got.errCode == ErrCode.SERVICE_UNAVAILABLE:
            raise UnavailableError(f"tube: {place}: the broker does not serve now: {got.errMsg}", applied=False)
        if got.errCode not in {ErrCode.SUCCESS, ErrCode.NOT_FOUND}:
            raise _refused(place, got.errCode, got.errMsg)
        if got.errCode == ErrCode.SUCCESS and got.currOffset < position:
            yield from _register_anew(session, place, position, end)
            continue
        if got.errCode == ErrCode.SUCCESS and got.currOffset > position:
            raise DataLossError(
                f"tube: {place}: a get at offset {position} began at {got.currOffset}",
                end=got.currOffset,
                why="retention removed what lies between while it was read",
                do="raise the topic's retention, or start from the earliest offset and accept the gap",
            )
        done = yield session.commit(place)
        assert isinstance(done, broker_pb2.CommitOffsetResponseB2C)
        if done.errCode in {ErrCode.UNAUTHORIZED, ErrCode.HB_NO_NODE}:
            yield from _register(session, place, position, end)
            continue
        if done.errCode != ErrCode.SUCCESS:
            raise _refused(place, done.errCode, done.errMsg)
        if done.currOffset < position:
            yield from _register_anew(session, place, position, end)
            continue
        if done.currOffset > position:
            return (messages if got.errCode == ErrCode.SUCCESS else messages.until(0)), done.currOffset
        # A 404 alone never says that the end is reached: something may be on its way into the files.
        yield Pause(_RETRY_MS, f"{place}: nothing can be read at offset {position} yet: {got.errMsg}")


def _register_anew(session: Session, place: Place, position: int, end: int) -> Steps:
    """Register at ``position`` again: the broker stood before it.

    It forgot the position, for whoever read under the name before, or lost the end of its log; this tells which.
    """
    yield Pause(_RETRY_MS, f"{place}: the position of group {session.group!r} was forgotten, again and again")
    yield from _register(session, place, position, end)


def _cut(session: Session, place: Place, end: int, reached: int, messages: Encoded) -> Positioned:
    """How many of ``messages``, of a batch that reached beyond ``end``, lie before it."""
    yield from _register(session, place, end, reached)
    position = end
    while position < reached:
        beyond, position = yield from _fetch(session, place, position, reached)
        if len(beyond):
            # By all that is in it, and by place: message ids are not ordered, and may recur.
            first = next(iter(beyond))
            return next((index for index, message in enumerate(messages) if message == first), len(messages))
    return len(messages)


def _refused(place: Place, code: int, text: str) -> RefusedError:
    return RefusedError(f"tube: {place}: the broker refuses: {text}", code=code, text=text)
