"""The state store as a service of the MQTT broker: requests in, answers and notifications out, after the commit.

A request is carried out in memory as soon as it arrives; what it changed goes to the group committer, and its answer,
its PUBACK and its notifications leave when that commit is done. An answer that shows a change of somebody else which
is not committed yet waits for that commit, and answers to one client never overtake each other; everything else
leaves at once. All waiting is for numbered commits, which finish in order.

An answer is a message of the store on the response topic, for the subscriptions of the client that asked and for no
other's. A notification goes straight into the observer's session, subscribed or not.

After a failed commit the store is read-only: nothing is acknowledged any more, what had been committed can be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from penstock.errors import LocalProtocolError, StorageError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.service import Inbound, Outlet
from penstock.runtime.clock import steady_clock, wall_clock_ms
from penstock.runtime.committer import GroupCommitter
from penstock.runtime.durability import Durability
from penstock.statestore.answer import Answer, AnswerKind, Context
from penstock.statestore.binding import (
    INVOKE,
    OLDER_INVOKE,
    Ask,
    Refusal,
    dialect_named,
    notification,
    read_request,
    response,
    topic_fits,
)
from penstock.statestore.commands import Access, StoreError, Verb, parse_payload
from penstock.statestore.engine import Engine
from penstock.statestore.record import Change
from penstock.statestore.storage import Recovered, Storage

__all__ = ["Policy", "StateStoreService", "Stats"]

_log = logging.getLogger("penstock.statestore")

_EXPIRE_AT_ONCE: Final = 1000
"""Keys expired in one go, some 2 ms; a million keys with one deadline must not stop the loop."""

_MAX_WRITE_BEHIND: Final = 50_000
"""With durability ``memory``, changes that may wait for the disk; beyond it answers wait too, so that a disk slower
than the clients slows them down instead of filling the memory."""

_LONGEST_TIMER_S: Final = 86_400.0
"""Timers are armed for a day at most: event loops do not take every number that PX does."""


class Stats:
    """Counters since the start, read by the metrics page."""

    __slots__ = (
        "notifications",
        "quarantined",
        "recovered",
        "refused",
        "requests",
        "responses",
        "unanswered",
        "undelivered",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.responses = 0
        """Answers put into the session of the client that asked."""
        self.unanswered = 0
        """Answers that nobody could get: the client does not subscribe to its response topic, or that is no topic."""
        self.refused = 0
        """Requests that broke the rules of the transport and were not executed."""
        self.notifications = 0
        self.undelivered = 0
        """Notifications whose observer has no session any more."""
        self.recovered = 0
        self.quarantined = 0


class Policy(Protocol):
    """What the node's policies say of the clients of the store; every method is called on the packet path."""

    def may_access(self, context: Context, access: Access, key: bytes) -> bool:
        """Whether the client may do this to the key; of several flags all must be granted."""
        ...

    def may_answer_on(self, context: Context, topic: str) -> bool:
        """Whether the client may publish to the response topic that it names: the store does so on its word."""
        ...


class _Waiting(NamedTuple):
    """What is to be said to a request: the answer of the engine, or why it was not executed."""

    message: Inbound
    ask: Ask | Refusal
    answer: Answer | None


class StateStoreService:
    """The store in the directory ``path``, served through an :class:`~penstock.mqtt.service.Outlet`.

    Args:
        path: directory of the LMDB environment.
        durability: what an answer promises.
        clock: wall clock in ms. With a clock of the caller's, expiry follows it too unless ``steady`` is given.
        steady: instant in ms since the epoch that never jumps, for expiry.
        dialect: ``auto`` (each request chooses), or the name of the one dialect to speak.
        max_keys: quota, 0 = none.
        policy: what clients may do; None = everything.
        strict_read: NX, NEX and VDEL need the right to read beside that to write.
    """

    filters: Sequence[str] = (INVOKE, OLDER_INVOKE)
    exclusive = True

    def __init__(
        self,
        path: Path,
        durability: Durability = Durability.DURABLE,
        clock: Callable[[], int] | None = None,
        *,
        steady: Callable[[], int] | None = None,
        dialect: str = "auto",
        max_keys: int = 0,
        policy: Policy | None = None,
        strict_read: bool = False,
    ) -> None:
        self.stats = Stats()
        self.recovered: Recovered | None = None
        self._durability = durability
        self._clock = clock or wall_clock_ms
        self._steady = steady or clock or steady_clock()
        self._forced = dialect_named(dialect)
        self._policy = policy
        self._engine = Engine(
            max_keys=max_keys, authorise=policy.may_access if policy is not None else None, strict_read=strict_read
        )
        self._storage = Storage(path, durability)
        self._committer: GroupCommitter[list[Change]] = GroupCommitter(
            self._commit, name="statestore", on_failure=self._failed
        )
        self._outlet: Outlet | None = None
        self._serving = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for: int | None = None
        self._submitted = 0
        self._uncommitted: dict[bytes, int] = {}
        self._waiting: dict[int, list[_Waiting]] = {}
        self._last_wait: dict[str, int] = {}

    @property
    def failure(self) -> StorageError | None:
        """Why the store is read-only; None while it is not."""
        return self._committer.failure

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self._engine.keys

    @property
    def observations(self) -> int:
        """How many observations there are."""
        return self._engine.observations

    @property
    def expired(self) -> int:
        """How many keys have expired since the start."""
        return self._engine.expired

    @property
    def pending(self) -> int:
        """How many requests that changed something wait for their commit."""
        return self._committer.pending

    async def start(self, outlet: Outlet) -> None:
        """Load what is stored, remove what has expired, then serve.

        Raises:
            StorageError: the directory cannot be opened; a damaged value alone does not stop it.
        """
        self._loop = asyncio.get_running_loop()
        recovered = self.recovered = await asyncio.to_thread(self._storage.open)
        self._engine.restore(recovered.records, recovered.clock)
        self.stats.recovered = len(recovered.records)
        self.stats.quarantined = len(recovered.quarantined)
        for digest in recovered.quarantined:
            _log.error("quarantined path=%s digest=%s: checksum does not match", self._storage.path, digest)
        self._outlet = outlet
        self._committer.start()
        self._serving = True
        self.wake()

    async def close(self) -> None:
        """Commit what is under way, let its answers go, close the files; may be called twice."""
        self._serving = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._committer.close()
        self._outlet = None
        await asyncio.to_thread(self._storage.close)

    def receive(self, message: Inbound) -> None:
        """Take one request [Service]."""
        self.stats.requests += 1
        if not self._serving:
            message.settle(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, "the state store is not running")
            return
        now_ms = self._clock()
        ask = read_request(
            message.publish,
            message.client_id,
            message.received_ms,
            now_ms,
            self._forced,
            message.username,
            message.principal,
        )
        policy = self._policy
        if policy is not None and isinstance(ask, Ask) and not policy.may_answer_on(ask.context, ask.response_topic):
            ask = Refusal(ReasonCode.NOT_AUTHORIZED, "the client may not publish to its own response topic")
        if isinstance(ask, Refusal):
            self._refuse(message, ask)
            return
        wait_for = 0
        changes: list[Change] = []
        command = parse_payload(message.publish.payload)
        if isinstance(command, StoreError):
            answer = Answer(AnswerKind.ERROR, error=command)
        elif command.spec.checks_fence and self.failure is not None:
            answer = Answer(AnswerKind.ERROR, error=StoreError.READ_ONLY)
        elif command.verb is Verb.KEYNOTIFY and not topic_fits(message.client_id, command.key):
            answer = Answer(AnswerKind.ERROR, error=StoreError.TOPIC_TOO_LONG)
        else:
            answer, changes = self._engine.execute(command, ask.context, now_ms, self._steady())
            if changes:
                wait_for = self._submit(changes)
            else:
                wait_for = self._uncommitted.get(command.key, 0)
        self._answer(_Waiting(message, ask, answer), wait_for)
        if changes and not wait_for:
            self._notify(changes)

    def disconnected(self, client_id: str) -> None:
        """End the observations of a client whose network connection ended [Service]."""
        self._engine.forget(client_id)

    def wake(self) -> None:
        """Expire what is due by now and arm the timer for what comes next; the timer calls it."""
        self._armed_for = None
        if self.failure is not None:
            return
        changes = self._engine.tick(self._clock(), self._steady(), limit=_EXPIRE_AT_ONCE)
        if changes and not self._submit(changes):
            self._notify(changes)
        self._arm()

    def _arm(self) -> None:
        deadline = self._engine.next_deadline()
        if deadline == self._armed_for or self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_for = deadline
        if deadline is not None:
            delay_s = max(0, deadline - self._steady()) / 1000
            self._timer = self._loop.call_later(min(delay_s, _LONGEST_TIMER_S), self.wake)

    def _submit(self, changes: list[Change]) -> int:
        """Hand ``changes`` to the committer; the number of the commit that their answer waits for, 0 = none."""
        self._arm()
        if self.failure is not None:
            # Only keys that expire get here: they are gone for readers, and the next start removes them for good.
            return 0
        self._submitted = number = self._submitted + 1
        if (
            self._durability is Durability.MEMORY
            and self._committer.pending < _MAX_WRITE_BEHIND
            and not self._uncommitted  # else this change would be told before an earlier one that has to wait
        ):
            self._committer.submit(changes, _ignore)
            return 0
        for change in changes:
            self._uncommitted[change.key] = number
        self._committer.submit(changes, partial(self._committed, number, changes))
        return number

    def _commit(self, batch: Sequence[list[Change]]) -> None:
        """One transaction for ``batch``; runs in the committer's thread."""
        self._storage.commit([change for changes in batch for change in changes])

    def _committed(self, number: int, changes: list[Change], failure: StorageError | None) -> None:
        waiting = self._waiting.pop(number, ())
        for item in waiting:
            if self._last_wait.get(item.message.client_id) == number:
                del self._last_wait[item.message.client_id]
        if failure is not None:
            # The keys stay uncommitted for ever: the value in memory must never be shown.
            for item in waiting:
                self._fail(item)
            return
        for change in changes:
            if self._uncommitted.get(change.key) == number:
                del self._uncommitted[change.key]
        for item in waiting:
            self._release(item)
        self._notify(changes)

    def _failed(self, failure: StorageError) -> None:
        _log.critical("read-only path=%s: %s", self._storage.path, failure)

    def _answer(self, item: _Waiting, wait_for: int) -> None:
        """Let ``item`` go, now or with the commit ``wait_for``, never before an earlier answer to the same client."""
        client_id = item.message.client_id
        wait_for = max(wait_for, self._last_wait.get(client_id, 0))
        if not wait_for:
            self._release(item)
        elif self.failure is not None:
            self._fail(item)
        else:
            self._last_wait[client_id] = wait_for
            self._waiting.setdefault(wait_for, []).append(item)

    def _release(self, item: _Waiting) -> None:
        if isinstance(item.ask, Refusal):
            item.message.settle(item.ask.reason_code, item.ask.reason)
            self._send(item.message.client_id, item.ask.response)
        elif item.answer is not None:
            item.message.settle()
            self._send(item.message.client_id, response(item.ask, item.answer, self._clock()))

    def _fail(self, item: _Waiting) -> None:
        if item.answer is not None:
            item.message.settle(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, StoreError.READ_ONLY)
            item = item._replace(answer=Answer(AnswerKind.ERROR, error=StoreError.READ_ONLY))
        self._release(item)

    def _refuse(self, message: Inbound, refusal: Refusal) -> None:
        self.stats.refused += 1
        if refusal.disconnect:
            # Without a PUBACK, and only the connection that brought it: a will of a client that is back has none.
            message.disconnect(refusal.reason_code, refusal.reason)
        else:
            self._answer(_Waiting(message, refusal, None), 0)

    def _send(self, client_id: str, message: Publish | None) -> None:
        """Answer the requester on its response topic, as the store: No Local must not keep it from the client."""
        if message is None or self._outlet is None:
            return
        try:
            heard = self._outlet.respond(client_id, message)
        except LocalProtocolError as error:
            self.stats.unanswered += 1
            _log.warning("no answer on topic=%r: %s", message.topic, error)
        else:
            if heard:
                self.stats.responses += 1
            else:
                self.stats.unanswered += 1

    def _notify(self, changes: list[Change]) -> None:
        if self._outlet is None or self.failure is not None:
            return
        for change in changes:
            for client_id, dialect in change.observers:
                # One that has gone or stopped meanwhile must not find old news in its session.
                if self._engine.observes(client_id, change.key):
                    self.stats.notifications += 1
                    if not self._outlet.deliver(client_id, notification(change, client_id, dialect)):
                        self.stats.undelivered += 1


def _ignore(_: StorageError | None) -> None:
    """Nobody waits for a change that is written behind; a failure is reported through ``on_failure``."""
