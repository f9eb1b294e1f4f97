"""What a state store refuses, as errors that a program can tell apart.

RefusedError
└── StateStoreError           ``text``: the store's own words; ``error``: the entry of the table, None = unknown text
    ├── ClockSkewError        the time stamp or the token is more than a minute ahead of the store's clock
    ├── FencingError          a token is required, or this one is lower than the one that protects the key
    ├── NotAuthorizedError    the policy of the broker
    ├── QuotaExceededError    no room for a new key
    ├── InvalidRequestError   syntax, unknown command, arguments, time stamp, empty key
    └── UnknownStoreError     a text that is in no table: a newer store, or one with texts of its own
WritesRefusedError            RefusedError of some of many writes; the others may have been carried out
RequestStatusError            RefusedError of the request/response protocol below: ``code`` is its ``__stat``

These are :class:`~penstock.errors.RefusedError`: the request had no effect. Of locks, and worth another try:

UnavailableError
├── LockHeldError             another holder kept the lock all the time
└── LeaseLostError            the lease ended while work was done under it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.errors import RefusedError, UnavailableError
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.hlc import Hlc

__all__ = [
    "ClockSkewError",
    "FencingError",
    "InvalidRequestError",
    "LeaseLostError",
    "LockHeldError",
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
        do: str | None = None,
    ) -> None:
        super().__init__(what, text=text, peer="state store", why=why, do=do)
        self.error = error
        self.key = key


class ClockSkewError(StateStoreError):
    """Two clocks are more than a minute apart. ``skew_ms``: how far ours is ahead, where it is known."""

    skew_ms: int | None = None


class FencingError(StateStoreError):
    """The key is protected by a fencing token. ``token``: the one that was refused, None where there was none."""

    token: Hlc | None = None


class NotAuthorizedError(StateStoreError):
    """The broker's policy does not grant this client the key."""


class QuotaExceededError(StateStoreError):
    """The store, or the share of the key's principal, has no room for another key or a larger value."""


class InvalidRequestError(StateStoreError):
    """The store does not read the request, or does not know the command."""


class UnknownStoreError(StateStoreError):
    """A refusal whose text is in no table; ``text`` is what the store said."""


class WritesRefusedError(RefusedError):
    """The store refused some of many writes; the others are not affected by that.

    ``first`` is the first refusal, as the write alone would have raised it; ``refused`` the store's text for each key
    that it refused. ``applied`` tells for each write, in order, whether it changed anything: False also for one whose
    condition was not met, and for those that were not tried any more.
    """

    def __init__(self, first: StateStoreError, refused: Mapping[bytes, str], applied: Sequence[bool]) -> None:
        super().__init__(
            f"{first.what} ({len(refused)} of {len(applied)} writes were refused)",
            text=first.text,
            peer=first.peer,
            why=first.why,
            do=first.do,
        )
        self.first = first
        self.refused = refused
        self.applied = applied


class RequestStatusError(RefusedError):
    """The request was refused before the store read it; ``code`` is the status, as in HTTP."""


class LockHeldError(UnavailableError):
    """A lock was held by another all the time. ``holder`` is who it was at the end; None where that is not known."""

    def __init__(
        self, what: str, *, name: bytes, holder: bytes | None, why: str | None = None, do: str | None = None
    ) -> None:
        super().__init__(what, applied=False, why=why, do=do)
        self.name = name
        self.holder = holder


class LeaseLostError(UnavailableError):
    """The lease on ``name`` was lost while work was done under it; the work was cancelled."""

    def __init__(self, what: str, *, name: bytes, why: str | None = None, do: str | None = None) -> None:
        super().__init__(what, why=why, do=do)
        self.name = name


_OTHER_FORM: Final = (
    "this store does not offer this form of the command: it is of an older version, or an extension is switched off"
    " there (statestore.extensions)"
)

_KINDS: Final[dict[StoreError, tuple[type[StateStoreError], str]]] = {
    StoreError.TIMESTAMP_TOO_FAR_AHEAD: (
        ClockSkewError,
        "synchronize this machine's clock (NTP), or go by the store's: server_clock=True",
    ),
    StoreError.FENCE_TOO_FAR_AHEAD: (
        ClockSkewError,
        "use the version of the SET that acquired the lock, unchanged; synchronize the clocks (NTP)",
    ),
    StoreError.FENCE_REQUIRED: (FencingError, "write with the fencing token of the lock that protects the key"),
    StoreError.FENCE_LOWER: (
        FencingError,
        "stop writing: a later holder of the lock has written; acquire the lock again and read the key anew",
    ),
    StoreError.NOT_AUTHORIZED: (NotAuthorizedError, "have the broker's policy grant this client the key"),
    StoreError.QUOTA: (
        QuotaExceededError,
        "delete keys, or raise max_keys, max_bytes or principal_share of statestore; /readyz says if the disk is full",
    ),
    StoreError.UNKNOWN_COMMAND: (
        InvalidRequestError,
        "this store has no such command: it is of an older version, or an extension is switched off there",
    ),
    StoreError.SYNTAX: (InvalidRequestError, _OTHER_FORM),
    StoreError.ARITY: (InvalidRequestError, _OTHER_FORM),
    StoreError.BAD_TOKEN: (InvalidRequestError, "begin the listing anew: the store has started again since"),
    StoreError.HISTORY: (
        InvalidRequestError,
        "read the key as it is now; a longer history is kept by statestore.history_changes and history_bytes",
    ),
    StoreError.FENCE_PREFIX: (InvalidRequestError, "give a prefix of 1 to 4096 bytes, and the token of the lock"),
    StoreError.READ_ONLY: (
        StateStoreError,
        "look into the store's log: its disk failed; restart it when that is mended",
    ),
    StoreError.TOPIC_TOO_LONG: (InvalidRequestError, "observe shorter keys, or give the client a shorter identifier"),
}
_NOT_OFFERED: Final = frozenset({StoreError.UNKNOWN_COMMAND, StoreError.SYNTAX, StoreError.ARITY})
"""Answers to a request that needs an extension which the store does not have."""
_BY_TEXT: Final = {error.value: error for error in StoreError}
# The published form prints one text with another word.
_BY_TEXT[StoreError.FENCE_LOWER.replace("lower version than", "lower version that")] = StoreError.FENCE_LOWER

_STATUS: Final = {
    "400": "the request lacks something, or has something malformed: see the text",
    "408": "the request was not answered in its time; repeat it",
    "415": "the store does not take the content type: report it",
    "503": "the store is not ready; repeat the request",
    "505": "the store speaks another version of the protocol; use a matching version of this client",
}


def as_text(data: bytes) -> str:
    """Bytes of a key or holder for messages: quoted text where they are UTF-8, else escapes."""
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
    """The error for the answer ``-ERR text`` to ``command`` on ``key``.

    ``why`` is the cause as far as the caller knows it, ``extension`` the extension that the request needs.
    """
    error = _BY_TEXT.get(text)
    what = f"state store refused {command} {as_text(key)}: {text}"
    if error is None:
        return UnknownStoreError(
            what,
            text=text,
            key=key,
            why="this client does not know that text",
            do="see the documentation of the store that answered",
        )
    kind, do = _KINDS.get(error, (InvalidRequestError, "report it: this client should not send such a request"))
    if extension is not None and error in _NOT_OFFERED:
        why = f"the store does not offer the extension {extension!r}"
        do = f"enable it in the configuration of the store's node: statestore.extensions: [{extension}]"
    if kind is FencingError and why is None:
        why = "no fencing token was given" if token is None else f"the token was {token}"
    refused = kind(what, text=text, error=error, key=key, why=why, do=do)
    if isinstance(refused, FencingError):
        refused.token = token
    elif isinstance(refused, ClockSkewError):
        refused.skew_ms = skew_ms
    return refused


def status_refusal(
    command: str, key: bytes, status: str | None, message: str | None, field: str | None
) -> RefusedError:
    """The error for an answer whose ``__stat`` is not 200; ``field`` is ``__propName``, the property that is wrong."""
    if status is None:
        return RequestStatusError(
            f"state store: the answer to {command} {as_text(key)} has no status",
            text="status missing",
            peer="state store",
            why="a store answers in the form of the request; this answer has none",
            do="see what answers on the state store's topic at this broker",
        )
    text = message or f"status {status}"
    return RequestStatusError(
        f"state store refused {command} {as_text(key)}: {text}",
        code=int(status) if status.isascii() and status.isdigit() else 0,
        text=text,
        peer="state store",
        why=f"it names {field!r}" if field else None,
        do=_STATUS.get(status),
    )
