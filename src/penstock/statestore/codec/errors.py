"""Error texts of the state store.

Source: state store protocol, "-ERR responses".
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["StoreError"]


class StoreError(StrEnum):
    """Error texts, sent as ``-ERR <text>``. Clients compare them, so they must not be changed.

    The first twelve are the texts of the protocol's document, in its order. The fourth has ``lower version that`` in
    the document; the SDKs compare with ``than``, and the published dialect sends the text of the document. Texts after
    the twelfth are specific to penstock: clients must handle unknown texts.
    """

    TIMESTAMP_TOO_FAR_AHEAD = (
        "the request timestamp is too far in the future; ensure that the client and broker system clocks are "
        "synchronized"
    )
    FENCE_REQUIRED = "a fencing token is required for this request"
    FENCE_TOO_FAR_AHEAD = (
        "the request fencing token timestamp is too far in the future; ensure that the client and broker system clocks "
        "are synchronized"
    )
    FENCE_LOWER = "the request fencing token is a lower version than the fencing token protecting the resource"
    QUOTA = "the quota has been exceeded"
    SYNTAX = "syntax error"
    NOT_AUTHORIZED = "not authorized"
    UNKNOWN_COMMAND = "unknown command"
    ARITY = "wrong number of arguments"
    TIMESTAMP_MISSING = "missing timestamp"
    TIMESTAMP_MALFORMED = "malformed timestamp"
    KEY_EMPTY = "the key length is zero"

    TOPIC_TOO_LONG = "the notification topic for this key would be longer than 65535 bytes"
    READ_ONLY = "the state store is read-only after a storage failure; nothing was changed"
    NOT_CONNECTED = "an observation needs a network connection; a will has none"
    BAD_TOKEN = "the continuation token is not one of this pattern"  # noqa: S105 - a text, no secret
    HISTORY = "the history does not reach that version"
    FENCE_PREFIX = "the fence prefix must have 1 to 4096 bytes and a fencing token"
