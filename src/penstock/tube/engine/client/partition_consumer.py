"""The state of one partition of a consumer, from its assignment to its release: the next request, and each response.

Time is an argument; nothing here waits.
"""

from __future__ import annotations

from enum import Enum

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.strings import Partition

__all__ = ["LATEST_OFFSET", "FetchStep", "PartitionConsumer", "Start"]

LATEST_OFFSET = (1 << 63) - 28
"""A start offset beyond every log: brokers begin at the end then."""
COMMITS_AT_OFFSETS = 2
"""Brokers from this version of the extensions on commit at any offset."""


class Start(Enum):
    """Start of a group without a stored offset; the value is readStatus of the first registration."""

    EARLIEST = 0
    LATEST = 1


class FetchStep(Enum):
    """The next step of a partition."""

    REGISTER = "register"
    GET = "get"
    WAIT = "wait"  # until ``ready_at``
    DELIVER = "deliver"  # messages came: hand them out, then confirm
    DROP = "drop"  # it is not ours any more


class PartitionConsumer:
    """One partition: registered or not, what the last get brought, when to ask again.

    A broker of ours answers a get when there is something, or after ``long_poll_ms``. Another one is asked again after
    5 ms, then ever later up to ``most_wait_ms``; the first message ends that.

    ``explicit``: nothing is confirmed by the next get. A broker that commits at offsets then delivers beyond what is
    unconfirmed; on another one the next get waits until the batch is confirmed.
    """

    FIRST_WAIT_MS = 5

    def __init__(
        self,
        partition: Partition,
        start: Start,
        *,
        most_wait_ms: int = 400,
        long_poll_ms: int = 0,
        want_offsets: bool = False,
        explicit: bool = False,
        offset: int | None = None,
    ) -> None:
        self.partition = partition
        self.registered = False
        self.ready_at = 0
        self.offset = -1  # where the last read began
        self.max_offset = -1
        self.extensions = 0
        self.moves = 0
        """Grows with each seek: the answer to a get from before one means nothing."""
        self._start = start
        self._seek = offset
        self._long_poll_ms = long_poll_ms
        self._want_offsets = want_offsets
        self._explicit = explicit
        self._known = False  # was registered before in this process
        self._verdict = False  # what becomes of the batch before the next get
        self._attempts = 0
        self._most_wait_ms = most_wait_ms
        self._wait_ms = self.FIRST_WAIT_MS

    @property
    def read_status(self) -> int:
        """Start without a stored offset; a later registration never skips messages that arrived in between."""
        return 0 if self._known else self._start.value

    @property
    def commits_at_offsets(self) -> bool:
        """Whether the broker commits up to any offset; others commit all that they delivered last, or nothing."""
        return self.extensions >= COMMITS_AT_OFFSETS

    @property
    def reads_on(self) -> bool:
        """Whether the next get may come before the last batch is confirmed."""
        return self._explicit and self.commits_at_offsets

    @property
    def start_offset(self) -> int | None:
        """Start of the next registration instead of the group's stored offset; None: that offset."""
        return self._seek

    def seek(self, offset: int) -> None:
        """Continue at ``offset``: register anew."""
        self.disconnected()
        self._seek = offset
        self.moves += 1
        self.ready_at = 0

    def next_step(self, now: int) -> FetchStep:
        """The step to take at ``now``: register, get, or wait."""
        if now < self.ready_at:
            return FetchStep.WAIT
        return FetchStep.GET if self.registered else FetchStep.REGISTER

    def register_answer(self, answer: broker_pb2.RegisterResponseB2C, now: int) -> FetchStep:
        """Process the response to a registration: get, register again later, or drop the partition."""
        if answer.errCode == ErrCode.SUCCESS:
            self.registered = self._known = True
            self._verdict = False
            self._attempts = 0
            self._seek = None
            self.extensions = answer.extensions
            self.offset = answer.currOffset
            self.max_offset = answer.maxOffset
            return FetchStep.GET
        if answer.errCode in {ErrCode.PARTITION_OCCUPIED, ErrCode.CERTIFICATE_FAILURE}:
            # Occupied: the last owner's session is not over yet, or it just was and the next try succeeds. Certificate:
            # the token ran out, and a heartbeat to the master brings the next one.
            self._attempts += 1
            if self._attempts > 3:
                return FetchStep.DROP
            return self._later(100 * self._attempts, now)
        if answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
            return self._later(500, now)
        return FetchStep.DROP

    def get_request(self, client_id: str, group: str) -> broker_pb2.GetMessageRequestC2B:
        """The next get; it carries what became of the batch before."""
        request = broker_pb2.GetMessageRequestC2B(
            clientId=client_id,
            partitionId=self.partition.id,
            groupName=group,
            topicName=self.partition.topic,
            lastPackConsumed=self._verdict and not self.reads_on,
            manualCommitOffset=self.reads_on,
            escFlowCtrl=False,
        )
        if self.extensions:
            if self._long_poll_ms:
                request.maxWaitMs = self._long_poll_ms
            if self._want_offsets or self.reads_on:
                request.wantOffsets = True
        return request

    def get_answer(self, answer: broker_pb2.GetMessageResponseB2C, now: int) -> FetchStep:
        """Process the response to a get: deliver its messages, get again now or later, register anew, or drop it."""
        code = answer.errCode
        if code == ErrCode.SUCCESS:
            self.offset = answer.currOffset
            self.max_offset = max(self.max_offset, answer.maxOffset)
            if answer.messages:
                self._wait_ms = self.FIRST_WAIT_MS
                self._verdict = False
                return FetchStep.DELIVER
            self._verdict = True  # nothing matched; the broker has moved on by itself
            return FetchStep.GET if answer.maxOffset > answer.currOffset else self._idle(now)
        if code == ErrCode.NOT_FOUND:
            self._verdict = True
            # It waited for us already; a broker that waits less than it was asked to is not asked without a pause.
            return FetchStep.GET if self.extensions and self._long_poll_ms >= 100 else self._idle(now)
        if code in {ErrCode.HB_NO_NODE, ErrCode.UNAUTHORIZED}:
            # The broker forgot us (it restarted, the session ended): register again, it knows the position.
            self.disconnected()
            return FetchStep.REGISTER
        if code in {ErrCode.DUPLICATE_PARTITION, ErrCode.CERTIFICATE_FAILURE}:
            return FetchStep.DROP
        if code == ErrCode.SERVER_CONSUME_SPEED_LIMIT:
            return self._later(max(answer.minLimitTime, 10), now)
        return self._later(_WAITS_MS.get(code, 300), now)

    def confirmed(self) -> None:
        """The batch is done with: the next get (or the release) commits it."""
        self._verdict = True

    def disconnected(self) -> None:
        """The registration is void; unconfirmed messages are delivered again."""
        self.registered = False
        self._verdict = False

    @property
    def leave_status(self) -> int:
        """readStatus of the release: 0 commits the last batch, 1 gives it back."""
        return 0 if self._verdict and not self.reads_on else 1

    def _idle(self, now: int) -> FetchStep:
        wait = self._wait_ms
        self._wait_ms = min(wait * 2, self._most_wait_ms)
        return self._later(wait, now)

    def _later(self, ms: int, now: int) -> FetchStep:
        self.ready_at = now + ms
        return FetchStep.WAIT


# The reference's waits after an answer that brings nothing.
_WAITS_MS: dict[int, int] = {ErrCode.FORBIDDEN: 2000, ErrCode.MOVED: 200, ErrCode.SERVICE_UNAVAILABLE: 200}
