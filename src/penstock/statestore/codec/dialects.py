"""The three dialects of the protocol: all differences between them, in one table.

Each request determines its dialect (:func:`penstock.statestore.binding.dialect_of`), so a store can serve clients of
all dialects at the same time. Where the document and the deployed SDKs disagree, the published dialect follows the
document and the SDK dialect follows the SDKs.
"""

from __future__ import annotations

from typing import Final, final

from penstock.statestore.codec.errors import StoreError

__all__ = ["DIALECTS", "HEADS", "OLDER", "PUBLISHED", "SDK", "Dialect"]

HEADS: Final = 128
"""Number of lengths of a version for which a dialect caches the preceding bytes of a response."""


@final
class Dialect:
    """One of the three dialects.

    ``timestamp_wire`` and ``fence_wire`` are the encoded names of the two user properties; ``status_head`` are the
    encoded user properties with status and protocol version; ``answer_head`` adds the name of the user property of the
    version: the bytes of a response between correlation data and length of the version; ``answer_heads`` add this
    length, up to :data:`HEADS`.
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
        """Payload of the answer to SET with NX/NEX and VDEL if the condition was not met."""
        self.delete_event = delete_event
        """Operation in the notification of a delete or an expiry."""
        self.fence_lower = fence_lower
        """Text of the error for a fencing token below the one that protects the key."""
        self.padded_versions = padded_versions
        """Whether versions have 15 and 5 digits; otherwise they have no leading zeros."""
        self.status = status
        """Whether ``__stat``, ``__protVer`` and ``__srcId`` are sent, and other protocol versions are refused (505)."""
        self.delete_version = delete_version
        """True if the answer to DEL and VDEL and the notification of a delete have the version of the delete.

        Otherwise both have the version of the deleted value, as in the document: "this version is also returned on
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
