"""Errors of the state store client, by cause.

RefusedError
└── StateStoreError           ``text``: the store's error text; ``error``: its entry in the table, None = unknown
    ├── ClockSkewError        the timestamp or token is more than a minute ahead of the store's clock
    ├── FencingError          a fencing token is required, or is lower than the one that protects the key
    ├── NotAuthorizedError    not permitted by the broker's policy
    ├── QuotaExceededError    a quota of the store is exceeded
    ├── InvalidRequestError   syntax, unknown command, arguments, timestamp, empty key
    └── UnknownStoreError     an unknown error text: from a newer store or another implementation
WritesRefusedError            RefusedError of some of many writes; the others may have been executed
RequestStatusError            RefusedError of the request/response protocol: ``code`` is its ``__stat``

After a :class:`~penstock.errors.RefusedError` the request had no effect. Errors of locks, which may be retried:

UnavailableError
├── LockHeldError             another client held the lock for the whole timeout
├── LeaseLostError            the lease was lost while it was in use
└── NoStateStoreError         the broker has no state store, as far as this client knows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.errors import RefusedError, UnavailableError
from penstock.statestore.codec.commands import COMMANDS, Access
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.hlc import Hlc

__all__ = [
    "ClockSkewError",
    "FencingError",
    "InvalidRequestError",
    "LeaseLostError",
    "LockHeldError",
    "NoStateStoreError",
    "NotAuthorizedError",
    "QuotaExceededError",
    "RequestStatusError",
    "StateStoreError",
    "UnknownStoreError",
    "WritesRefusedError",
    "as_text",
    "refusal",
    "status_refusal",
]


class StateStoreError(RefusedError):
    """The store refused a request; nothing was changed."""

    def __init__(
        self,
        what: str,
        *,
        text: str,
        error: StoreError | None = None,
        key: bytes = b"",
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, text=text, peer="state store", why=why, hint=hint)
        self.error = error
        self.key = key


class ClockSkewError(StateStoreError):
    """Two clocks differ by more than a minute. ``skew_ms``: lead of the client's clock in ms; None: not known."""

    skew_ms: int | None = None


class FencingError(StateStoreError):
    """The key is protected by a fencing token. ``token``: the rejected one; None if there was none."""

    token: Hlc | None = None


class NotAuthorizedError(StateStoreError):
    """The broker's policy does not permit this client to access the key."""


class QuotaExceededError(StateStoreError):
    """A quota of the store, or of the key's principal, does not allow another key or a larger value."""


class InvalidRequestError(StateStoreError):
    """The store rejected the request as invalid, or does not know the command."""


class UnknownStoreError(StateStoreError):
    """The store sent an unknown error text, in ``text``."""


class WritesRefusedError(RefusedError):
    """The store rejected some of many writes; the others are not affected.

    ``first``: the error that the first rejected write would have raised alone; ``refused``: the store's text for each
    rejected key; ``applied``: for each write, in order, whether it changed anything. It is also False for writes whose
    condition was not met, and for writes that were not sent.
    """

    def __init__(self, first: StateStoreError, refused: Mapping[bytes, str], applied: Sequence[bool]) -> None:
        super().__init__(
            f"{first.what} ({len(refused)} of {len(applied)} writes were refused)",
            text=first.text,
            peer=first.peer,
            why=first.why,
            hint=first.hint,
        )
        self.first = first
        self.refused = refused
        self.applied = applied


class RequestStatusError(RefusedError):
    """The request was rejected before its execution; ``code`` is an HTTP status."""


class LockHeldError(UnavailableError):
    """Another client held the lock for the whole timeout. ``holder``: its last holder; None if not known."""

    def __init__(
        self, what: str, *, name: bytes, holder: bytes | None, why: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what, applied=False, why=why, hint=hint)
        self.name = name
        self.holder = holder


class LeaseLostError(UnavailableError):
    """The lease on ``name`` was lost while it was in use; the work under it was cancelled."""

    def __init__(self, what: str, *, name: bytes, why: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, why=why, hint=hint)
        self.name = name


class NoStateStoreError(UnavailableError):
    """No answer: the broker reported that requests have no subscriber, and this client has never got an answer."""


_OTHER_FORM: Final = (
    "the store does not support this form of the command: it is an older version, or an extension is disabled"
    " (statestore.extensions)"
)

_KINDS: Final[dict[StoreError, tuple[type[StateStoreError], str]]] = {
    StoreError.TIMESTAMP_TOO_FAR_AHEAD: (
        ClockSkewError,
        "synchronize this machine's clock (NTP), or use the store's clock: server_clock=True",
    ),
    StoreError.FENCE_TOO_FAR_AHEAD: (
        ClockSkewError,
        "use the version of the SET that acquired the lock, unchanged; synchronize the clocks (NTP)",
    ),
    StoreError.FENCE_REQUIRED: (FencingError, "write with the fencing token of the lock that protects the key"),
    StoreError.FENCE_LOWER: (
        FencingError,
        "stop writing: a later holder of the lock has written; acquire the lock and read the key again",
    ),
    StoreError.NOT_AUTHORIZED: (
        NotAuthorizedError,
        "grant Read or Write on the key to this client in the policy file of the server, then SIGHUP",
    ),
    StoreError.QUOTA: (
        QuotaExceededError,
        "delete keys, or raise statestore.max_keys, max_bytes or principal_share; /readyz reports a full disk or etcd",
    ),
    StoreError.UNKNOWN_COMMAND: (
        InvalidRequestError,
        "the store does not have this command: it is an older version, or an extension is disabled",
    ),
    StoreError.SYNTAX: (InvalidRequestError, _OTHER_FORM),
    StoreError.ARITY: (InvalidRequestError, _OTHER_FORM),
    StoreError.BAD_TOKEN: (InvalidRequestError, "start the scan again: the store was restarted"),
    StoreError.HISTORY: (
        InvalidRequestError,
        "read the current value; statestore.history_changes and history_bytes make the history longer",
    ),
    StoreError.FENCE_PREFIX: (InvalidRequestError, "use a prefix of 1 to 4096 bytes, and the token of the lock"),
    StoreError.READ_ONLY: (
        StateStoreError,
        "see the store's log: its disk failed; restart the store after the repair",
    ),
    StoreError.TOPIC_TOO_LONG: (InvalidRequestError, "observe shorter keys, or use a shorter client identifier"),
}
_NOT_OFFERED: Final = frozenset({StoreError.UNKNOWN_COMMAND, StoreError.SYNTAX, StoreError.ARITY})
"""Errors of a request that needs an extension that the store does not have."""
_PERMISSIONS: Final = {
    verb.value: "Write (with security.strict_read also Read)" if Access.WRITE in spec.access else "Read"
    for verb, spec in COMMANDS.items()
    if not spec.authorizes_each_key
}
"""The permission on its key that each command needs."""
_BY_TEXT: Final = {error.value: error for error in StoreError}
# The published specification differs in one word of this text.
_BY_TEXT[StoreError.FENCE_LOWER.replace("lower version than", "lower version that")] = StoreError.FENCE_LOWER

_STATUS: Final = {
    "400": "a part of the request is missing or malformed: see the text",
    "415": "the store does not accept the content type: report it",
    "503": "the store is not ready; repeat the request",
    "505": "the store uses another version of the protocol; use a matching version of this client",
}


def as_text(data: bytes) -> str:
    """Return a key or holder as quoted text for messages; bytes that are not UTF-8 are escaped."""
    return repr(data.decode("utf-8", "backslashreplace"))


def refusal(
    command: str,
    key: bytes,
    text: str,
    *,
    token: Hlc | None = None,
    why: str | None = None,
    skew_ms: int | None = None,
    extension: str | None = None,
) -> StateStoreError:
    """Return the error for the response ``-ERR text`` to ``command`` on ``key``.

    ``why``: the cause, if the caller knows it; ``extension``: the extension that the request needs.
    """
    error = _BY_TEXT.get(text)
    what = f"state store refused {command} {as_text(key)}: {text}"
    if error is None:
        return UnknownStoreError(
            what,
            text=text,
            key=key,
            why="this client does not know the error text",
            hint="see the documentation of the store",
        )
    kind, hint = _KINDS.get(error, (InvalidRequestError, "report it: this client should not send such a request"))
    if extension is not None and error in _NOT_OFFERED:
        why = f"the store does not have the extension {extension!r}"
        hint = f"enable it in the configuration of the store's node: statestore.extensions: [{extension}]"
    if error is StoreError.NOT_AUTHORIZED and (permission := _PERMISSIONS.get(command)) is not None:
        hint = f"grant {permission} on {as_text(key)} to this client in the policy file of the server, then SIGHUP"
    if kind is FencingError and why is None:
        why = "no fencing token was given" if token is None else f"the token was {token}"
    refused = kind(what, text=text, error=error, key=key, why=why, hint=hint)
    if isinstance(refused, FencingError):
        refused.token = token
    elif isinstance(refused, ClockSkewError):
        refused.skew_ms = skew_ms
    return refused


def status_refusal(
    command: str, key: bytes, status: str | None, message: str | None, field: str | None
) -> RefusedError:
    """Return the error for a response whose ``__stat`` is not 200; ``field``: ``__propName``, the invalid property."""
    if status is None:
        return RequestStatusError(
            f"state store: the response to {command} {as_text(key)} has no status",
            text="status missing",
            peer="state store",
            why="a store responds in the form of the request; this response has neither",
            hint="check which client responds on the state store's topic of this broker",
        )
    text = message or f"status {status}"
    return RequestStatusError(
        f"state store refused {command} {as_text(key)}: {text}",
        code=int(status) if status.isascii() and status.isdigit() else 0,
        text=text,
        peer="state store",
        why=f"invalid property: {field!r}" if field else None,
        hint=_STATUS.get(status),
    )
