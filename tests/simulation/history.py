"""Operations of all clients, and the rules that every answer must obey.

A value is written once, so a value names its operation. ``shown`` is what any client has learned from an answer or a
notification: from then on it must be durable. The rules need no model of the store:

* What was shown is there. A GET that begins after a version of its key was shown returns this version or a newer one;
  it finds nothing only if a DEL or an expiry that did not end before that SET began can have removed it.
* Versions rise. A SET that begins after a version of any key was shown gets a greater one, and a version belongs to one
  value for ever. Notifications of a key reach a connection in the order of versions.
* No key expires before the SET's time has passed since it was sent.
* A SET or DEL with a lower fencing token than that of a SET shown before it was sent, or without one, is refused,
  unless a DEL or an expiry can have removed the key since. A refused request changes nothing, and nothing is refused
  unless a SET with a greater token was sent before.
* A SET that the quota refuses changes nothing; only a store with small limits refuses one.

They hold over restarts as well, which makes "acknowledged is a subset of recovered" a special case. An operation whose
connection was lost may have been carried out, or not; so may one that the store refused after a failure of its disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from penstock.statestore.codec.errors import StoreError
from penstock.statestore.hlc import Hlc

__all__ = ["History", "Operation", "Violation"]

DEL = "DEL"
GET = "GET"
OBSERVE = "KEYNOTIFY"
SET = "SET"

_FENCED = tuple(f"-ERR {error}\r\n".encode() for error in (StoreError.FENCE_LOWER, StoreError.FENCE_REQUIRED))
"""Answers to requests with a lower fencing token, and without one."""
_OVER_QUOTA = f"-ERR {StoreError.QUOTA}\r\n".encode()


class Violation(Exception):
    """A rule was broken."""


@dataclass(slots=True, eq=False)
class Operation:
    """One request. ``done_ms`` is None without a known answer; ``px`` 0: the key does not expire."""

    kind: str
    key: bytes
    value: bytes = b""
    px: int = 0
    only_new: bool = False
    token: Hlc | None = None
    """Fencing token."""
    is_refused: bool = False
    """Its fencing token was refused, or a quota was exceeded."""
    sent_ms: int = 0
    done_ms: int | None = None
    removed_nothing: bool = False
    version: Hlc | None = None
    newest_of_key: Operation | None = None
    """The SET with the newest version of the key that was shown when this was sent."""
    newest: Hlc | None = None
    """The newest version of any key then."""

    def __str__(self) -> str:
        options = f"{' NX' if self.only_new else ''}{f' PX {self.px}' if self.px else ''}"
        options += f" token {self.token.wall_ms}" if self.token is not None else ""
        return f"{self.kind} {self.key.decode()} {self.value.rstrip(b'.').decode()}{options}"


@dataclass(slots=True)
class History:
    """What happened in one simulation. ``trace`` is a hash of it."""

    operations: dict[bytes, list[Operation]] = field(default_factory=dict)
    """Those that were sent, by key."""
    answered: int = 0
    notified: int = 0
    has_quotas: bool = False
    """Whether the store has limits of keys and bytes that its clients exceed."""
    refused: int = 0
    """SETs that these limits refused."""
    _writer: dict[bytes, Operation] = field(default_factory=dict)
    _newest: dict[bytes, Operation] = field(default_factory=dict)
    _newest_version: Hlc | None = None
    _versions: dict[Hlc, Operation] = field(default_factory=dict)
    _hash: blake2b = field(default_factory=lambda: blake2b(digest_size=16))

    @property
    def trace(self) -> str:
        """A hash of everything that was noted."""
        return self._hash.hexdigest()

    def note(self, text: str) -> None:
        """Add an event to the trace."""
        self._hash.update(text.encode() + b"\n")

    def sent(self, operation: Operation, now_ms: int) -> None:
        """An operation is about to be sent."""
        operation.sent_ms = now_ms
        operation.newest_of_key = self._newest.get(operation.key)
        operation.newest = self._newest_version
        self.operations.setdefault(operation.key, []).append(operation)
        if operation.value:
            self._writer[operation.value] = operation
        self.note(f"{now_ms} sent {operation}")

    def answer(self, operation: Operation, payload: bytes, version: Hlc | None, now_ms: int) -> None:
        """An operation was answered."""
        self.note(f"{now_ms} {operation}: {payload!r} {version}")
        if payload.startswith(b"-ERR the state store is read-only"):
            return
        if payload in _FENCED:
            self._check_refused(operation)
            operation.done_ms = now_ms
            return
        if payload == _OVER_QUOTA and self.has_quotas and operation.kind == SET:
            self.refused += 1
            operation.is_refused = True
            operation.done_ms = now_ms
            return
        if payload.startswith(b"-"):
            raise Violation(f"{operation} was refused: {payload!r}")
        operation.done_ms = now_ms
        self.answered += 1
        self._check_fence(operation, now_ms)
        if operation.kind == SET:
            if payload == b"+OK\r\n":
                self._set_done(operation, version, now_ms)
            elif not operation.only_new:
                raise Violation(f"{operation} was answered with {payload!r}")
        elif operation.kind == GET:
            if payload == b"$-1\r\n":
                self._check_absent(operation, now_ms)
            else:
                self._check_found(operation, payload.split(b"\r\n")[1], version)
        elif operation.kind == DEL:
            operation.removed_nothing = payload == b":0\r\n"
            if operation.removed_nothing:
                self._check_absent(operation, now_ms)

    def notification(self, key: bytes, value: bytes | None, version: Hlc, last: Hlc | None, now_ms: int) -> None:
        """An observer was told of ``value``, None: of a deletion; ``last`` is the version that it was told before."""
        self.note(f"{now_ms} notified {key!r} {value!r} {version}")
        self.notified += 1
        if value is None:
            return
        if last is not None and version <= last:
            raise Violation(f"notification of {key!r} with version {version} after {last}")
        self._show(self._written(key, value, version), version)

    def _set_done(self, operation: Operation, version: Hlc | None, now_ms: int) -> None:
        if version is None:
            raise Violation(f"{operation} was answered without a version")
        if operation.newest is not None and version <= operation.newest:
            raise Violation(f"{operation} got version {version}, sent after {operation.newest} had been shown")
        if operation.only_new:
            self._check_absent(operation, now_ms)
        self._show(operation, version)

    def _check_found(self, operation: Operation, value: bytes, version: Hlc | None) -> None:
        if version is None:
            raise Violation(f"{operation} returned {value!r} without a version")
        writer = self._written(operation.key, value, version)
        shown = operation.newest_of_key
        if shown is not None and shown.version is not None and version < shown.version:
            raise Violation(f"{operation} returned {version} of {writer}, sent after {shown.version} of {shown}")
        self._show(writer, version)

    def _check_absent(self, operation: Operation, now_ms: int) -> None:
        shown = operation.newest_of_key
        if shown is not None and not self._may_be_removed(operation, shown, now_ms):
            raise Violation(
                f"{operation} at {now_ms} found nothing, sent after {shown.version} of {shown} had been shown"
            )

    def _check_fence(self, operation: Operation, now_ms: int) -> None:
        shown = operation.newest_of_key
        if shown is None or operation.kind not in {SET, DEL} or not _is_lower(operation, shown):
            return
        if not self._may_be_removed(operation, shown, now_ms):
            raise Violation(f"{operation} was carried out, sent after {shown.version} of {shown} had been shown")

    def _check_refused(self, operation: Operation) -> None:
        if not any(_is_lower(operation, other) for other in self.operations[operation.key] if other.kind == SET):
            raise Violation(f"{operation} was refused, and no SET had a greater token")
        operation.is_refused = operation.removed_nothing = True

    def _may_be_removed(self, operation: Operation, shown: Operation, now_ms: int) -> bool:
        """Whether a DEL or an expiry can have removed what ``shown`` wrote, before ``operation`` was carried out."""
        for other in self.operations[operation.key]:
            if other is operation or (other.done_ms is not None and other.done_ms < shown.sent_ms):
                continue
            if other.kind == DEL and not other.removed_nothing:
                return True
            if other.kind == SET and other.px and other.sent_ms + other.px <= now_ms and not other.is_refused:
                return True
        return False

    def _written(self, key: bytes, value: bytes, version: Hlc) -> Operation:
        writer = self._writer.get(value)
        if writer is None or writer.key != key:
            raise Violation(f"{key!r} has a value that nobody wrote: {value!r}")
        if writer.is_refused:
            raise Violation(f"{writer} was refused, and its value is there")
        if writer.version is not None and writer.version != version:
            raise Violation(f"{writer} has version {writer.version}, and now {version}")
        return writer

    def _show(self, writer: Operation, version: Hlc) -> None:
        writer.version = version
        if self._versions.setdefault(version, writer) is not writer:
            raise Violation(f"{version} is the version of {writer} and of {self._versions[version]}")
        newest = self._newest.get(writer.key)
        if newest is None or newest.version is None or version > newest.version:
            self._newest[writer.key] = writer
        if self._newest_version is None or version > self._newest_version:
            self._newest_version = version


def _is_lower(operation: Operation, other: Operation) -> bool:
    """Whether the fence that ``other`` sets refuses ``operation``."""
    return other.token is not None and (operation.token is None or operation.token < other.token)
