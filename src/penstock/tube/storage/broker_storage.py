"""Directory of a broker: the stores of its topics, group offsets, staged rows, and one commit over all of them.

``` <directory>/lock                          held while a process uses the directory <directory>/meta/
LMDB: offsets of groups, the configuration the master pushed <directory>/log/<topic>-<store>/          segments of one
store <directory>/staging/                      staged rows, one file per attempt ```
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import StorageError
from penstock.runtime.io.clock import boot_id
from penstock.runtime.io.directory_lock import DirectoryLock
from penstock.runtime.io.files import DirectFiles, Files
from penstock.tube.storage.meta import GroupOffset, MetaStore
from penstock.tube.storage.recovery import Loss, Recovery
from penstock.tube.storage.segment import Segment
from penstock.tube.storage.staging_store import StagedWrite, StagingDirectory, write_staged
from penstock.tube.storage.store import LogWrite, Store, StoreLimits

__all__ = ["RUNNING", "BrokerStorage", "StorageCommit"]

RUNNING = "running"
_REMOVING = "removing/"

_STORE_NAME = re.compile(r"(\w+)-(\d+)", re.ASCII)


class StorageCommit:
    """Work of one commit. The loop's thread fills it, then only the committing thread reads it."""

    __slots__ = (
        "config",
        "early_notes",
        "expired",
        "notes",
        "offsets",
        "removed_topics",
        "staged",
        "unstaged",
        "works",
    )

    def __init__(self) -> None:
        self.early_notes: dict[str, bytes | None] = {}
        """Notes that must be durable before the log is written."""
        self.notes: dict[str, bytes | None] = {}
        self.works: list[tuple[Store, LogWrite, bool]] = []
        """Triples of store, work to write, and whether the work must be synced (durability "durable")."""
        self.offsets: list[GroupOffset] = []
        self.config: bytes | None = None
        self.expired: list[tuple[Store, list[Segment]]] = []
        self.removed_topics: list[tuple[str, list[Store]]] = []
        """Topic and its stores, from `BrokerStorage.forget`."""
        self.staged: list[StagedWrite] = []
        """Staged rows; durable before the notes."""
        self.unstaged: list[Path] = []
        """Files of staged rows that are removed once the notes are durable."""

    @property
    def only_appends(self) -> bool:
        """Whether the commit only appends to the logs of messages and of offsets."""
        return not (
            self.early_notes or self.notes or self.config is not None
            or self.expired or self.removed_topics or self.staged or self.unstaged
        )  # fmt: skip


class BrokerStorage:
    """The storage of one broker. The log is written through ``files``; offsets are in LMDB."""

    def __init__(
        self,
        directory: Path,
        *,
        files: Files | None = None,
        limits: StoreLimits | None = None,
        on_loss: Callable[[Loss], None] = lambda _: None,
        without_meta: bool = False,
        open_meta: Callable[[Path], MetaStore] | None = None,
    ) -> None:
        """Open the directory. Raises UnavailableError if it is in use, StorageError if unusable or without ``meta``.

        ``on_loss`` is called with every loss when it is found. ``without_meta``: continue without ``meta``.
        ``open_meta``: ``files`` and ``meta`` are not on the disk of this machine, so no directory is created or locked.
        """
        self.directory = directory
        self.files = files or DirectFiles()
        self.limits = limits or StoreLimits()
        self.recovery = Recovery()
        """Sum of the recovery reports of all opened stores."""
        self.stores: dict[tuple[str, int], Store] = {}
        self.staging_files = StagingDirectory(self.files, directory / "staging")
        """Staged rows."""
        self._log = directory / "log"
        self._on_loss = on_loss
        self._removing: set[str] = set()
        self._removal = threading.Lock()
        self._held: list[Callable[[], None]] | None = None
        """Removals of files that wait while :meth:`hold_files` is in force; None: they do not wait."""
        self._ran = False
        self._lock: DirectoryLock | None = None
        if open_meta is None:
            self._lock = DirectoryLock(directory)
        noted = open_meta is not None or (directory / "meta").is_dir()
        try:
            if not noted and not without_meta and self.existing_stores():
                raise StorageError(
                    f"tube: {directory} has lost its directory meta",
                    path=str(directory / "meta"),
                    why="it contains messages, but the offsets of the consumer groups are lost",
                    hint="restore the whole directory from one copy; or, to continue with the messages alone: "
                    f"penstock tube broker fsck {directory} --repair",
                )
            self.meta = (open_meta or MetaStore)(directory / "meta")
        except BaseException:
            self._unlock()
            raise
        try:
            self.notes = self.meta.notes()
            """Notes at the time of opening."""
            self.unclean = _previous(self.notes.get(RUNNING))
            """State of the last process if it did not close the directory; otherwise None."""
            self._clean = noted and self.unclean is None
            for name in [name for name in self.notes if name.startswith(_REMOVING)]:
                # The removal of a topic was interrupted: complete it.
                self._remove_files(name.removeprefix(_REMOVING))
                self.meta.commit([], notes={name: None})
        except BaseException:
            self.meta.close()
            self._unlock()
            raise

    def existing_stores(self) -> list[tuple[str, int]]:
        """Topic and number of every store that has a directory."""
        matches = map(_STORE_NAME.fullmatch, self.files.names(self._log))
        return [(match[1], int(match[2])) for match in matches if match]

    def open_store(self, topic: str, number: int, *, deep: bool = False) -> Store:
        """Open a store; the first time it is recovered (``deep``: every segment is read).

        Raises StorageError if the disk fails.
        """
        store = self.stores.get((topic, number))
        if store is None:
            if topic in self._removing:
                raise StorageError(f"tube: topic {topic} is being removed", hint="try again in a moment")
            try:
                directory = self._log / f"{topic}-{number}"
                store = Store(
                    self.files, directory, number, limits=self.limits, deep=deep, clean=self._clean,
                    on_loss=self._on_loss,
                )  # fmt: skip
            except OSError as error:
                raise StorageError(
                    f"tube: store {number} of topic {topic} cannot be opened: {error.strerror}",
                    path=str(error.filename or self._log),
                ) from error
            self.stores[topic, number] = store
            self.recovery.add(store.recovery)
        return store

    def forget(self, topic: str) -> list[Store]:
        """Remove a topic's stores from the open ones and return them; a commit removes their files."""
        self._removing.add(topic)
        return [self.stores.pop(key) for key in list(self.stores) if key[0] == topic]

    def is_removing(self, topic: str) -> bool:
        """Return True until the commit after :meth:`forget` has removed the files of ``topic``."""
        return topic in self._removing

    def commit(self, commits: Sequence[StorageCommit]) -> None:
        """Write all works, sync as required, then store the offsets. Called in the committing thread; raises
        StorageError or OSError.

        Offsets come last, so that a group is never beyond the end of the stored log.
        """
        if any(commit.early_notes for commit in commits):
            self.meta.commit([], notes=_merged(commit.early_notes for commit in commits))
        last: dict[Store, LogWrite] = {}
        appends = True
        for commit in commits:
            appends = appends and commit.only_appends and not commit.offsets
            for store, work, sync in commit.works:
                store.write(work)
                # Work without writes (expired segments) does not replace earlier work with writes.
                if sync and work.pieces:
                    last[store] = work
        for store, work in last.items():
            store.sync(work)
        if appends:
            return
        staged = [work for commit in commits for work in commit.staged]
        if staged:
            write_staged(self.files, self.staging_files.directory, staged)
        offsets = [offset for commit in commits for offset in commit.offsets]
        configs = [commit.config for commit in commits if commit.config is not None]
        notes = _merged(commit.notes for commit in commits)
        for commit in commits:
            for topic, _ in commit.removed_topics:
                notes[_REMOVING + topic] = b"1"
        if offsets or configs or notes:
            self.meta.commit(offsets, configs[-1] if configs else None, notes)
        for commit in commits:
            for path in commit.unstaged:
                # Not synced: a file that returns after a power loss is recognized by the notes.
                self._remove_unless_held(partial(self.files.remove, path))
            for store, segments in commit.expired:
                self._remove_unless_held(partial(store.remove, segments))
            for topic, stores in commit.removed_topics:
                for store in stores:
                    store.abandon()
                self._remove_files(topic)
                self.meta.commit([], notes={_REMOVING + topic: None})
                self._removing.discard(topic)

    def hold_files(self) -> None:
        """Keep expired segments and decided staged rows until :meth:`release_files`, so that they can be copied. Call
        while no commit runs; files of a deleted topic are not kept."""
        self._held = []

    def release_files(self) -> None:
        """Remove the files that were kept. Blocks; from any thread. Raises OSError."""
        with self._removal:
            held, self._held = self._held or [], None
            for remove in held:
                remove()

    def _remove_unless_held(self, remove: Callable[[], None]) -> None:
        with self._removal:  # in order: no newer segment before an older one
            if self._held is not None:
                self._held.append(remove)
            else:
                remove()

    def _remove_files(self, topic: str) -> None:
        for name, number in self.existing_stores():
            if name == topic:
                directory = self._log / f"{name}-{number}"
                for entry in self.files.names(directory):
                    self.files.remove(directory / entry)
                self.files.sync_dir(directory)

    def run(self, state: dict[str, Any]) -> None:
        """Mark the directory as in use, with ``state``: the next process gets it as `unclean` unless this one closes
        the directory."""
        self.meta.commit([], notes={RUNNING: json.dumps({**state, "boot": boot_id() or ""}).encode()})
        self._ran = True

    def close(self, *, clean: bool) -> None:
        """Close all files. ``clean`` False, after a failed commit: the files are not modified."""
        try:
            for store in self.stores.values():
                if clean:
                    store.close()
                else:
                    store.abandon()
            if clean and self._ran:
                self.meta.commit([], notes={RUNNING: None})
        finally:
            self.stores.clear()
            self.meta.close()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _previous(note: bytes | None) -> dict[str, Any] | None:
    return None if note is None else dict(json.loads(note))


def _merged(notes: Iterable[Mapping[str, bytes | None]]) -> dict[str, bytes | None]:
    return {name: value for part in notes for name, value in part.items()}
