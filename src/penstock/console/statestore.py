"""Keys of the state store."""

from __future__ import annotations

import base64
import time
from typing import Final

from penstock.console.pages import Page, PageQuery, Pages, decode_cursor, encode_cursor
from penstock.console.snapshots import Key
from penstock.errors import LocalProtocolError
from penstock.statestore.codec.glob import MAX_PATTERN
from penstock.statestore.engine.record import Record
from penstock.statestore.service.service import StateStoreService

__all__ = ["MAX_VALUE_BYTES", "StateStoreViews", "pattern_of"]

MAX_VALUE_BYTES: Final = 4096
"""Maximum bytes of a value in a list."""
MAX_SEARCH_S: Final = 2.0
"""Maximum seconds of a search for a page, in steps of at most 10,000 keys; then a short page with a cursor is
returned."""
STEP_ROWS: Final = 200


class StateStoreViews:
    """Read-only views of the keys of ``service``."""

    def __init__(self, service: StateStoreService, pages: Pages) -> None:
        self._service = service
        self._pages = pages

    async def keys(self, query: PageQuery, pattern: bytes, *, values: bool = False) -> Page[Key]:
        """Return a page of the keys that match the glob ``pattern``, in the order of their bytes.

        ``values``: with the first :data:`MAX_VALUE_BYTES` of each value. A page may be short although it has a cursor:
        the search for rare keys ends after :data:`MAX_SEARCH_S`.

        Raises:
            LocalProtocolError: the cursor is not one of this list.
        """
        after: bytes | None = None
        if query.after is not None:
            (text,) = decode_cursor(query.after, str)
            after = _from_base64(str(text))
        rows: list[Key] = []
        ends_s = time.monotonic() + MAX_SEARCH_S
        while True:
            records, after = self._service.records(pattern, after, min(STEP_ROWS, query.limit - len(rows)))
            rows += [self._key(record, MAX_VALUE_BYTES if values else None) for record in records]
            if after is None or len(rows) >= query.limit or time.monotonic() > ends_s:
                break
            await self._pages.pause()
        more = None if after is None else encode_cursor(base64.b64encode(after).decode())
        return Page(tuple(rows), more, self._service.keys)

    def key(self, key: bytes) -> Key | None:
        """Return a key with its complete value; None if it does not exist."""
        record = self.record(key)
        return None if record is None else self._key(record, len(record.value))

    def record(self, key: bytes) -> Record | None:
        """Return the record of a key; None if it does not exist."""
        return self._service.record(key)

    def steady(self) -> int:
        """Return the time in ms by which keys expire."""
        return self._service.steady()

    def _key(self, record: Record, shown: int | None) -> Key:
        service = self._service
        value = None if shown is None else record.value[:shown]
        return Key(
            key=_text(record.key),
            key_base64=base64.b64encode(record.key).decode(),
            value_bytes=len(record.value),
            version=str(record.version),
            version_age_s=max(0, service.clock() - record.version.wall_ms) / 1000,
            expires_in_s=(record.expires_at - service.steady()) / 1000 if record.expires_at else None,
            fencing_token=None if record.fence is None else str(record.fence),
            owner=record.owner,
            value=None if value is None else _text(value),
            value_base64=None if value is None or _text(value) is not None else base64.b64encode(value).decode(),
            truncated=shown is not None and shown < len(record.value),
        )


def pattern_of(prefix: str, text: str) -> bytes:
    """Return the glob of the keys that begin with ``prefix`` and contain ``text``.

    Raises:
        LocalProtocolError: it is too long.
    """
    pattern = _quoted(prefix) + b"*" + (_quoted(text) + b"*" if text else b"")
    if len(pattern) > MAX_PATTERN:
        raise LocalProtocolError("the prefix or the text is too long", hint=f"use at most {MAX_PATTERN // 3} bytes")
    return pattern


def _quoted(text: str) -> bytes:
    return b"".join(b"[%c]" % byte if byte in b"*?[" else bytes((byte,)) for byte in text.encode())


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise LocalProtocolError("the cursor is not one of this list", hint="use the value of `next`") from None
