"""The state store as a service of the MQTT broker: executes requests, and sends answers after the commit.

A request is executed in memory when it arrives; its changes go to the commit queue, and its answer, PUBACK and
notifications are sent after that commit. An answer that shows an uncommitted change of another client waits for the
commit of this change, and answers to one client are sent in order; other answers are sent immediately. Commits are
numbered and finish in order.

An answer is a message of the store on the response topic, only for subscriptions of the requesting client. A
notification is added to the observer's session directly, whether or not it subscribes.

After a failed commit the store is read-only: writes are not acknowledged, and committed data can be read.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.errors import StorageError
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.service import Inbound, Outlet, Service
from penstock.runtime.io.clock import SteppedClock, boot_id, boot_ms, steady_clock, utc
from penstock.runtime.io.commit_queue import CommitQueue, CommitWaiter
from penstock.runtime.io.files import Durability
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.statestore.binding import (
    ANSWER_TOPICS,
    INVOKE,
    OLDER_INVOKE,
    RejectedRequest,
    StoreRequest,
    answer_payload,
    answer_properties,
    dialect_named,
    read_request,
    seconds_left,
    status_response,
    topic_fits,
)
from penstock.statestore.codec.commands import Access, Command, Verb, parse_payload
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.engine.requests import Answer, AnswerKind, Context
from penstock.statestore.engine.store import Engine
from penstock.statestore.hlc import MAX_DRIFT_MS, Hlc
from penstock.statestore.options import PersistenceMode, StoreOptions
from penstock.statestore.service.changelog import ChangeLog
from penstock.statestore.service.deduplication import RecentWrites, is_in_doubt
from penstock.statestore.service.delivery import ResponseSender
from penstock.statestore.service.interfaces import Capture, RequestTracer, StoreAuthorizer, StoreStats
from penstock.statestore.service.storage import NODE, Storage, StoredState
from penstock.statestore.service.writer import ChangeWriter

__all__ = ["StateStoreService"]

_log = logging.getLogger("penstock.statestore")

_EXPIRE_AT_ONCE: Final = 1000
"""Number of keys that are removed at once, about 2 ms, so that a million keys with one expiry do not block the loop."""

_LAG_KEPT_MS: Final = 100
"""Minimum change of the steady clock's lag that is stored."""

DEFAULTS: Final = StoreOptions()

# Reading a member of an enum costs as much as a call.
_KEYNOTIFY: Final = Verb.KEYNOTIFY
_PAYLOAD: Final = AnswerKind.PAYLOAD

_REPEATED: Final = RejectedRequest()
"""A request that was already executed: it is only acknowledged."""

_LONGEST_TIMER_S: Final = 86_400.0
"""Maximum delay of timers: event loops do not accept all numbers that PX accepts."""


class StateStoreService(Service):
    """The store in the directory ``path``, served through an :class:`~penstock.mqtt.service.Outlet`.

    Args:
        path: directory of the LMDB environment.
        durability: durability of acknowledged writes.
        clock: wall clock in ms, for versions; a :class:`SteppedClock` that the caller starts, or another clock, which
            is also used for expiry unless ``steady`` is given. Default: a new SteppedClock.
        steady: time in ms since the epoch that never jumps, for expiry.
        options: options of the operator.
        policy: permissions of clients; None = all permissions.
        capture: receives all changes, in order; None = no change capture.
        storage: storage of the keys; default: LMDB in ``path``.
        tracer: records spans of requests; None = no traces.
    """

    def __init__(
        self,
        path: Path,
        durability: Durability = Durability.DURABLE,
        clock: Callable[[], int] | None = None,
        *,
        steady: Callable[[], int] | None = None,
        options: StoreOptions = DEFAULTS,
        policy: StoreAuthorizer | None = None,
        capture: Capture | None = None,
        storage: Storage | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.stats = StoreStats()
        self.recovered: StoredState | None = None
        self.options = options
        self._given_steady = steady or (None if isinstance(clock, SteppedClock) else clock)
        self._own_clock: SteppedClock | None = None
        if clock is None:
            clock = self._own_clock = SteppedClock()
        self._stepped_clock = clock if isinstance(clock, SteppedClock) else None
        self._clock = clock if self._stepped_clock is None else self._stepped_clock.now
        self._steady = self._given_steady or steady_clock()
        self._boot_offset = -1
        """Offset of the steady clock to the time since boot; -1: not used."""
        self._lag = 0
        """Stored lead of the steady clock over the wall clock."""
        self._forced = dialect_named(options.dialect)
        self._policy = policy
        self._tracer = tracer
        self._engine = Engine(
            node=NODE,
            max_keys=options.max_keys,
            max_bytes=options.max_bytes,
            # Without policies all clients are one principal, which needs no share.
            share=0 if policy is None else options.principal_share,
            authorise=policy.may_access if policy is not None else None,
            denied=self._denied if policy is not None else None,
            strict_read=options.strict_read,
            extensions=options.extensions,
            secret=secrets.token_bytes(16),
        )
        self._storage = storage or Storage(path, durability)
        self._responses = ResponseSender(self.stats, self._steady_now)
        self._changelog = ChangeLog(self._storage, self._engine, options, capture, self._trim)
        self._engine.logs_changes = self._changelog.wanted
        self._writer = ChangeWriter(
            self._storage,
            durability,
            options.persistence,
            logs=self._changelog.wanted,
            clock=lambda: self._engine.clock,
            on_logged=self._changelog.logged,
            on_failure=self._failed,
            responses=self._responses,
        )
        self._may_ask = options.persistence.mode is PersistenceMode.CUSTOM and bool(options.persistence.property_name)
        self._asks = options.persistence.property_name.encode(), options.persistence.property_value.encode()
        self._serving = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for: int | None = None
        self._max_waiting = options.max_waiting
        self._recent = RecentWrites()
        self._recovered_clock = self._engine.clock
        """The greatest version before the start."""
        self._read = 0
        """Number of the read to which the times in the next two attributes belong."""
        self._now_ms = 0
        self._steady_ms = 0

    @property
    def filters(self) -> Sequence[str]:
        """The invoke topics [Service]."""
        return INVOKE, OLDER_INVOKE

    @property
    def exclusive(self) -> bool:
        """Requests are neither routed to subscribers nor retained [Service]."""
        return True

    @property
    def reserved(self) -> Sequence[str]:
        """The response and notification topics [Service]."""
        return ANSWER_TOPICS

    @property
    def failure(self) -> StorageError | None:
        """The reason if the store is read-only; None otherwise."""
        return self._writer.failure

    @property
    def stalled(self) -> StorageError | None:
        """The reason if answers wait for disk space; None otherwise."""
        return self._writer.stalled

    @property
    def environment(self) -> LoggedEnvironment:
        """The environment, for backups."""
        return self._storage.environment

    @property
    def queue(self) -> CommitQueue[Any]:
        """The commit queue, for backups."""
        return self._writer.queue

    @property
    def commit_s(self) -> float:
        """Longest duration of the last commits, in seconds."""
        return self._writer.queue.longest_s

    def records(self, pattern: bytes, after: bytes | None, limit: int) -> tuple[list[Record], bytes | None]:
        """Return at most ``limit`` records whose keys match ``pattern``, in the order of their keys.

        They follow the key ``after`` (None: from the first). The second value is the key after which the next page
        starts, None on the last page. A page may be short or empty, see ``PAGE_LOOKED_AT`` in ``engine/scan.py``.
        """
        return self._engine.page(pattern, after, limit, self._steady())

    def record(self, key: bytes) -> Record | None:
        """Return the record of ``key``; None if it does not exist or has expired."""
        return self._engine.record(key, self._steady())

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self._engine.keys

    @property
    def observations(self) -> int:
        """Number of observations."""
        return self._engine.observations

    @property
    def expired(self) -> int:
        """Number of keys that have expired since the start."""
        return self._engine.expired

    @property
    def pending(self) -> int:
        """Number of requests that wait for a commit."""
        return self._writer.waiting

    def quota_metrics(self) -> dict[str, int]:
        """Usage of the quotas and number of refused writes, for the metrics."""
        engine = self._engine
        keys, size = engine.quotas.largest
        return {
            "bytes": engine.size,
            "largest_principal_keys": keys,
            "largest_principal_bytes": size,
            "refused_quota": engine.refused_quota,
            "refused_share": engine.refused_share,
        }

    @property
    def size(self) -> int:
        """Bytes of keys, values and their records."""
        return self._engine.size

    @property
    def clock(self) -> Callable[[], int]:
        """Wall clock of requests and answers, in ms."""
        return self._clock

    @property
    def steady(self) -> Callable[[], int]:
        """Clock of expiry times; after the start it is not affected by restarts and steps of the wall clock."""
        return self._steady

    @property
    def version_lead_ms(self) -> int:
        """Lead of the newest version over the clock; 0 if it is behind."""
        return max(0, self._engine.clock.wall_ms - self._clock())

    def clock_problem(self) -> StorageError | None:
        """The error if versions are so far ahead of the clock that clients reject them; otherwise None."""
        lead_ms = self.version_lead_ms
        if lead_ms <= MAX_DRIFT_MS:
            return None
        newest, now = utc(self._engine.clock.wall_ms), utc(self._clock())
        wait_s = (lead_ms - MAX_DRIFT_MS) // 1000 + 1
        return StorageError(
            f"statestore: the newest version ({newest}) is {lead_ms // 1000} s ahead of the clock ({now})",
            why="clients reject answers and the store rejects fencing tokens that are more than "
            f"{MAX_DRIFT_MS // 1000} s ahead",
            hint=f"if the clock is wrong, set it; if it is right, wait {wait_s} s, or stop the node and run"
            " `penstock statestore repair`",
        )

    def refuse_growth(self, reason: str) -> None:
        """Start to refuse SETs that need disk space because of ``reason``; "": accept them again.

        SETs with a value that is not larger than the previous one are accepted, so that leases can be renewed, unless
        they extend the log of changes.
        """
        self._engine.out_of_space = bool(reason)

    def refuse_changes(self, reason: str) -> None:
        """Start to refuse all writes because of ``reason``, for which no commit can end; "": accept them again.

        Otherwise they would wait, and with them all later answers to the same clients. Keys expire after that.
        """
        ended = self._engine.refuses_changes and not reason
        self._engine.refuses_changes = bool(reason)
        if ended and self._serving:
            self._arm()

    def reusable_bytes(self) -> int:
        """Return the number of bytes that can be stored without growing the file. Thread-safe."""
        return self._storage.reusable_bytes()

    async def start(self, outlet: Outlet) -> None:
        """Load the stored keys, remove expired ones, and serve.

        Raises:
            StorageError: the directory cannot be opened. Damaged values are not an error.
        """
        self._loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(asyncio.to_thread(self._storage.open))
        try:
            await self._start(outlet, await asyncio.shield(opening))
        except (Exception, asyncio.CancelledError):
            # A thread that opens the directory cannot be stopped, so wait for it, and close what it has opened.
            await asyncio.wait([opening])
            if opening.exception() is None:
                await self.close()
            raise

    async def _start(self, outlet: Outlet, recovered: StoredState) -> None:
        """Serve the stored keys."""
        self.recovered = recovered
        engine = self._engine
        engine.restore(recovered.records, recovered.clock)
        self._recovered_clock = engine.clock
        engine.fences.restore(recovered.fences)
        self._keep_time(recovered)
        await self._changelog.open(recovered.floor)
        self.stats.recovered = len(recovered.records)
        self.stats.quarantined = len(recovered.quarantined)
        for name in recovered.quarantined:
            _log.error("quarantined path=%s name=%s: checksum does not match", self._storage.path, name)
        self._responses.outlet = outlet
        self._writer.start(recovered.records)
        if self._stepped_clock is not None:
            self._stepped_clock.on_followed.append(self._clock_stepped)
            self._clock_stepped()
        if self._own_clock is not None:
            self._own_clock.start()
        self._serving = True
        self.policies_changed()
        self.wake()
        problem = self.clock_problem()
        if problem is not None:
            _log.warning("%s", problem.line())

    def policies_changed(self) -> None:
        """Reevaluate whether any client may observe requests."""
        self._responses.requests_observed = self._policy is not None and self._policy.requests_observed

    def _keep_time(self, recovered: StoredState) -> None:
        """Continue with the clock of the stored expiry times if the machine has not been rebooted.

        The wall clock may have been set while the store was stopped; the time since boot is not affected.
        """
        boot = boot_id()
        if self._given_steady is not None or boot is None:
            return
        self._lag = recovered.lag
        if recovered.steady is not None and recovered.steady[0] == boot:
            offset = recovered.steady[1]
        else:
            offset = self._clock() + recovered.lag - boot_ms() - 1  # the difference of rounded times: not ahead
            self._storage.note_steady(boot, offset)
        self._boot_offset = offset
        self._steady = self._since_boot

    # References to native methods, so that the path of a request has no generic calls.

    def _wall_now(self) -> int:
        return self._clock()

    def _steady_now(self) -> int:
        return self._since_boot() if self._boot_offset >= 0 else self._steady()

    def _since_boot(self) -> int:
        return boot_ms() + self._boot_offset

    def _clock_stepped(self) -> None:
        """Store the offset of the steady clock from the wall clock, for the next boot of the machine."""
        lag = self._steady() - self._clock()
        if self._given_steady is None and abs(lag - self._lag) > _LAG_KEPT_MS:
            self._lag = lag
            self._writer.note_lag(lag)

    async def close(self) -> None:
        """Finish commits, send their answers, close the files. Idempotent."""
        self._serving = False
        if self._own_clock is not None:
            self._own_clock.close()
        if self._stepped_clock is not None and self._clock_stepped in self._stepped_clock.on_followed:
            self._stepped_clock.on_followed.remove(self._clock_stepped)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._writer.close()
        await self._changelog.close()
        self._responses.outlet = None
        await asyncio.to_thread(self._storage.close)

    def receive(self, message: Inbound) -> None:
        """Handle one request [Service]."""
        self.stats.requests += 1
        if not self._serving:
            message.settle(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, "the state store is not running")
            return
        if self._responses.requests_observed:
            self._responses.copy_request(message.client_id, message.publish)
        read = message.read
        if not read or read != self._read:
            # The clocks are read once for all requests of a read.
            self._read = read
            stepped = self._stepped_clock
            if self._boot_offset < 0 or stepped is None:
                self._now_ms = self._wall_now()
                self._steady_ms = self._steady_now()
            else:
                self._now_ms, boot = stepped.now_and_boot_ms()
                self._steady_ms = boot + self._boot_offset
        now_ms = self._now_ms
        steady_ms = self._steady_ms
        ask = read_request(
            message.publish,
            message.client_id,
            # A step of the wall clock before the answer is sent must not expire it.
            steady_ms - now_ms + message.received_ms,
            steady_ms,
            self._forced,
            message.principal,
        )
        if not isinstance(ask, StoreRequest):
            self._refuse(message, ask, steady_ms)
            return
        policy = self._policy
        if policy is not None:
            if not policy.may_answer_on(ask, ask.response_topic):
                why = "the client may not subscribe to its own response topic"
                self._refuse(message, RejectedRequest(ReasonCode.NOT_AUTHORIZED, why), steady_ms)
                return
            ask.owner = policy.owner(ask)
        repeated = message.is_repetition
        if repeated and self._recent.has(ask.client_id, ask.correlation, ask.timestamp):
            self.stats.repeated += 1
            self._answer(message, _REPEATED, None, 0, steady_ms)
            return
        if self._writer.waiting >= self._max_waiting and not self._is_urgent(ask):
            self.stats.refused += 1
            message.settle(ReasonCode.QUOTA_EXCEEDED, "the disk is too slow for the requests")
            return
        command = parse_payload(message.publish.payload, self._engine.extensions)
        if isinstance(command, StoreError):
            self._answer(message, ask, Answer(AnswerKind.ERROR, error=command), 0, steady_ms)
            return
        if command.verb is _KEYNOTIFY and (error := _cannot_observe(message, command)) is not None:
            self._answer(message, ask, Answer(AnswerKind.ERROR, error=error), 0, steady_ms)
            return
        if command.spec.checks_fence:  # the command writes
            if repeated and self._is_in_doubt(ask, command):
                self._refuse(message, _in_doubt(ask, steady_ms), steady_ms)
                return
            self._recent.note(ask.client_id, ask.correlation, ask.timestamp)
        answer, changes = self._engine.execute(command, ask, now_ms, steady_ms)
        if self._tracer is not None:
            self._tracer.executed(ask, command, changes)
        if changes:
            if self._engine.expiries.sooner:
                self._arm()
            wait_for = self._writer.submit(changes, asked=self._may_ask and self._is_asked_to_keep(ask))
            self._answer(message, ask, answer, wait_for, steady_ms)
            self._notify(changes, wait_for)
        elif answer.kind is _PAYLOAD or answer.missed is not None:
            self._answer(message, ask, answer, self._writer.waits_for_any(), steady_ms)
        else:
            self._answer(message, ask, answer, self._writer.waits_for(command.key), steady_ms)

    def _is_asked_to_keep(self, ask: StoreRequest) -> bool:
        name, value = self._asks
        return ask.user_property(name) == value

    def _is_urgent(self, ask: StoreRequest) -> bool:
        """Return True if the request has the property for high priority and its sender the permission."""
        if ask.user_property(b"$high_priority") is None:
            return False
        return self._policy is None or self._policy.has_high_priority(ask)

    def disconnected(self, client_id: str) -> None:
        """End the observations of a client whose network connection ended [Service]."""
        self._engine.forget(client_id)

    def wake(self) -> None:
        """Remove expired keys and arm the timer for the next expiry. Called by the timer."""
        self._armed_for = None
        if self.failure is not None or self._engine.refuses_changes:
            return
        changes = self._engine.tick(self._clock(), self._steady(), limit=_EXPIRE_AT_ONCE)
        if changes:
            self._notify(changes, self._writer.submit(changes))
        self._arm()

    def _arm(self) -> None:
        self._engine.expiries.sooner = False
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

    def _trim(self, floor: Hlc) -> None:
        self._writer.trim(floor)

    def _failed(self, failure: StorageError) -> None:
        self._engine.read_only = True
        _log.critical("read-only path=%s: %s", self._storage.path, failure)

    def _answer(
        self,
        message: Inbound,
        ask: StoreRequest | RejectedRequest,
        answer: Answer | None,
        wait_for: int,
        steady_ms: int,
    ) -> None:
        """Send an answer immediately or after the commit ``wait_for``, in the order of the answers to the same
        client."""
        wait_for = self._writer.answer_waits_for(message.client_id, wait_for)
        if not wait_for or self.failure is not None:
            self._release(message, ask, answer, steady_ms, committed=not wait_for)
        else:
            self._writer.add_answer(
                wait_for, message.client_id, _WaitingAnswer(self, self._writer, wait_for, message, ask, answer)
            )

    def release_waiting(
        self, message: Inbound, ask: StoreRequest | RejectedRequest, answer: Answer | None, *, committed: bool
    ) -> None:
        """Send an answer whose commit has ended."""
        self._release(message, ask, answer, self._responses.committed_ms or self._responses.now(), committed=committed)

    def _release(
        self,
        message: Inbound,
        ask: StoreRequest | RejectedRequest,
        answer: Answer | None,
        steady_ms: int,
        *,
        committed: bool,
    ) -> None:
        """Acknowledge the request and send its answer, or an error if the commit of its changes has failed."""
        if answer is not None and not committed:
            message.settle(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, StoreError.READ_ONLY)
            answer = Answer(AnswerKind.ERROR, error=StoreError.READ_ONLY)
        if not isinstance(ask, StoreRequest):
            message.settle(ask.reason_code, ask.reason)
            if ask.response is not None:
                self._responses.answer_rejected(message, ask.response)
        elif answer is not None:
            expiry_s = seconds_left(ask, steady_ms)
            if expiry_s < 0:
                message.settle()
            else:
                payload = answer_payload(answer, ask.dialect)
                properties = answer_properties(ask, answer, expiry_s)
                self._responses.answer(message, ask.response_topic, payload, properties, expiry_s)
            if self._tracer is not None:
                self._tracer.answered(ask, answer)
            if answer.missed is not None:
                for change in answer.missed:
                    if self._engine.observes(message.client_id, change.key):  # see notify()
                        self._responses.notify(message.client_id, ask.dialect, change)

    def _denied(self, context: Context, verb: Verb, access: Access, key: bytes) -> None:
        """Count a command that the policies do not permit."""
        self.stats.denied[verb] += 1
        if self._policy is not None:
            self._policy.denied(context, access, key)

    def _refuse(self, message: Inbound, refusal: RejectedRequest, steady_ms: int) -> None:
        self.stats.refused += 1
        if refusal.disconnect:
            # Send no PUBACK. Close only the connection of the request; a will has none.
            message.disconnect(refusal.reason_code, refusal.reason)
        else:
            self._answer(message, refusal, None, 0, steady_ms)

    def _is_in_doubt(self, ask: StoreRequest, command: Command) -> bool:
        """Return True if a repeated write may have been executed before the start; a BATCH cannot be checked by key."""
        existing = None if command.writes else self._engine.version_of(command.key)
        return is_in_doubt(ask.timestamp, self._recovered_clock, existing)

    def _notify(self, changes: list[Change], wait_for: int) -> None:
        """Notify the observers of ``changes``, immediately or after the commit ``wait_for``."""
        for change in changes:
            if change.observers:
                break
        else:
            return
        observed = [change for change in changes if change.observers]
        if wait_for:
            self._writer.add_notifications(wait_for, _WaitingNotifications(self, observed))
        else:
            self.notify(observed)

    def notify(self, changes: list[Change]) -> None:
        """Notify the observers of committed ``changes``."""
        if self._responses.outlet is None or self.failure is not None:
            return
        for change in changes:
            for client_id, dialect in change.observers:
                # An observer that has stopped or disconnected must not find the notification in its session.
                if self._engine.observes(client_id, change.key):
                    self._responses.notify(client_id, dialect, change)


class _WaitingAnswer(CommitWaiter):
    """An answer, or the acknowledgement of a rejected request, that waits for a commit."""

    __slots__ = ("_answer", "_message", "_number", "_request", "_service", "_writer")

    def __init__(
        self,
        service: StateStoreService,
        writer: ChangeWriter,
        number: int,
        message: Inbound,
        request: StoreRequest | RejectedRequest,
        answer: Answer | None,
    ) -> None:
        self._service = service
        self._writer = writer
        self._number = number
        self._message = message
        self._request = request
        self._answer = answer

    def commit_ended(self, failure: StorageError | None) -> None:
        """Send the answer, or an error after a failed commit."""
        self._writer.answer_leaves(self._number, self._message.client_id)
        self._service.release_waiting(self._message, self._request, self._answer, committed=failure is None)


class _WaitingNotifications(CommitWaiter):
    """Notifications that wait for the commit of their changes."""

    __slots__ = ("_changes", "_service")

    def __init__(self, service: StateStoreService, changes: list[Change]) -> None:
        self._service = service
        self._changes = changes

    def commit_ended(self, failure: StorageError | None) -> None:
        """Notify the observers, unless the commit has failed."""
        if failure is None:
            self._service.notify(self._changes)


def _in_doubt(ask: StoreRequest, steady_ms: int) -> RejectedRequest:
    """Return the answer to a repeated write that may have been executed before the start: status 408, a timeout."""
    fields = [("__stMsg", "the store was restarted, and may have executed the request before")]
    answer = status_response(ask.response_topic, ask.correlation, ask.dialect, ask.expires_at, steady_ms, 408, fields)
    return RejectedRequest(0, "", answer)


def _cannot_observe(message: Inbound, command: Command) -> StoreError | None:
    """Return an error if KEYNOTIFY cannot be executed; otherwise None."""
    if not topic_fits(message.client_id, command.key):
        return StoreError.TOPIC_TOO_LONG
    if not command.stop and not message.connected:
        # A will: the connection with which an observation would end has already ended.
        return StoreError.NOT_CONNECTED
    return None
