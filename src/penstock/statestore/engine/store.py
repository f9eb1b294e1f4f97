"""The engine of the state store, which does no IO: executes commands and returns answers and changes.

It keeps all keys in memory, assigns versions, checks fences and conditions, expires keys and manages observations. It
uses neither clocks nor disks: the caller makes each :class:`Change` durable, notifies its observers, and then sends the
answer. There are two times:

* ``now_ms``, the wall clock, for versions and the check of clock skew;
* ``steady_ms``, a time in ms since the epoch that never jumps (wall clock at the start of the process plus monotonic
  time since), for expiry: a step of the wall clock must not end or extend a lease. It is rounded down, so a key exists
  up to and including the ms ``expires_at``: never for less than its PX, and for at most 1 ms longer.

The caller arms one timer for :meth:`Engine.next_deadline`, again when ``expiries.sooner`` is set, and calls
:meth:`Engine.tick` when it fires.

Source: state store protocol, "Supported commands", "Versioning and hybrid logical clocks", "Fencing Token Algorithm",
"Notifications". Behavior that the document does not define is explained in comments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from sys import getsizeof
from typing import TYPE_CHECKING, Final, assert_never

from penstock.statestore.codec.commands import Access, Command, Condition, Extension, Verb
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import MISSING, bulk_pieces, encode_bulk
from penstock.statestore.engine.expiries import Expiries
from penstock.statestore.engine.observers import History, HistoryExpired, Observers
from penstock.statestore.engine.quotas import Quotas, size_of
from penstock.statestore.engine.record import RECORD_BYTES, Change, Record
from penstock.statestore.engine.requests import (
    Answer,
    AnswerKind,
    Context,
    Fences,
    encode_answers,
    fence_error,
    fence_prefix,
    read_preconditions,
    time_left,
)
from penstock.statestore.engine.scan import Scanner
from penstock.statestore.hlc import Hlc, StoreClock

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["Answer", "AnswerKind", "Authorise", "Context", "Denied", "Engine"]

Authorise = Callable[[Context, Access, bytes], bool]
"""Function that returns True if a client has all the given permissions for a key. Called once per key, before any
lookup."""
Denied = Callable[[Context, Verb, Access, bytes], None]
"""Function that is called with each command that ``Authorise`` did not permit, the permissions that the command needs,
and the first key for which one of them is missing."""
Executed = tuple[Answer, list[Change]]

# Reading a member of an enum costs as much as a call: constants for the members that every request uses.
_ALWAYS: Final = Condition.ALWAYS
_COUNT: Final = AnswerKind.COUNT
_DEL: Final = Verb.DEL
_ERROR: Final = AnswerKind.ERROR
_GET: Final = Verb.GET
_OK: Final = AnswerKind.OK
_SET: Final = Verb.SET
_NOT_MET: Final = AnswerKind.NOT_MET
_VALUE: Final = AnswerKind.VALUE
_VDEL: Final = Verb.VDEL

_NEX: Final = Condition.NEX

_REMOVALS: Final = 4095
"""Bit mask: after this many removals the size of the table of keys is checked."""
_LEAST_TABLE: Final = 1 << 20
_SPARSE: Final = 1000
"""Bytes per key beyond which the table of keys is rebuilt. A full table has 40 to 100, so a rebuild visits at most a
tenth of the keys that the table has had."""

_UNCHANGED: Final[list[Change]] = []
_NEVER: Final = Hlc(0, 0, "")
_DONE: Final = Answer(AnswerKind.OK)
_MISSING: Final = Answer(AnswerKind.MISSING)
_NONE_DELETED: Final = Answer(AnswerKind.COUNT, count=0)
_ERRORS: Final = {error: Answer(AnswerKind.ERROR, error=error) for error in StoreError}


class Engine:
    """All keys of one store.

    Args:
        node: node id of the versions; ``StateStore`` in the document.
        max_keys: quota, 0 = none. Overwriting is always allowed, and expired keys do not count.
        max_bytes: quota of keys and values including the memory of their records, 0 = none; a SET that does not enlarge
            the store is always allowed.
        share: percentage of both quotas for the keys that one principal created, 0 = no limit per principal.
        authorise: None = all clients may do everything. denied: None = denied commands are not reported.
        strict_read: NX, NEX and VDEL need Read and Write, since their answers reveal whether a guessed value is
        correct. extensions: enabled extensions. The caller restores history and fences. secret: random bytes for the
        encryption of keys in SCAN tokens that the client may not read.
    """

    def __init__(
        self,
        *,
        node: str = "StateStore",
        max_keys: int = 0,
        max_bytes: int = 0,
        share: int = 0,
        authorise: Authorise | None = None,
        denied: Denied | None = None,
        strict_read: bool = False,
        extensions: Extension = Extension.SCAN,
        secret: bytes = b"",
    ) -> None:
        self._clock = StoreClock(Hlc(0, 0, node))
        self.quotas = Quotas(max_keys, max_bytes, share)
        self.refused_quota = 0
        """SETs refused because of the quotas of the store."""
        self.refused_share = 0
        """SETs refused because the share of the key's principal was used up."""
        self.expired = 0
        self.extensions = extensions
        self.fences = Fences()
        self.history: History | None = None
        self.read_only = False
        """True after a storage failure: no changes are accepted, and expired keys are invisible."""
        self.out_of_space = False
        """True without disk space: SETs that need space are refused with the error of a quota."""
        self.refuses_changes = False
        """True while no change can be committed: all writes are refused with the error of a quota, and expired keys are
        invisible."""
        self.logs_changes = False
        """True if every SET needs disk space, since it is also written to the log of changes."""
        self._authorise = authorise
        self._denied = denied
        self._strict_read = strict_read
        self._records: dict[bytes, Record] = {}
        self.expiries = Expiries(self._records)
        self._observers = Observers(None if authorise is None else self._may_still_read)
        # Principals of observers, for the authorization of each changed key: a prefix may contain keys with different
        # permissions, and policies may change during an observation.
        self._observing: dict[str, Context] = {}
        self._removals: i64 = 0
        self._secret = secret
        self._scanner = Scanner(self._records, secret)

    @property
    def clock(self) -> Hlc:
        """The greatest version assigned or timestamp accepted."""
        return self._clock.value

    @property
    def keys(self) -> int:
        """Number of keys, including expired keys that are not removed yet."""
        return len(self._records)

    @property
    def size(self) -> int:
        """Bytes of all keys, values and their records."""
        return self.quotas.size

    def version_of(self, key: bytes) -> Hlc | None:
        """Return the version of ``key``; None if it does not exist."""
        record = self._records.get(key)
        return None if record is None else record.version

    def record(self, key: bytes, steady_ms: int) -> Record | None:
        """Return the record of ``key``; None if it does not exist or has expired."""
        return self._present(key, steady_ms)

    def page(
        self, pattern: bytes, after: bytes | None, limit: int, steady_ms: int
    ) -> tuple[list[Record], bytes | None]:
        """Return at most ``limit`` records whose keys match ``pattern`` and follow ``after``, for administrators.

        The second value is the key after which the next page starts; None on the last page.
        """
        page = self._scanner.keys(pattern, after, limit, lambda key: self._present(key, steady_ms) is not None)
        records = self._records
        return [records[key] for key in page.keys], page.last

    def restore(self, records: Iterable[Record], clock: Hlc | None) -> None:
        """Load the stored state; call once, before any other method.

        ``clock`` is the greatest stored version, including versions of deletes. The clock is set to the maximum of it
        and of all versions, so that no version is assigned twice, independent of the system clock.
        """
        kept = self._records = {}
        size: i64 = 0
        greatest = _NEVER
        for record in records:
            kept[record.key] = record
            size += len(record.key) + len(record.value)
            if greatest.is_before(record.version):
                greatest = record.version
        self.expiries = Expiries(kept)
        self._scanner = Scanner(kept, self._secret)
        self.quotas.keys = len(kept)
        self.quotas.size = size + RECORD_BYTES * len(kept)
        self.quotas.restore(kept.values())
        if clock is not None:
            greatest = max(greatest, clock)
        self._clock.see(greatest.wall_ms, greatest.counter)

    def execute(self, command: Command, context: Context, now_ms: int, steady_ms: int) -> Executed:
        """Execute ``command``; return the answer and the changes, in order.

        The changes may include the preceding expiry of the requested key. A refused request changes neither value,
        expiry nor fence, and does not advance the clock. The caller must not modify the list.
        """
        spec = command.spec
        prefix: bytes | None = None
        if context.fence_prefix is not None:
            found = fence_prefix(command, context, self.extensions)
            if isinstance(found, StoreError):
                return _ERRORS[found], _UNCHANGED
            prefix = found
        if self._authorise is not None and not self._is_authorised(command, context, prefix):
            self._report_denied(command, context, prefix)
            return _ERRORS[StoreError.NOT_AUTHORIZED], _UNCHANGED
        if self.read_only and spec.checks_fence:
            return _ERRORS[StoreError.READ_ONLY], _UNCHANGED
        if self.refuses_changes and spec.checks_fence:
            return _ERRORS[StoreError.QUOTA], _UNCHANGED
        error = read_preconditions(command, context, now_ms)
        if error is not None:
            return _ERRORS[error], _UNCHANGED
        if command.writes:
            answer, changes = self._batch(command, context, now_ms, steady_ms)
        else:
            answer, changes = self._carry_out(command, context, prefix, now_ms, steady_ms)
        # Also without a change: later versions are greater than every accepted timestamp.
        if context.time_ms >= self._clock.wall_ms and answer.kind is not _ERROR:
            self._clock.see(context.time_ms, context.time_counter)
        return answer, changes

    def _batch(self, command: Command, context: Context, now_ms: int, steady_ms: int) -> Executed:
        """Execute the writes in order; a failed write does not stop the following ones."""
        answers: list[Answer] = []
        changes: list[Change] = []
        for write in command.writes:
            if self._authorise is not None and not self._is_authorised(write, context, None):
                self._report_denied(write, context, None)
                answers.append(_ERRORS[StoreError.NOT_AUTHORIZED])
            else:
                answer, more = self._carry_out(write, context, None, now_ms, steady_ms)
                answers.append(answer)
                changes += more
        version = changes[-1].version if changes else None
        return Answer(AnswerKind.PAYLOAD, value=encode_answers(answers), version=version), changes

    def _carry_out(
        self, command: Command, context: Context, prefix: bytes | None, now_ms: int, steady_ms: int
    ) -> Executed:
        """Execute one authorized command, which raises the floor of ``prefix`` if given."""
        token = context.token
        record = self._records.get(command.key)
        expired = _UNCHANGED
        if record is not None and 0 < record.expires_at < steady_ms:
            if not self.refuses_changes:
                expired = [self._expire(record, now_ms)]
            record = None
        if command.spec.checks_fence:
            error = fence_error(command.key, record, token, self.fences, prefix)
            if error is not None:
                return _ERRORS[error], expired
        verb = command.verb
        if verb is _GET:
            return self._get(command, record), expired
        if verb is _SET:
            if prefix is not None and _is_met(command, record) and not self.fences.has_room_for(prefix):
                return _ERRORS[StoreError.QUOTA], expired
            answer, changes = self._set(command, context, record, now_ms, steady_ms, expired)
            if prefix is not None and token is not None and answer.kind is _OK:
                self._lift(prefix, token, changes[-1])
            return answer, changes
        if verb is _DEL or verb is _VDEL:
            return self._delete(command, context, record, now_ms, expired)
        if verb is Verb.KEYNOTIFY:
            return self._key_notify(command, context), expired
        if verb is Verb.SCAN:
            return self._scan(command, context, steady_ms), expired
        if verb is Verb.MGET or verb is Verb.MVALUES:
            return self._get_many(command, steady_ms), expired
        if verb is Verb.PTTL:
            return time_left(record, steady_ms), expired
        if verb is Verb.BATCH:
            raise AssertionError("the writes of a BATCH are executed one by one")
        assert_never(verb)

    def next_deadline(self) -> int | None:
        """Return the ``steady_ms`` at which the next key expires; None if no key expires."""
        due = self.expiries.next()
        return None if due is None else due[0] + 1

    def tick(self, now_ms: int, steady_ms: int, *, limit: int = 0) -> list[Change]:
        """Remove expired keys in the order of their expiry; at most ``limit`` keys (0 = all)."""
        changes: list[Change] = []
        while (due := self.expiries.next()) is not None and due[0] < steady_ms:
            changes.append(self._expire(self._records[due[1]], now_ms))
            if len(changes) == limit:
                break
        return changes

    def observes(self, client_id: str, key: bytes) -> bool:
        """Return True if ``client_id`` currently observes ``key`` or one of its prefixes."""
        return self._observers.observes(client_id, key)

    @property
    def observations(self) -> int:
        """Number of observations."""
        return len(self._observers)

    def forget(self, client_id: str) -> None:
        """End all observations of ``client_id``: its network connection ended [KEYNOTIFY lifecycle]."""
        self._observers.forget(client_id)
        self._observing.pop(client_id, None)

    def _may_still_read(self, client_id: str, key: bytes) -> bool:
        context = self._observing.get(client_id)
        return context is not None and self._authorise is not None and self._authorise(context, Access.READ, key)

    def _is_authorised(self, command: Command, context: Context, prefix: bytes | None) -> bool:
        """Authorize a command. SCAN and BATCH authorize each key instead; a prefix fence needs Write for its prefix."""
        authorise = self._authorise
        if authorise is None or command.spec.authorizes_each_key:
            return True
        access = command.access(strict_read=self._strict_read)
        if prefix is not None and not authorise(context, Access.WRITE, prefix):
            return False
        return all(authorise(context, access, key) for key in command.keys or (command.key,))

    def _report_denied(self, command: Command, context: Context, prefix: bytes | None) -> None:
        """Report a command that :meth:`_is_authorised` did not permit. It looks for the key again, so that permitted
        commands need not remember one."""
        authorise = self._authorise
        if self._denied is None or authorise is None:
            return
        if prefix is not None and not authorise(context, Access.WRITE, prefix):
            self._denied(context, command.verb, Access.WRITE, prefix)
            return
        access = command.access(strict_read=self._strict_read)
        for key in command.keys or (command.key,):
            if not authorise(context, access, key):
                self._denied(context, command.verb, access, key)
                return

    def _lift(self, prefix: bytes, token: Hlc, change: Change) -> None:
        if self.fences.lift(prefix, token):
            change.floor = (prefix, token)

    def _get(self, command: Command, record: Record | None) -> Answer:
        if command.version is not None and self.history is not None:
            try:
                record = self.history.at(command.key, command.version, record)
            except HistoryExpired:
                return _ERRORS[StoreError.HISTORY]
        if record is None:
            return _MISSING
        return Answer(_VALUE, value=record.value, version=record.version)

    def _get_many(self, command: Command, steady_ms: int) -> Answer:
        """Return the value of each key or null, with MGET also its version or null. The version of the answer is the
        store's clock: no change after the read has a lower or equal version."""
        versions = command.verb is Verb.MGET
        parts = [b"*%d\r\n" % (len(command.keys) * (1 + versions))]
        missing = MISSING * (1 + versions)
        for key in command.keys:
            record = self._present(key, steady_ms)
            if record is None:
                parts.append(missing)
                continue
            parts += bulk_pieces(record.value)
            if versions:
                parts.append(encode_bulk(str(record.version).encode()))
        return Answer(AnswerKind.PAYLOAD, value=b"".join(parts), version=self.clock)

    def _scan(self, command: Command, context: Context, steady_ms: int) -> Answer:
        authorise = self._authorise
        page = self._scanner.page(
            command,
            lambda key: self._present(key, steady_ms) is not None,
            lambda key: authorise is None or authorise(context, Access.READ, key),
        )
        return _ERRORS[page] if isinstance(page, StoreError) else Answer(AnswerKind.PAYLOAD, value=page)

    def _present(self, key: bytes, steady_ms: int) -> Record | None:
        """Return the record of ``key``; None if it has expired, even if the timer has not removed it yet."""
        record = self._records.get(key)
        return None if record is None or 0 < record.expires_at < steady_ms else record

    def _set(
        self,
        command: Command,
        context: Context,
        record: Record | None,
        now_ms: int,
        steady_ms: int,
        earlier: list[Change],
    ) -> Executed:
        """Execute a SET; the changes are ``earlier`` and that of the SET."""
        value = command.value
        if record is None:
            key = command.key
            grown = RECORD_BYTES + len(key) + len(value)
            owner = context.owner
            fence: Hlc | None = None
        else:
            if not _is_met(command, record):
                return Answer(_NOT_MET, version=record.version), earlier
            # Reuse the key object of the tables, so that lookups need not compare bytes.
            key = record.key
            grown = len(value) - len(record.value)
            owner = record.owner
            fence = record.fence
        if grown > 0 and self.quotas.limited and self._is_over_quota(record, grown, owner):
            earlier = [*earlier, *self.tick(now_ms, steady_ms)]
            if self._is_over_quota(record, grown, owner):
                if self.quotas.are_exceeded(record is None, grown):
                    self.refused_quota += 1
                else:
                    self.refused_share += 1
                return _ERRORS[StoreError.QUOTA], earlier
        if self.out_of_space and (grown > 0 or self.logs_changes):
            return _ERRORS[StoreError.QUOTA], earlier
        token = context.token
        if fence is None or (token is not None and fence.is_before(token)):
            fence = token
        version = self._clock.next(now_ms, context.time_ms, context.time_counter)
        expires_at = steady_ms + command.ttl_ms if command.ttl_ms else 0
        if record is not None and record.expires_at:
            self.expiries.went()
        new = self._records[key] = Record(key, value, version, fence, expires_at, owner)
        if record is None:
            self.quotas.change(owner, 1, grown)
            self._scanner.added(key)
        elif grown:
            self.quotas.change(owner, 0, grown)
        observers = self._observers
        change = Change(key, new, version, observers.of(key) if observers.by_client else (), context.client_id)
        if self.history is not None:
            self.history.add(change, record)
        if expires_at:
            self.expiries.came(expires_at, key)
        return Answer(_OK, version=version), [*earlier, change] if earlier else [change]

    def _is_over_quota(self, record: Record | None, grown: int, owner: str) -> bool:
        keys = int(record is None)
        return self.quotas.are_exceeded(keys, grown) or self.quotas.is_share_exceeded(owner, keys, grown)

    def _delete(
        self, command: Command, context: Context, record: Record | None, now_ms: int, earlier: list[Change]
    ) -> Executed:
        """Execute a DEL or VDEL; the changes are ``earlier`` and that of the delete."""
        if record is None:
            return _NONE_DELETED, earlier
        if command.verb is _VDEL and record.value != command.value:
            return Answer(_NOT_MET, version=record.version), earlier
        change = self._remove(record, now_ms, context.time_ms, context.time_counter, context.client_id)
        return Answer(_COUNT, count=1, version=change.version, previous=record.version), [*earlier, change]

    def _key_notify(self, command: Command, context: Context) -> Answer:
        key, client_id, prefix = command.key, context.client_id, command.prefix
        if command.stop:
            return _DONE if self._observers.remove(client_id, key, prefix=prefix) else _NONE_DELETED
        missed: list[Change] | None = None
        if command.version is not None and self.history is not None:
            if command.version.position > self.clock.position:
                return _ERRORS[StoreError.HISTORY]  # a version from before a repair
            try:
                missed = self.history.since(command.version, key, prefix=prefix)
            except HistoryExpired:
                return _ERRORS[StoreError.HISTORY]
            if prefix and self._authorise is not None:
                missed = [change for change in missed if self._authorise(context, Access.READ, change.key)]
        # A repeated KEYNOTIFY succeeds: the Rust and .NET SDKs reject answers other than OK.
        if not self._observers.add(client_id, key, context.dialect, prefix=prefix):
            return _ERRORS[StoreError.QUOTA]
        if self._authorise is not None:
            self._observing[client_id] = context
        if not prefix and command.version is None:
            return _DONE
        return Answer(AnswerKind.OK, version=self.clock, missed=missed)

    def _remove(
        self, record: Record, now_ms: int, seen_ms: int = -1, seen_counter: int = 0, writer: str = ""
    ) -> Change:
        """Delete ``record``. A delete has a separate version, so that a later SET is newer than both."""
        del self._records[record.key]
        self.quotas.change(record.owner, -1, -size_of(record))
        if record.expires_at:
            self.expiries.went()
        self._removals += 1
        if self._removals & _REMOVALS == 0:
            self._shrink_table()
        version = self._clock.next(now_ms, seen_ms, seen_counter)
        change = Change(record.key, None, version, self._observers.of(record.key), writer, previous=record.version)
        if self.history is not None:
            self.history.add(change, record)
        return change

    def _shrink_table(self) -> None:
        """Rebuild the table of keys if most of it is unused: a dict grows automatically, but shrinks only when keys are
        added."""
        records = self._records
        if getsizeof(records) > _LEAST_TABLE + _SPARSE * len(records):
            items = list(records.items())
            records.clear()
            records.update(items)

    def _expire(self, record: Record, now_ms: int) -> Change:
        self.expired += 1
        return self._remove(record, now_ms)


def _is_met(command: Command, record: Record | None) -> bool:
    """Return True if the condition of a SET is met."""
    if record is None or command.condition is _ALWAYS:
        return True
    return command.condition is _NEX and record.value == command.expected
