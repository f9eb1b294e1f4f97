"""The log of changes as a whole: who reads it, from where on, and what of it nobody reads any more.

It lies in the storage, written in the commits that make the changes. Two read it: the history in memory (observations
that resume, GET as of a version), which needs its end on start, and change capture, which goes on where its topic ends,
and reads what it could not keep in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from penstock.errors import StorageError
from penstock.statestore.engine.history import History
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.store import Engine
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.interfaces import Capture, LogPage, LogTail
from penstock.statestore.service.storage import Storage

__all__ = ["ChangeLog"]

_log = logging.getLogger("penstock.statestore")


class ChangeLog:
    """Call everything in the loop's thread. ``trim(version)``: drop the log up to there with the next commit."""

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
        self._tell_trim = trim
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self, floor: Hlc | None) -> None:
        """Take the log up where it ended (complete after ``floor``), or end it where nothing reads it any more.

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
            if self._capture.last > engine.clock:  # versions were repaired; what is captured twice is better than lost
                self._capture.rewind(start)
            last = self._capture.last
            tail = LogTail(0, last) if is_new else await asyncio.to_thread(storage.log_after, last)
            self._capture.resume(tail, self._read, self._trim)

    def logged(self, changes: Sequence[Change]) -> None:
        """Changes are in the log on disk: what reads the log may go on, and its start is dropped now and then."""
        if self._capture is not None:
            self._capture.take(changes)
        elif self._engine.history is not None:
            self._trim(self._engine.history.floor)

    async def close(self) -> None:
        """Nobody reads any more when this returns."""
        self._closed = True
        if self._reading is not None:
            await self._reading

    def _trim(self, done: Hlc) -> None:
        """Changes up to ``done`` are captured: drop what nobody reads any more."""
        history = self._engine.history
        self._tell_trim(done if history is None else min(done, history.floor))

    def _read(self, version: Hlc, done: Callable[[LogPage | StorageError], None]) -> None:
        if not self._closed:
            self._reading = asyncio.create_task(self._read_and_tell(version, done), name="state store log")

    async def _read_and_tell(self, version: Hlc, done: Callable[[LogPage | StorageError], None]) -> None:
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
