"""Keys of a standby in memory, so that a takeover does not have to load them.

A standby loads the keys once, and then applies each commit of the active node to them as well as to its environment.
When it is elected, the storage of the new active node uses them if its environment has the same last commit. Otherwise
it loads the keys, as after a restart.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Final

import lmdb

from penstock.runtime.io.commit_log import CommitLog, LogPosition, decode_position
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import RowChanges
from penstock.statestore.engine.record import Record, decode_record, digest_of
from penstock.statestore.service.rows import CHANGES, FENCES, KEYS, META, decode_clock
from penstock.statestore.service.storage import Storage, StoredState

__all__ = ["PreloadedKeys", "PreloadedStorage"]

_log = logging.getLogger("penstock.statestore")

_EMPTY: Final = StoredState([], None, [], [], None, None)
_META: Final = {b"clock", b"floor"}
"""Rows of ``meta`` that are followed. The others are those of a node without a cluster, and of the environment."""


class PreloadedKeys:
    """The keys of one standby. Call :meth:`open`, then :meth:`apply` after each commit, in one thread at a time."""

    def __init__(self) -> None:
        self._position: LogPosition | None = None
        """The last commit that was applied; None: they cannot be used."""
        self._state = _EMPTY
        """The stored state without records and fences."""
        self._records: dict[bytes, Record] = {}
        """By digest of the key."""
        self._fences: dict[bytes, Record] = {}
        """By digest of the prefix."""

    def open(self, environment: LoggedEnvironment) -> None:
        """Open ``environment``, and load its keys.

        Raises:
            StorageError: see :meth:`Storage.open`.
        """
        state = Storage(environment.path, environment=environment).open()
        for name in state.quarantined:  # counted at the takeover as well, unless the environment is opened again before
            _log.error("quarantined path=%s name=%s: checksum does not match", environment.path, name)
        self._records = {digest_of(record.key): record for record in state.records}
        self._fences = {digest_of(prefix): Record(prefix, b"", token) for prefix, token in state.fences}
        self._state = state._replace(records=[], fences=[])
        self._position = environment.read(partial(_last_commit, environment))

    def apply(self, body: bytes, position: LogPosition) -> None:
        """Apply the commit ``body``, which the environment contains at ``position``."""
        if self._position is None or position.sequence != self._position.sequence + 1:
            self.clear()
            return
        self._position = None  # until everything of the commit is applied
        is_complete = True
        changes = RowChanges()
        changes.add(body)
        for table, rows in ((KEYS, self._records), (FENCES, self._fences)):
            for digest, stored in changes.tables.get(table, {}).items():
                if stored is None:
                    rows.pop(digest, None)
                elif (record := decode_record(stored)) is not None:
                    rows[digest] = record
                else:  # of a later version: loading the keys reports it
                    is_complete = False
        meta, state = changes.tables.get(META, {}), self._state
        if not meta.keys() <= _META or not changes.drops.keys() <= {CHANGES}:  # no active node writes others
            is_complete = False
        self._state = state._replace(
            clock=decode_clock(meta[b"clock"]) if b"clock" in meta else state.clock,
            floor=decode_clock(meta[b"floor"]) if b"floor" in meta else state.floor,
        )
        if is_complete:
            self._position = position

    def clear(self) -> None:
        """Release the memory; they cannot be used any more."""
        self._position = None
        self._state, self._records, self._fences = _EMPTY, {}, {}

    def state_at(self, position: LogPosition | None) -> StoredState | None:
        """Return the state if its last commit is that at ``position``; otherwise None."""
        if position is None or position != self._position:
            return None
        fences = [(fence.key, fence.version) for fence in self._fences.values()]
        return self._state._replace(records=[*self._records.values()], fences=fences)


class PreloadedStorage(Storage):
    """The storage in the directory ``path`` of an elected node, with the log ``log`` and the ``keys`` of its standby;
    None: there was none."""

    def __init__(self, path: Path, log: CommitLog, keys: PreloadedKeys | None) -> None:
        super().__init__(path, log=log)
        self._keys = keys

    def open(self) -> StoredState:
        """Open, and load the keys unless they are preloaded [Storage]."""
        environment, keys = self.environment, self._keys
        self._keys = None

        def load(transaction: lmdb.Transaction[bytes]) -> StoredState:
            state = None if keys is None else keys.state_at(_last_commit(environment, transaction))
            if state is None:
                return self._load(transaction)
            _log.info("the keys were loaded before the election", extra={"fields": {"keys": len(state.records)}})
            return state

        try:
            return environment.open(load)
        finally:
            if keys is not None:
                keys.clear()  # otherwise it would keep the records of now, after they have been replaced


def _last_commit(environment: LoggedEnvironment, transaction: lmdb.Transaction[bytes]) -> LogPosition | None:
    stored = transaction.get(b"log", db=environment.tables["meta"])
    return None if stored is None else decode_position(stored)
