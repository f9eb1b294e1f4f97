"""The three forms in which clients speak to the store: every difference between them, in one table.

A request chooses its form itself (:func:`penstock.statestore.binding.dialect_of`), so clients of all forms work side
by side on one store. Where the document and the deployed SDKs disagree, the published form follows the document and
the SDK form follows the SDKs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.statestore.codec.errors import StoreError

__all__ = ["DIALECTS", "OLDER", "PUBLISHED", "SDK", "Dialect"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One form. Made once at import, so frozen costs nothing."""

    name: str
    condition_not_met: bytes
    """Payload that answers SET with NX/NEX and VDEL when nothing was changed."""
    delete_event: bytes
    """Operation in the notification of a delete or an expiry."""
    fence_lower: str
    """Text of the error for a fencing token below the one that protects the key."""
    padded_versions: bool
    """Versions with 15 and 5 digits, else without leading zeros."""
    status: bool
    """Whether ``__stat``, ``__protVer`` and ``__srcId`` are sent, and another protocol version is refused with 505."""
    delete_version: bool
    """The answer to DEL and VDEL and the notification of a delete carry the version of the delete.

    Else both carry the version of the deleted value, as the document says: "this version is also returned on successful
    […] DEL", "the timestamp of the value when notifying a client about a DEL"."""
    timestamp_property: str
    fence_property: str


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
