"""The keys of the state store on disk: one LMDB environment, one writer, every value checksummed.

Three databases inside it: ``keys`` (digest of the key -> record), ``meta`` (``schema``, ``clock``) and ``quarantine``
(what did not pass its checksum, kept for whoever wants to look). A commit is one transaction: all of it or nothing.

What a commit promises depends on the durability: ``durable`` = fsynced; ``flushed`` and ``memory`` = written to the
page cache, fsynced when the kernel likes and on :meth:`Storage.close`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

import lmdb

from penstock.errors import StorageError
from penstock.runtime.durability import Durability
from penstock.statestore.hlc import Hlc
from penstock.statestore.record import Change, Record, decode_record, digest_of, encode_record

__all__ = ["SCHEMA", "Recovered", "Storage"]

SCHEMA: Final = 1
"""Layout of the databases; a newer one is refused, an older one would be converted here."""

_INITIAL_MAP_BYTES: Final = 1 << 30
"""Address space, not disk: the file grows with its content. Doubled whenever it is full."""

_SCHEMA: Final = Struct(">I")
_CLOCK: Final = Struct(">QQI")  # wall clock, counter, crc32 of both

# LMDB must not be opened twice in one process: its locks belong to the process, and closing one frees both.
_open_paths: set[Path] = set()


class Recovered(NamedTuple):
    """What was found on start. ``quarantined`` are the digests (hex) of values that did not pass their checksum."""

    records: list[Record]
    clock: Hlc | None
    quarantined: list[str]


class Storage:
    """The LMDB environment in the directory ``path``; made where it does not exist."""

    def __init__(
        self, path: Path, durability: Durability = Durability.DURABLE, *, map_bytes: int = _INITIAL_MAP_BYTES
    ) -> None:
        self.path = path.resolve()
        self._durability = durability
        self._map_bytes = map_bytes
        self._env: lmdb.Environment | None = None

    def open(self) -> Recovered:
        """Open, check the schema and load everything.

        Raises:
            StorageError: already open in this process, made by a newer version, or not readable as a whole.
        """
        if self.path in _open_paths:
            raise StorageError(
                f"state store {self.path} is already open in this process",
                path=str(self.path),
                why="an LMDB environment may be opened once per process",
                do="use the store that is open, or another directory",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            env = self._env = lmdb.open(
                str(self.path),
                map_size=self._map_bytes,
                max_dbs=3,
                sync=self._durability is Durability.DURABLE,
                writemap=False,
            )
            _open_paths.add(self.path)
            # A reopened environment keeps the size that it had grown to.
            self._map_bytes = max(self._map_bytes, env.info()["map_size"])
            self._keys = env.open_db(b"keys")
            self._meta = env.open_db(b"meta")
            self._quarantine = env.open_db(b"quarantine")
            return self._load(env)
        except StorageError:
            self.close()
            raise
        except (lmdb.Error, OSError) as error:
            self.close()
            raise StorageError(
                f"state store {self.path} cannot be opened: {error}",
                path=str(self.path),
                do="look at the disk and the permissions, or restore the directory from a copy",
            ) from error

    def commit(self, changes: Sequence[Change]) -> None:
        """Write ``changes``, given in the order of their versions, as one transaction.

        Raises:
            StorageError: nothing of it is known to be on disk.
        """
        if not changes:
            return
        # Of several changes to a key only the last is worth a write.
        last = {change.key: change for change in changes}
        puts = [(digest_of(key), encode_record(c.record)) for key, c in last.items() if c.record is not None]
        deletes = [digest_of(key) for key, c in last.items() if c.record is None]
        version = changes[-1].version
        clock = _CLOCK.pack(version.wall_ms, version.counter, _clock_checksum(version))
        while True:
            try:
                self._write(puts, deletes, clock)
                return
            except lmdb.MapFullError:
                self._grow()
            except lmdb.Error as error:
                raise StorageError(
                    f"state store {self.path}: commit of {len(changes)} changes failed: {error}",
                    path=str(self.path),
                    why="the operating system refused a write or an fsync; nothing of it counts as written",
                    do="look at the disk (space, health), then restart: what was acknowledged is kept",
                ) from error

    def close(self) -> None:
        """Make everything durable and close; may be called twice."""
        env, self._env = self._env, None
        if env is None:
            return
        _open_paths.discard(self.path)
        try:
            env.sync(True)  # noqa: FBT003 - LMDB's own signature
        except lmdb.Error as error:
            raise StorageError(f"state store {self.path}: fsync failed: {error}", path=str(self.path)) from error
        finally:
            env.close()

    def _write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes], clock: bytes) -> None:
        assert self._env is not None, "open() comes first"
        with self._env.begin(write=True) as transaction:
            transaction.cursor(db=self._keys).putmulti(puts)
            for digest in deletes:
                transaction.delete(digest, db=self._keys)
            transaction.put(b"clock", clock, db=self._meta)

    def _grow(self) -> None:
        assert self._env is not None
        self._map_bytes *= 2
        self._env.set_mapsize(self._map_bytes)

    def _load(self, env: lmdb.Environment) -> Recovered:
        with env.begin(write=True) as transaction:
            schema = transaction.get(b"schema", db=self._meta)
            if schema is None:
                transaction.put(b"schema", _SCHEMA.pack(SCHEMA), db=self._meta)
            elif len(schema) != _SCHEMA.size or _SCHEMA.unpack(schema)[0] > SCHEMA:
                raise StorageError(
                    f"state store {self.path} has schema {schema.hex()}, this version reads up to {SCHEMA}",
                    path=str(self.path),
                    why="a newer version of penstock has written it",
                    do="start that version, or restore the directory from a copy",
                )
            records: list[Record] = []
            corrupt: list[tuple[bytes, bytes]] = []
            for digest, stored in transaction.cursor(db=self._keys):
                record = decode_record(stored)
                if record is not None:
                    records.append(record)
                else:
                    corrupt.append((digest, stored))
            for digest, stored in corrupt:
                transaction.put(digest, stored, db=self._quarantine)
                transaction.delete(digest, db=self._keys)
            clock = _decode_clock(transaction.get(b"clock", db=self._meta))
        return Recovered(records, clock, [digest.hex() for digest, _ in corrupt])


def _decode_clock(stored: bytes | None) -> Hlc | None:
    """The clock in ``stored``; None where it is absent or damaged: the versions of the keys then have to do."""
    if stored is None or len(stored) != _CLOCK.size:
        return None
    wall, counter, checksum = _CLOCK.unpack(stored)
    clock = Hlc(wall, counter, "")
    return clock if checksum == _clock_checksum(clock) else None


def _clock_checksum(clock: Hlc) -> int:
    return crc32(b"%d:%d" % (clock.wall_ms, clock.counter))
