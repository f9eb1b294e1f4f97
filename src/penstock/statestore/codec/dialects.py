"""The three forms in which clients speak to the store: every difference between them, in one table.

A request chooses its form itself (:func:`penstock.statestore.binding.dialect_of`), so clients of all forms work side
by side on one store. Where the document and the deployed SDKs disagree, the published form follows the document and
the SDK form follows the SDKs.
"""

from __future__ import annotations

from typing import Final, final

from penstock.statestore.codec.errors import StoreError

__all__ = ["DIALECTS", "HEADS", "OLDER", "PUBLISHED", "SDK", "Dialect"]

HEADS: Final = 128
"""Lengths of versions for which a dialect has the bytes before them."""


@final
class Dialect:
    """One form; the three of them are all there are.

    ``timestamp_wire`` and ``fence_wire`` are the names of the two user properties as they are sent; ``status_head`` is
    the user properties with status and protocol version as they are sent, and ``answer_head`` these with the name of
    the user property of the version: what a response has between the correlation data and the length of the version;
    ``answer_heads`` are these with that length, up to :data:`HEADS`.
    """

    __slots__ = (
        "answer_head",
        "answer_heads",
        "condition_not_met",
        "delete_event",
        "delete_version",
        "fence_lower",
        "fence_property",
        "fence_wire",
        "name",
        "padded_versions",
        "status",
        "status_head",
        "timestamp_property",
        "timestamp_wire",
    )

    def __init__(
        self,
        *,
        name: str,
        condition_not_met: bytes,
        delete_event: bytes,
        fence_lower: str,
        padded_versions: bool,
        status: bool,
        delete_version: bool,
        timestamp_property: str,
        fence_property: str,
    ) -> None:
        self.name = name
        self.condition_not_met = condition_not_met
        """Payload that answers SET with NX/NEX and VDEL when nothing was changed."""
        self.delete_event = delete_event
        """Operation in the notification of a delete or an expiry."""
        self.fence_lower = fence_lower
        """Text of the error for a fencing token below the one that protects the key."""
        self.padded_versions = padded_versions
        """Versions with 15 and 5 digits, else without leading zeros."""
        self.status = status
        """Whether ``__stat``, ``__protVer`` and ``__srcId`` are sent, and other protocol versions are refused (505)."""
        self.delete_version = delete_version
        """The answer to DEL and VDEL and the notification of a delete carry the version of the delete.

        Else both carry the version of the deleted value, as the document says: "this version is also returned on
        successful […] DEL", "the timestamp of the value when notifying a client about a DEL"."""
        self.timestamp_property = timestamp_property
        self.fence_property = fence_property
        self.timestamp_wire = timestamp_property.encode()
        self.fence_wire = fence_property.encode()
        self.status_head = b"\x26\0\x06__stat\0\x03200\x26\0\x09__protVer\0\x031.0" if status else b""
        self.answer_head = (
            self.status_head + b"\x26" + len(self.timestamp_wire).to_bytes(2, "big") + self.timestamp_wire
        )
        self.answer_heads = [self.answer_head + size.to_bytes(2, "big") for size in range(HEADS)]

    def __repr__(self) -> str:
        return f"<Dialect {self.name}>"


SDK: Final = Dialect(
    name="sdk",
    condition_not_met=b":-1\r\n",
    delete_event=b"DELETE",
    fence_lower=StoreError.FENCE_LOWER,
    padded_versions=True,
    status=True,
    delete_version=True,
    timestamp_property="__ts",
    fence_property="__ft",
)
PUBLISHED: Final = Dialect(
    name="published",
    condition_not_met=b"-1\r\n",
    delete_event=b"DEL",
    fence_lower=StoreError.FENCE_LOWER.replace("lower version than", "lower version that"),
    padded_versions=False,
    status=False,
    delete_version=False,
    timestamp_property="__ts",
    fence_property="__ft",
)
OLDER: Final = Dialect(
    name="older",
    condition_not_met=PUBLISHED.condition_not_met,
    delete_event=PUBLISHED.delete_event,
    fence_lower=PUBLISHED.fence_lower,
    padded_versions=False,
    status=False,
    delete_version=False,
    timestamp_property="Timestamp",
    fence_property="FencingToken",
)

DIALECTS: Final = {dialect.name: dialect for dialect in (SDK, PUBLISHED, OLDER)}
