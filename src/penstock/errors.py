"""The errors penstock raises. Who is at fault comes first, what the caller can do comes second.

PenstockError                 retriable: bool, hint: str | None
├── ProtocolError             the bytes or the order of messages broke a protocol
│   ├── LocalProtocolError    we were asked to send something the protocol forbids
│   └── RemoteProtocolError   the peer sent it; carries the reason code to answer with
├── RefusedError              the peer understood and said no: code, text, who answered
├── UnavailableError          lost, timed out, not the leader: worth retrying; says what is unknown
├── ConfigError               an option: value received, values accepted, where it stands
├── DataLossError             data that was asked for is gone: what, from where to where
└── StorageError              which file, which byte, what was kept
    └── OutOfSpaceError       no disk space: nothing of the write counts, the same one may be tried again

A message says what happened; ``why`` and ``do`` say the cause and the remedy. ``str()`` of an error gives all three,
so that a traceback or a log line is already the whole story. Values of peers are quoted, secrets are never shown.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DataLossError",
    "LocalProtocolError",
    "OutOfSpaceError",
    "PenstockError",
    "ProtocolError",
    "RefusedError",
    "RemoteProtocolError",
    "StorageError",
    "UnavailableError",
]


class PenstockError(Exception):
    """Root of every error that penstock raises on purpose."""

    retriable: bool = False
    """Whether the same call may succeed later without a change by the caller."""

    def __init__(self, what: str, *, why: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.do = do

    @property
    def hint(self) -> str | None:
        """What to do about it, or None."""
        return self.do

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.do:
            lines.append(f"  do:  {self.do}")
        return "\n".join(lines)


class ProtocolError(PenstockError):
    """A protocol was broken, by us or by the peer."""


class LocalProtocolError(ProtocolError):
    """The caller asked for something that the protocol forbids; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol.

    ``reason_code`` is what the protocol lets us answer (MQTT: the reason code of the DISCONNECT or CONNACK; 0 where the
    protocol has no such answer).
    """

    def __init__(self, what: str, *, reason_code: int = 0, why: str | None = None, do: str | None = None) -> None:
        super().__init__(what, why=why, do=do)
        self.reason_code = reason_code

    def copy(self) -> RemoteProtocolError:
        """The same error without traceback, cause and context.

        A decoder keeps a copy of the error that ended it: the traceback of the original refers to the decoder and to
        the bytes that it was fed, a cycle that would hold all of them until the next full garbage collection.
        """
        return RemoteProtocolError(self.what, reason_code=self.reason_code, why=self.why, do=self.do)


class RefusedError(PenstockError):
    """The peer understood the request and refused it.

    ``code`` is the protocol's own (MQTT reason code, TubeMQ error code; 0 where errors are text only), ``text`` the
    peer's words, ``peer`` who answered.
    """

    def __init__(
        self, what: str, *, code: int = 0, text: str = "", peer: str = "", why: str | None = None, do: str | None = None
    ) -> None:
        super().__init__(what, why=why, do=do)
        self.code = code
        self.text = text
        self.peer = peer


class UnavailableError(PenstockError):
    """No answer: connection lost, timed out, or the peer is not the one in charge.

    ``applied`` says what is known of the request: False = certainly not carried out, None = unknown.
    """

    retriable = True

    def __init__(
        self, what: str, *, applied: bool | None = None, why: str | None = None, do: str | None = None
    ) -> None:
        super().__init__(what, why=why, do=do)
        self.applied = applied


class ConfigError(PenstockError):
    """An option has a value that cannot be used. Names the option, the value, what is accepted and where it stands."""

    def __init__(
        self,
        what: str,
        *,
        option: str = "",
        where: str = "",
        why: str | None = None,
        do: str | None = None,
    ) -> None:
        super().__init__(what, why=why, do=do)
        self.option = option
        self.where = where


class DataLossError(PenstockError):
    """Records that were asked for no longer exist; the message names the range that is gone.

    ``start`` and ``end`` are the offsets of a gap inside the log (half-open): reading can go on at ``end``. None where
    the loss is not a gap (older than what is kept, beyond the end).
    """

    def __init__(
        self,
        what: str,
        *,
        start: int | None = None,
        end: int | None = None,
        why: str | None = None,
        do: str | None = None,
    ) -> None:
        super().__init__(what, why=why, do=do)
        self.start = start
        self.end = end


class StorageError(PenstockError):
    """A file or a database failed, or holds what it must not. Names the file and the place in it."""

    def __init__(
        self, what: str, *, path: str = "", position: int | None = None, why: str | None = None, do: str | None = None
    ) -> None:
        super().__init__(what, why=why, do=do)
        self.path = path
        self.position = position


class OutOfSpaceError(StorageError):
    """A write found no space on the disk, and nothing of it counts: the same write succeeds once there is space."""
