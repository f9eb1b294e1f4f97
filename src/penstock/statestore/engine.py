"""The state store as a pure engine: a command and the time in, the answer and the changes out.

It holds every key in memory, gives versions, checks fences and conditions, expires keys and knows who observes what.
It never reads a clock and never touches a disk: the caller makes each :class:`Change` durable, tells its observers, and
only then lets the answer go. Two times come in:

* ``now_ms``, the wall clock: versions and the skew rule;
* ``steady_ms``, an instant in ms since the epoch that never jumps (wall clock at the start of the process plus the
  monotonic time since): expiry, so that a stepped wall clock neither ends a lease early nor keeps it alive.

The caller asks :meth:`Engine.next_deadline`, arms one timer and then calls :meth:`Engine.tick`.

Source: state store protocol, "Supported commands", "Versioning and hybrid logical clocks", "Fencing Token Algorithm",
"Notifications". What the document leaves open is decided where it is coded, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Final

from penstock.statestore.commands import Access, Command, Condition, StoreError, Verb
from penstock.statestore.dialects import Dialect
from penstock.statestore.hlc import Hlc, parse
from penstock.statestore.record import Change, Observer, Record

__all__ = ["MAX_OBSERVATIONS", "Answer", "AnswerKind", "Authorise", "Context", "Engine"]

MAX_OBSERVATIONS: Final = 100_000
"""Keys that one client may observe at a time. An observation is about 200 bytes, so a client that registers keys in a
loop cannot take more than some 20 MB; the SDKs observe a handful."""

# A heap holds an item for every SET with PX, also for keys set again since; it is rebuilt when more than half is stale.
_HEAP_SLACK: Final = 1024


class AnswerKind(Enum):
    """What a request came to."""

    OK = "done"
    NOT_MET = "condition not met"
    VALUE = "value"
    MISSING = "no such key"
    COUNT = "number of keys deleted or observations ended"
    ERROR = "error"


class Answer:
    """The answer to one command, in no dialect yet.

    ``version`` is the one that the change or the value has; ``previous`` the version of a deleted value; None where
    there is none to tell, and always for a missing key: the Go SDK takes a version for "exists".
    """

    __slots__ = ("count", "error", "kind", "previous", "value", "version")

    def __init__(
        self,
        kind: AnswerKind,
        *,
        version: Hlc | None = None,
        previous: Hlc | None = None,
        value: bytes = b"",
        count: int = 0,
        error: StoreError | None = None,
    ) -> None:
        self.kind = kind
        self.version = version
        self.previous = previous
        self.value = value
        self.count = count
        self.error = error

    def __repr__(self) -> str:
        told = self.error or (self.count if self.kind is AnswerKind.COUNT else "")
        return f"<Answer {self.kind.name} {told} {self.version or ''}>"


class Context:
    """Who asks, and with what: texts as they arrived, None where absent; what is not a clock value is malformed.

    ``principal`` is who that is for the policies, in their own terms.
    """

    __slots__ = ("client_id", "dialect", "fencing_token", "principal", "timestamp", "username")

    def __init__(
        self,
        client_id: str,
        dialect: Dialect,
        timestamp: str | None = None,
        fencing_token: str | None = None,
        username: str | None = None,
        principal: object = None,
    ) -> None:
        self.client_id = client_id
        self.dialect = dialect
        self.timestamp = timestamp
        self.fencing_token = fencing_token
        self.username = username
        self.principal = principal


Authorise = Callable[[Context, Access, bytes], bool]
"""Whether a client may do this to a key; of several flags all must be granted. Asked once a key, before any look-up."""
Executed = tuple[Answer, list[Change]]

_DONE: Final = Answer(AnswerKind.OK)
_MISSING: Final = Answer(AnswerKind.MISSING)
_NONE_DELETED: Final = Answer(AnswerKind.COUNT, count=0)
_ERRORS: Final = {error: Answer(AnswerKind.ERROR, error=error) for error in StoreError}


class Engine:
    """All keys of one store.

    Args:
        node: node id of the versions it gives; the document's is ``StateStore``.
        max_keys: quota, 0 = none. Overwriting is always allowed, and keys that are past their expiry do not count.
        authorise: None = everybody may do everything.
        strict_read: NX, NEX and VDEL need Read beside Write, since their answers tell whether a value was guessed.
    """

    def __init__(
        self,
        *,
        node: str = "StateStore",
        max_keys: int = 0,
        authorise: Authorise | None = None,
        strict_read: bool = False,
    ) -> None:
        self.clock = Hlc(0, 0, node)
        self.max_keys = max_keys
        self.expired = 0
        self._authorise = authorise
        self._strict_read = strict_read
        self._records: dict[bytes, Record] = {}
        self._deadlines: list[tuple[int, bytes]] = []
        self._volatile = 0
        # key -> client id -> the dialect in which the client wants to hear of it; and client id -> its keys
        self._observers: dict[bytes, dict[str, Dialect]] = {}
        self._observed: dict[str, set[bytes]] = {}

    @property
    def keys(self) -> int:
        """How many keys there are, those included that are past their expiry and not removed yet."""
        return len(self._records)

    def restore(self, records: Iterable[Record], clock: Hlc | None) -> None:
        """Take over what was stored; call once, before anything else.

        ``clock`` is the greatest version ever given that is on record, deletes included. The clock becomes the
        greatest of it and of all versions, so that no version is given twice whatever the system clock says now.
        """
        wall, counter = (clock.wall_ms, clock.counter) if clock is not None else (0, 0)
        for record in records:
            self._records[record.key] = record
            wall, counter = max((wall, counter), (record.version.wall_ms, record.version.counter))
            if record.expires_at:
                self._deadlines.append((record.expires_at, record.key))
        heapify(self._deadlines)
        self._volatile = len(self._deadlines)
        self.clock = Hlc(wall, counter, self.clock.node)

    def execute(self, command: Command, context: Context, now_ms: int, steady_ms: int) -> Executed:
        """Carry out ``command``: the answer, and what changed, in order.

        The changes can include the expiry of the key asked for, which precedes the command. A refused request changes
        neither value, expiry nor fence, and does not move the clock.
        """
        spec = command.spec
        if self._authorise is not None and not self._authorise(
            context, command.access(strict_read=self._strict_read), command.key
        ):
            return _ERRORS[StoreError.NOT_AUTHORIZED], []
        timestamp = None
        if context.timestamp is not None:
            timestamp = parse(context.timestamp)
            if timestamp is None:
                return _ERRORS[StoreError.TIMESTAMP_MALFORMED], []
            # Before the clock is touched: a client with a fast clock must not push it.
            if timestamp.is_too_far_ahead(now_ms):
                return _ERRORS[StoreError.TIMESTAMP_TOO_FAR_AHEAD], []
        elif spec.needs_timestamp:
            return _ERRORS[StoreError.TIMESTAMP_MISSING], []

        token = None
        if spec.checks_fence and context.fencing_token is not None:
            token = parse(context.fencing_token)
            if token is None:
                return _ERRORS[StoreError.TIMESTAMP_MALFORMED], []
            if token.is_too_far_ahead(now_ms):
                return _ERRORS[StoreError.FENCE_TOO_FAR_AHEAD], []

        changes: list[Change] = []
        record = self._records.get(command.key)
        if record is not None and record.expires_at and record.expires_at <= steady_ms:
            changes.append(self._expire(record, now_ms))
            record = None
        if spec.checks_fence and record is not None and record.fence is not None:
            if token is None:
                return _ERRORS[StoreError.FENCE_REQUIRED], changes
            if token < record.fence:
                return _ERRORS[StoreError.FENCE_LOWER], changes

        match command.verb:
            case Verb.GET:
                answer = self._get(record)
            case Verb.SET:
                answer = self._set(command, record, timestamp, token, now_ms, steady_ms, changes)
            case Verb.DEL | Verb.VDEL:
                answer = self._delete(command, record, timestamp, now_ms, changes)
            case Verb.KEYNOTIFY:
                answer = self._key_notify(command, context)
        # Also what changed nothing has been seen: later versions are greater than every time stamp accepted.
        if timestamp is not None and answer.kind is not AnswerKind.ERROR and timestamp > self.clock:
            self.clock = Hlc(timestamp.wall_ms, timestamp.counter, self.clock.node)
        return answer, changes

    def next_deadline(self) -> int | None:
        """The ``steady_ms`` at which the next key expires; None where none ever will."""
        deadlines = self._deadlines
        while deadlines:
            expires_at, key = deadlines[0]
            record = self._records.get(key)
            if record is not None and record.expires_at == expires_at:
                return expires_at
            heappop(deadlines)
        return None

    def tick(self, now_ms: int, steady_ms: int, *, limit: int = 0) -> list[Change]:
        """Expire what is due, in the order of the instants; at most ``limit`` keys (0 = all)."""
        changes: list[Change] = []
        while (deadline := self.next_deadline()) is not None and deadline <= steady_ms:
            _, key = heappop(self._deadlines)
            changes.append(self._expire(self._records[key], now_ms))
            if len(changes) == limit:
                break
        return changes

    def observes(self, client_id: str, key: bytes) -> bool:
        """Whether ``client_id`` observes ``key`` now."""
        return client_id in self._observers.get(key, ())

    @property
    def observations(self) -> int:
        """How many observations there are."""
        return sum(len(keys) for keys in self._observed.values())

    def forget(self, client_id: str) -> None:
        """End all observations of ``client_id``: its network connection ended [KEYNOTIFY lifecycle]."""
        for key in self._observed.pop(client_id, ()):
            self._remove_observer(client_id, key)

    def _get(self, record: Record | None) -> Answer:
        if record is None:
            return _MISSING
        return Answer(AnswerKind.VALUE, value=record.value, version=record.version)

    def _set(
        self,
        command: Command,
        record: Record | None,
        timestamp: Hlc | None,
        token: Hlc | None,
        now_ms: int,
        steady_ms: int,
        changes: list[Change],
    ) -> Answer:
        condition = command.condition
        if (
            record is not None
            and condition is not Condition.ALWAYS
            and (condition is Condition.NX or record.value != command.expected)
        ):
            return Answer(AnswerKind.NOT_MET, version=record.version)
        if record is None and self.max_keys and len(self._records) >= self.max_keys:
            changes += self.tick(now_ms, steady_ms)
            if len(self._records) >= self.max_keys:
                return _ERRORS[StoreError.QUOTA]
        fence = record.fence if record is not None else None
        if fence is None or (token is not None and token > fence):
            fence = token
        version = self.clock = self.clock.following(timestamp, now_ms)
        expires_at = steady_ms + command.ttl_ms if command.ttl_ms else 0
        new = Record(command.key, command.value, version, fence, expires_at)
        if record is not None and record.expires_at:
            self._volatile -= 1
        self._records[command.key] = new
        if expires_at:
            self._volatile += 1
            heappush(self._deadlines, (expires_at, command.key))
            if len(self._deadlines) > 2 * self._volatile + _HEAP_SLACK:
                self._rebuild_deadlines()
        changes.append(Change(command.key, new, version, self._observers_of(command.key)))
        return Answer(AnswerKind.OK, version=version)

    def _delete(
        self, command: Command, record: Record | None, timestamp: Hlc | None, now_ms: int, changes: list[Change]
    ) -> Answer:
        if record is None:
            return _NONE_DELETED
        if command.verb is Verb.VDEL and record.value != command.value:
            return Answer(AnswerKind.NOT_MET)
        change = self._remove(record, timestamp, now_ms)
        changes.append(change)
        return Answer(AnswerKind.COUNT, count=1, version=change.version, previous=record.version)

    def _key_notify(self, command: Command, context: Context) -> Answer:
        key, client_id = command.key, context.client_id
        observed = self._observed.get(client_id)
        if command.stop:
            if observed is None or key not in observed:
                return _NONE_DELETED
            observed.remove(key)
            if not observed:
                del self._observed[client_id]
            self._remove_observer(client_id, key)
            return _DONE
        if observed is None:
            observed = self._observed[client_id] = set()
        if key not in observed and len(observed) >= MAX_OBSERVATIONS:
            return _ERRORS[StoreError.QUOTA]
        observed.add(key)
        # A repeated KEYNOTIFY is done again: the Rust and .NET SDKs refuse any other answer than OK.
        self._observers.setdefault(key, {})[client_id] = context.dialect
        return _DONE

    def _remove(self, record: Record, timestamp: Hlc | None, now_ms: int) -> Change:
        """Delete ``record``. A delete has a version of its own, so that a later SET is newer than both."""
        del self._records[record.key]
        if record.expires_at:
            self._volatile -= 1
        version = self.clock = self.clock.following(timestamp, now_ms)
        return Change(record.key, None, version, self._observers_of(record.key))

    def _expire(self, record: Record, now_ms: int) -> Change:
        self.expired += 1
        return self._remove(record, None, now_ms)

    def _observers_of(self, key: bytes) -> tuple[Observer, ...]:
        observers = self._observers.get(key)
        return tuple(observers.items()) if observers else ()

    def _remove_observer(self, client_id: str, key: bytes) -> None:
        observers = self._observers[key]
        del observers[client_id]
        if not observers:
            del self._observers[key]

    def _rebuild_deadlines(self) -> None:
        records = self._records
        self._deadlines = [
            deadline
            for deadline in set(self._deadlines)
            if (record := records.get(deadline[1])) is not None and record.expires_at == deadline[0]
        ]
        heapify(self._deadlines)
