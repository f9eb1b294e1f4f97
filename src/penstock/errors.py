"""Errors of penstock: classes by who is at fault, attributes for what the caller can do.

PenstockError                 retriable: bool, hint: str | None
├── ProtocolError             bytes or order of messages violated a protocol
│   ├── LocalProtocolError    the caller requested something that the protocol forbids
│   └── RemoteProtocolError   the peer violated it; has the reason code to respond with
├── RefusedError              the peer rejected the request: code, text, address
├── UnavailableError          connection lost, timeout, not the leader: may be retried
├── ConfigError               a setting: value, accepted values, place
├── DataLossError             requested data no longer exists: its range
└── StorageError              file and position
    └── ShortageError         the machine lacks a resource: the write has no effect and can be repeated
        ├── OutOfSpaceError         disk space
        └── OutOfDescriptorsError   file descriptors

The message says what failed, ``why`` the cause, and ``hint`` what to do; ``str()`` of an error has all three. Values of
peers are quoted, secrets are never shown.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DataLossError",
    "LocalProtocolError",
    "OutOfDescriptorsError",
    "OutOfSpaceError",
    "PenstockError",
    "ProtocolError",
    "RefusedError",
    "RemoteProtocolError",
    "ShortageError",
    "StorageError",
    "UnavailableError",
    "shortened",
]


def shortened(text: str, most: int = 200) -> str:
    """Return the beginning of a text for an error or a dead letter, with at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


class PenstockError(Exception):
    """Base class of all errors of penstock."""

    retriable: bool = False
    """True if the same call may succeed later without a change by the caller."""

    def __init__(self, what: str, *, why: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint

    def line(self) -> str:
        """The message on one line, for logs and lists: ``what; why: cause; hint: action``."""
        return "; ".join(" ".join(line.split()) for line in str(self).splitlines())

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class ProtocolError(PenstockError):
    """A protocol was violated, by this side or by the peer."""


class LocalProtocolError(ProtocolError):
    """The caller requested something that the protocol forbids; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer violated the protocol.

    ``reason_code`` is the code to respond with (MQTT: reason code of DISCONNECT or CONNACK; 0 if the protocol has
    none).
    """

    def __init__(self, what: str, *, reason_code: int = 0, why: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, why=why, hint=hint)
        self.reason_code = reason_code

    def copy(self) -> RemoteProtocolError:
        """Copy the error without traceback, cause and context.

        A decoder keeps a copy of the error that stopped it: the traceback of the original refers to the decoder and its
        input, a reference cycle that would keep all of them in memory until the next full garbage collection.
        """
        return RemoteProtocolError(self.what, reason_code=self.reason_code, why=self.why, hint=self.hint)


class RefusedError(PenstockError):
    """The peer understood the request and rejected it.

    ``code`` is the code of the protocol (MQTT reason code, TubeMQ error code; 0 if errors are text only), ``text`` the
    message of the peer, ``peer`` its address. ``needs_grant``: the policies of a node do not permit it, and ``hint``
    says what to grant.
    """

    def __init__(
        self,
        what: str,
        *,
        code: int = 0,
        text: str = "",
        peer: str = "",
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.code = code
        self.text = text
        self.peer = peer
        self.needs_grant = False


class UnavailableError(PenstockError):
    """No response: the connection was lost, the request timed out, or the peer is not responsible.

    ``applied``: False if the request was certainly not executed, None if unknown.
    """

    retriable = True

    def __init__(
        self, what: str, *, applied: bool | None = None, why: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.applied = applied


class ConfigError(PenstockError):
    """A setting has an invalid value. The message has the setting, its value, the accepted values, and file and
    line."""

    def __init__(
        self,
        what: str,
        *,
        option: str = "",
        where: str = "",
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.option = option
        self.where = where


class DataLossError(PenstockError):
    """Requested records no longer exist; the message has their range.

    ``start`` and ``end`` are the offsets of a gap inside the log (half-open): reading can continue at ``end``. None if
    the loss is not a gap (older than the stored records, or beyond the end).
    """

    def __init__(
        self,
        what: str,
        *,
        start: int | None = None,
        end: int | None = None,
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.start = start
        self.end = end


class StorageError(PenstockError):
    """A file or a database failed, or has invalid content. The message has the file and the position."""

    def __init__(
        self, what: str, *, path: str = "", position: int | None = None, why: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.path = path
        self.position = position


class ShortageError(StorageError):
    """The machine currently lacks a resource for a call, which has no effect and can be repeated."""


class OutOfSpaceError(ShortageError):
    """There is no disk space for a write."""


class OutOfDescriptorsError(ShortageError):
    """There is no free file descriptor to open a file."""
