"""The log of changes: its readers, their start versions, and its trimming.

The storage writes it in the commits of the changes. It has two readers: the history in memory (for observations that
resume, and GET as of a version), which loads its tail at the start; and change capture, which continues after the last
record of its topic and reads changes that it did not keep in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from penstock.errors import StorageError
from penstock.statestore.engine.observers import History
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.store import Engine
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.interfaces import Capture, LogPage, LogTail
from penstock.statestore.service.storage import Storage

__all__ = ["ChangeLog"]

_log = logging.getLogger("penstock.statestore")


class ChangeLog:
    """The change log of a store, used in the event loop's thread. ``trim(version)``: trim with the next commit."""

    def __init__(
        self,
        storage: Storage,
        engine: Engine,
        options: StoreOptions,
        capture: Capture | None,
        trim: Callable[[Hlc], None],
    ) -> None:
        self.wanted = options.keeps_history or capture is not None
        """Whether changes are logged."""
        self._storage = storage
        self._engine = engine
        self._options = options
        self._capture = capture
        self._trim_storage = trim
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self, floor: Hlc | None) -> None:
        """Continue the log, which is complete after ``floor``, or remove it if it has no readers.

        Raises:
            StorageError: the storage cannot be read or written.
        """
        storage, engine = self._storage, self._engine
        if not self.wanted:
            if floor is not None:
                storage.end_log()
            return
        is_new = floor is None
        start = floor or engine.clock
        if floor is None:
            floor = engine.clock
            storage.trim(floor)
        if self._options.keeps_history:
            engine.history = History(floor, self._options.history_changes, self._options.history_bytes)
            complete = is_new
            while not complete:
                page = await self._page(floor)
                engine.history.restore(page.changes)
                floor, complete = page.through, page.complete
        if self._capture is not None:
            if self._capture.last > engine.clock:  # after a repair of versions: capture changes twice
                self._capture.rewind(start)
            last = self._capture.last
            tail = LogTail(0, last) if is_new else await asyncio.to_thread(storage.log_after, last)
            self._capture.resume(tail, self._read, self._trim)

    def logged(self, changes: Sequence[Change]) -> None:
        """Pass changes that are in the log on disk to its readers, and trim the log."""
        if self._capture is not None:
            self._capture.append(changes)
        elif self._engine.history is not None:
            self._trim(self._engine.history.floor)

    async def close(self) -> None:
        """Wait for the reads in progress; no further ones begin."""
        self._closed = True
        if self._reading is not None:
            await self._reading

    def _trim(self, done: Hlc) -> None:
        """Trim the log up to ``done``, unless the history still needs it."""
        history = self._engine.history
        self._trim_storage(done if history is None else min(done, history.floor))

    def _read(self, version: Hlc, done: Callable[[LogPage | StorageError], None]) -> None:
        if not self._closed:
            self._reading = asyncio.create_task(self._read_page(version, done), name="state store log")

    async def _read_page(self, version: Hlc, done: Callable[[LogPage | StorageError], None]) -> None:
        try:
            page = await self._page(version)
        except StorageError as error:
            done(error)
        else:
            done(page)

    async def _page(self, version: Hlc) -> LogPage:
        page = await asyncio.to_thread(self._storage.changes_after, version)
        for name in page.damaged:
            _log.error("left out path=%s change=%s: checksum does not match", self._storage.path, name)
        return page
