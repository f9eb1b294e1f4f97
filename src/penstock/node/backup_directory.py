"""Backups on disk: a directory with one complete backup per subdirectory, and the restore of one.

``<directory>/2026-11-26T21-30-00Z/manifest.json`` lists the files next to it, with size and SHA-256. Unchanged files of
the log are hard links to those of the backup before, so each backup is complete and can be removed or copied alone. The
subdirectory gets its name when everything in it is on disk: one that ends with ``.partial`` is of an interrupted
backup, and the next backup removes it.

In an encrypted backup each file but the manifest is a file of age (decision 135), with the end ``.age``. The manifest
has the checksums of the encrypted files, so that a host without the key can add backups and verify them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from penstock.errors import OutOfSpaceError, PenstockError, RefusedError, RemoteProtocolError, StorageError
from penstock.node.backup import BLOCK, Item, checksum_of, environment_kind, open_environment
from penstock.node.backup_encryption import SUFFIX, EncryptedFile, Recipients, decrypt
from penstock.node.data_dir import FORMAT, RESTORING
from penstock.runtime.io.directory_lock import DirectoryLock
from penstock.runtime.io.files import NO_SPACE, DirectFiles, Durability, free_space_text
from penstock.tube.storage.broker_storage import RUNNING
from penstock.tube.storage.meta import MetaStore
from penstock.tube.storage.notes import RESTORED

if TYPE_CHECKING:
    from penstock.node.backup_encryption import Identity

__all__ = [
    "MANIFEST",
    "BackupReceiver",
    "Manifest",
    "Received",
    "Restored",
    "check_identities",
    "find_backup",
    "list_backups",
    "read_manifest",
    "restore",
    "verify",
]

MANIFEST: Final = "manifest.json"
_PARTIAL: Final = ".partial"
_INTERLEAVED: Final = ("/rows", "/commits")
_NAME: Final = re.compile(r"(\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}Z)(?:-(\d+))?")
_ENCRYPTED_FORMAT: Final = 2
"""Version of the manifest of an encrypted backup, which earlier versions cannot restore."""
_PIECE_BYTES: Final = 1 << 20


class _StoredFile(NamedTuple):
    """A file of a backup; ``size``, ``mtime_ns`` and ``mode`` of the original, checksum and size of the stored file,
    which is another one if it is encrypted."""

    size: int
    mtime_ns: int
    mode: int
    sha256: str
    stored_bytes: int


class Manifest(NamedTuple):
    """Contents of a backup. ``path``: its directory."""

    path: Path
    version: str
    point_at: int
    pause_ms: float
    directory: Mapping[str, Any] | None
    """Content of ``format.json``; None for a broker in its own process."""
    environments: Mapping[str, Mapping[str, Any]]
    brokers: Sequence[str]
    files: Mapping[str, _StoredFile]
    recipients: tuple[str, ...]
    """The public keys that it is encrypted to; empty: it is not encrypted."""

    @property
    def size(self) -> int:
        """Bytes of all files before encryption."""
        return sum(file.size for file in self.files.values())

    @property
    def parts(self) -> set[str]:
        """Names of the files with the operations of environments."""
        return {f"{name}{kind}" for name in self.environments for kind in _INTERLEAVED}

    @property
    def restored_bytes(self) -> int:
        """Bytes that a restore needs at most: also the largest file of operations, if it is decrypted next to them."""
        sizes = [self.files[name].size for name in self.parts & self.files.keys()]
        return self.size + (max(sizes, default=0) if self.recipients else 0)

    def path_of(self, name: str) -> Path:
        """The stored file ``name``."""
        return self.path / (name + SUFFIX if self.recipients else name)


class Received(NamedTuple):
    """Result of a backup. ``copied_bytes`` were received, ``linked_bytes`` were in an earlier backup."""

    manifest: Manifest
    copied_bytes: int
    linked_bytes: int
    removed: Sequence[Path]


class Restored(NamedTuple):
    """Result of a restore."""

    manifest: Manifest
    path: Path


def list_backups(directory: Path) -> list[Path]:
    """The complete backups in ``directory``, oldest first."""
    found = (path.parent for path in directory.glob(f"*/{MANIFEST}"))
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_order)


def _order(backup: Path) -> tuple[str, int]:
    """Time and number in the name of a backup."""
    match = _NAME.fullmatch(backup.name)
    assert match is not None
    return match[1], int(match[2] or 1)


def find_backup(path: Path) -> Path:
    """``path`` if it is a backup, else the newest backup in it.

    Raises:
        StorageError: there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    found = list_backups(path) if path.is_dir() else []
    if not found:
        raise StorageError(
            f"{path} contains no backup",
            path=str(path),
            why=f"neither it nor a directory in it has a {MANIFEST}" if path.is_dir() else "it is not a directory",
            hint="set the directory of `penstock backup DIR`, or one of the backups in it",
        )
    return found[-1]


def read_manifest(backup: Path) -> Manifest:
    """Read and check the manifest of a backup.

    Raises:
        StorageError: it is damaged, or of a newer version.
    """
    path = backup / MANIFEST
    try:
        stored: Any = json.loads(path.read_bytes())
        version = stored["format"]
        if isinstance(version, int) and version > _ENCRYPTED_FORMAT:
            raise StorageError(
                f"{backup} has backup format {version}, this version reads up to {_ENCRYPTED_FORMAT}",
                path=str(path),
                why=f"penstock {stored.get('version')} wrote it",
                hint="restore it with that version",
            )
        if stored["sha256"] != _digest(stored):
            raise ValueError("its checksum does not match")
        recipients = tuple(stored["recipients"]) if version == _ENCRYPTED_FORMAT else ()
        # Without encryption the stored file has the size of the original.
        files = {name: _StoredFile(*row, *(() if recipients else row[:1])) for name, row in stored["files"].items()}
        for name in (*files, *stored["environments"], *stored["brokers"]):
            _checked_name(name)
        return Manifest(
            backup, str(stored["version"]), int(stored["point_at"]), float(stored["pause_ms"]), stored["directory"],
            stored["environments"], stored["brokers"], files, recipients,
        )  # fmt: skip
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RemoteProtocolError) as error:
        raise StorageError(
            f"{path} is damaged",
            path=str(path),
            why=str(error) or repr(error),
            hint="use another backup in the directory",
        ) from error


def verify(manifest: Manifest, *, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """Read every file of a backup; return what is wrong, one line for each damaged file."""
    found = []
    for name, file in manifest.files.items():
        path = manifest.path_of(name)
        try:
            size, digest = _hash(path, progress)
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
            continue
        if size != file.stored_bytes:
            found.append(f"{path}: {size} bytes instead of {file.stored_bytes}")
        elif digest != file.sha256:
            found.append(f"{path}: its SHA-256 does not match")
    return found


# Receive


class BackupReceiver:
    """Writes the items of a backup into a new subdirectory of ``directory``. Context manager.

    Leaving the block before :meth:`finish` removes what was written; earlier backups are never changed.
    """

    def __init__(self, directory: Path, recipients: Recipients | None = None) -> None:
        """Create ``directory``, lock it and remove the rest of interrupted backups.

        ``recipients``: encrypt the backup to them.

        Raises:
            StorageError: it cannot be used.
            UnavailableError: another backup is written to it.
        """
        self._directory = directory
        self._recipients = recipients
        if directory.is_dir() and not (directory / "lock").exists() and any(directory.iterdir()):
            raise StorageError(
                f"{directory} is not a directory of backups",
                path=str(directory),
                why="it contains other files",
                hint="choose an empty or a new directory",
            )
        self._lock = DirectoryLock(directory, "directory of backups")
        for rest in directory.glob(f"*{_PARTIAL}"):
            shutil.rmtree(rest, ignore_errors=True)
        self._partial = directory / f"{os.getpid()}{_PARTIAL}"
        self._previous: Manifest | None = None
        for backup in reversed(list_backups(directory)):
            with contextlib.suppress(StorageError):  # a damaged one: everything is copied again
                previous = read_manifest(backup)
                # Files that other keys decrypt are no part of this backup.
                if previous.recipients == (() if recipients is None else recipients.names):
                    self._previous = previous
                break
        self._open: dict[str, EncryptedFile | _PlainFile] = {}
        self._closed: dict[str, EncryptedFile | _PlainFile] = {}
        self._sizes: dict[str, int] = {}
        self._end: Mapping[str, Any] | None = None
        self.copied_bytes = 0

    def __enter__(self) -> BackupReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            with contextlib.suppress(OSError):  # it is removed; the error of a write was reported
                file.close()
        shutil.rmtree(self._partial, ignore_errors=True)
        self._lock.close()

    @property
    def have(self) -> dict[str, list[int]]:
        """Size and time of the last change of the files of the newest backup that still have their size."""
        if self._previous is None:
            return {}
        found = {}
        for name, file in self._previous.files.items():
            with contextlib.suppress(OSError):
                if self._previous.path_of(name).stat().st_size == file.stored_bytes:
                    found[name] = [file.size, file.mtime_ns]
        return found

    def take(self, item: Item) -> None:
        """Write an item.

        Raises:
            StorageError: it cannot be written.
            RemoteProtocolError: it is damaged or out of order.
            RefusedError: the node reports an error.
        """
        header = item.header
        try:
            if (name := header.get("file")) is not None:
                self._write(_checked_name(name), header["at"], header["crc"], item.payload)
            elif (error := header.get("error")) is not None:
                raise RefusedError(str(error.get("what")), code=0, why=error.get("why"), hint=error.get("hint"))
            elif "end" in header:
                if header.get("crc") not in (None, checksum_of(header["end"])):  # None: of an earlier version
                    raise RemoteProtocolError("the backup stream is damaged at its end")
                self._end = header["end"]
        except OSError as error:
            raise _cannot_write(self._directory, error) from error

    def _write(self, name: str, at: int, crc: int, data: bytes) -> None:
        if crc32(data) != crc or at != self._sizes.get(name, 0):
            raise RemoteProtocolError(f"the backup stream is damaged at byte {at} of {name}")
        file = self._open.get(name)
        if file is None:
            if name in self._closed:
                raise RemoteProtocolError(f"the backup stream is damaged: it has {name} again")
            # Files come one after the other, except for the two of an environment, whose commits end after the point.
            for other in [other for other in self._open if not other.endswith(_INTERLEAVED)]:
                self._close_file(other)
            path = self._partial / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            file = _PlainFile(path) if self._recipients is None else EncryptedFile(_encrypted(path), self._recipients)
            self._open[name] = file
        file.write(data)
        self._sizes[name] = at + len(data)
        self.copied_bytes += len(data)

    def finish(self, *, keep: int | None = None) -> Received:
        """Complete the backup, durably; then remove the oldest ones until ``keep`` are left.

        Raises:
            StorageError: it cannot be written.
            RemoteProtocolError: the stream ended early.
        """
        end = self._end
        if end is None:
            raise RemoteProtocolError(
                "the backup is not complete: the node ended the transfer", why="it was stopped, or the connection broke"
            )
        try:
            return self._finish(end, keep)
        except OSError as error:
            raise _cannot_write(self._directory, error) from error

    def _finish(self, end: Mapping[str, Any], keep: int | None) -> Received:
        self._close_files()
        self._partial.mkdir(exist_ok=True, mode=0o750)
        previous = {} if self._previous is None else self._previous.files
        files: dict[str, _StoredFile] = {}
        linked = 0
        for name, (size, mtime_ns, mode) in end["files"].items():
            if name in self._sizes:
                if self._sizes[name] != size:
                    raise RemoteProtocolError(f"the backup stream has {self._sizes[name]} of {size} bytes of {name}")
                written = self._closed[name]
                digest, stored_bytes = written.sha256, written.stored_bytes
            else:
                stored = previous.get(_checked_name(name))
                if stored is None or self._previous is None or stored.size != size:
                    raise RemoteProtocolError(f"the backup stream lacks {name}")
                _link(self._previous.path_of(name), self._path_of(name))
                digest, stored_bytes = stored.sha256, stored.stored_bytes
                linked += size
            files[name] = _StoredFile(size, mtime_ns, mode, digest, stored_bytes)
        for name in self._sizes.keys() - files.keys():
            self._path_of(name).unlink()
            self.copied_bytes -= self._sizes[name]
        if self._recipients is None:
            stored_end = {**end, "files": {name: list(row[:-1]) for name, row in files.items()}}
        else:
            stored_end = {
                **end,
                "format": _ENCRYPTED_FORMAT,
                "recipients": self._recipients.names,
                "files": {name: list(row) for name, row in files.items()},
            }
        _write_durably(self._partial / MANIFEST, {**stored_end, "sha256": _digest(stored_end)})
        disk = DirectFiles()
        for folder, _, _ in os.walk(self._partial, topdown=False):
            disk.sync_dir(Path(folder))
        final = self._new_name(int(end["point_at"]))
        self._partial.rename(final)
        disk.sync_dir(self._directory)
        removed = []
        if keep is not None:
            for old in list_backups(self._directory)[:-keep]:
                # Renamed first: an interrupted removal must not leave a backup that looks complete.
                gone = old.rename(old.with_name(old.name + _PARTIAL))
                shutil.rmtree(gone)
                removed.append(old)
        return Received(read_manifest(final), self.copied_bytes, linked, removed)

    def _new_name(self, point_at: int) -> Path:
        name = datetime.fromtimestamp(point_at / 1000, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
        time, number = max(map(_order, list_backups(self._directory)), default=("", 1))
        path = self._directory / name
        if name <= time:  # in the same second, or the clock was set back: the order of names is that of the backups
            name, path = time, self._directory / f"{time}-{(number := number + 1)}"
        while path.exists():
            path = self._directory / f"{name}-{(number := number + 1)}"
        return path

    def _close_files(self) -> None:
        for name in list(self._open):
            self._close_file(name)

    def _close_file(self, name: str) -> None:
        file = self._closed[name] = self._open.pop(name)
        file.close()

    def _path_of(self, name: str) -> Path:
        path = self._partial / name
        return path if self._recipients is None else _encrypted(path)


class _PlainFile:
    """A new file, with the checksum of what is written to it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._hash = hashlib.sha256()
        self.stored_bytes = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._hash.update(data)
        self.stored_bytes += len(data)

    def close(self) -> None:
        """Write durably."""
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


# Restore


def restore(
    manifest: Manifest,
    target: Path,
    *,
    identities: Sequence[Identity] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> Restored:
    """Verify a backup, then create the data directory ``target`` from it.

    Until it is complete it has the file ``restoring``, with which a start refuses it. ``identities``: secret keys for
    an encrypted backup.

    Raises:
        StorageError: the backup is damaged or too new, no identity decrypts it, or ``target`` exists and is not empty;
            nothing was written.
        OutOfSpaceError: there is no space for it.
    """
    _check_versions(manifest)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StorageError(
            f"{target} is not empty",
            path=str(target),
            why="a restore into existing data would mix two states",
            hint=f"move it away first: mv {target} {target}.old",
        )
    check_identities(manifest, identities)
    if damaged := verify(manifest, progress=progress):
        raise StorageError(
            f"the backup {manifest.path} is damaged: " + "; ".join(damaged[:5])
            + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""),
            path=damaged[0].partition(": ")[0],
            why="the files changed after they were written",
            hint="restore another backup",
        )  # fmt: skip
    try:
        DirectFiles().make_dir(target)
        _check_space(target, manifest)
        _restore(manifest, target, identities, progress)
    except OSError as error:
        raise _cannot_write(target, error) from error
    return Restored(manifest, target)


def check_identities(manifest: Manifest, identities: Sequence[Identity]) -> None:
    """Decrypt the smallest file of an encrypted backup, as the others have the same recipients.

    Raises:
        StorageError: no identity decrypts it.
    """
    if not manifest.recipients or not manifest.files:
        return
    keys = ", ".join(manifest.recipients)
    if not identities:
        raise StorageError(
            f"{manifest.path} is encrypted",
            path=str(manifest.path),
            why=f"to {keys}",
            hint="set the file with its secret key: --identity-file FILE",
        )
    name, file = min(manifest.files.items(), key=lambda item: item[1].stored_bytes)
    path = manifest.path_of(name)
    try:
        if _hash(path, lambda _: None) != (file.stored_bytes, file.sha256):
            return
    except OSError:
        return  # damaged, which the verification of all files reports
    try:
        with Path(os.devnull).open("wb") as out:
            decrypt(path, out.fileno(), identities)
    except StorageError as error:
        raise StorageError(
            f"the key does not decrypt {manifest.path}",
            path=str(path),
            why=f"it is encrypted to {keys}",
            hint="set the file with the secret key of one of them: --identity-file FILE",
        ) from error


def _restore(manifest: Manifest, target: Path, identities: Sequence[Identity], progress: Callable[[int], None]) -> None:
    disk = DirectFiles()
    (target / RESTORING).touch()
    disk.sync_dir(target)
    parts = manifest.parts
    for name, file in manifest.files.items():
        if name in parts:
            continue
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        _copy(manifest.path_of(name), path, file.mode, identities if manifest.recipients else None)
        progress(file.size)
    for name in manifest.environments:
        (target / name).parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        environment = open_environment(target, name, Durability.FLUSHED)
        try:
            for kind in ("rows", "commits"):
                if (stored := f"{name}/{kind}") in manifest.files:
                    with _opened(manifest, stored, target, identities) as blocks:
                        for body in _blocks(blocks):
                            environment.commit_body(body, f"restoring {stored}")
                    progress(manifest.files[stored].size)
        finally:
            environment.close()
    for broker in manifest.brokers:
        _note_restored(target / broker / "meta")
    if manifest.directory is not None:
        _write_durably(target / "format.json", manifest.directory)
        (target / "format.json").chmod(0o640)
    for folder, _, _ in os.walk(target, topdown=False):
        disk.sync_dir(Path(folder))
    (target / RESTORING).unlink()
    disk.sync_dir(target)


def _note_restored(path: Path) -> None:
    """Have the broker begin a new epoch of each log: consumers may have read records that the backup lacks."""
    meta = MetaStore(path)
    try:
        running: Mapping[str, Any] = json.loads(meta.notes().get(RUNNING, b"{}"))
        meta.commit([], notes={RUNNING: json.dumps({**running, RESTORED: True}).encode()})
    finally:
        meta.close()


def _check_versions(manifest: Manifest) -> None:
    directory = manifest.directory
    newer = None
    if directory is not None and directory.get("format") != FORMAT:
        newer = f"its data directory has format {directory.get('format')!r}, this version knows {FORMAT}"
    for name, found in manifest.environments.items():
        kind = environment_kind(name)
        if kind is None:
            newer = f"it contains {name!r}, which this version does not know"
        elif found["schema"] > kind.schema:
            newer = f"{name} has schema {found['schema']}, this version reads up to {kind.schema}"
        elif tuple(found["tables"]) != kind.tables[: len(found["tables"])]:
            newer = f"{name} has other tables than this version"
    if newer is not None:
        raise StorageError(
            f"{manifest.path} cannot be restored by this version",
            path=str(manifest.path),
            why=f"penstock {manifest.version} wrote it: {newer}",
            hint=f"restore it with penstock {manifest.version}",
        )


def _check_space(target: Path, manifest: Manifest) -> None:
    found = os.statvfs(target)
    needed = manifest.restored_bytes
    if found.f_blocks and found.f_bavail * found.f_frsize < needed:
        raise OutOfSpaceError(
            f"{target} has no space for the restore, which needs {(needed >> 20) + 1} MiB",
            path=str(target),
            why=free_space_text(target),
            hint="free space, or restore to another file system",
        )


@contextlib.contextmanager
def _opened(manifest: Manifest, name: str, target: Path, identities: Sequence[Identity]) -> Iterator[IO[bytes]]:
    """A file of the backup, open for reading; decrypted to a file without a name in ``target``."""
    path = manifest.path_of(name)
    if not manifest.recipients:
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile(dir=target) as file:
        decrypt(path, file.fileno(), identities)
        file.seek(0)
        yield file


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while head := file.read(BLOCK.size):
        (size,) = BLOCK.unpack(head)
        yield file.read(size)


# Files


def _checked_name(name: object) -> str:
    """A name below the directory. Raises RemoteProtocolError."""
    if not isinstance(name, str) or not name or any(part in {"", ".", ".."} for part in name.split("/")):
        raise RemoteProtocolError(f"the backup has a file with the invalid name {name!r}")
    return name


def _digest(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hash(path: Path, progress: Callable[[int], None]) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while data := file.read(_PIECE_BYTES):
            digest.update(data)
            size += len(data)
            progress(len(data))
    return size, digest.hexdigest()


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        _copy(source, target, 0o600)  # the file system has no hard links


def _copy(source: Path, target: Path, mode: int, identities: Sequence[Identity] | None = None) -> None:
    """Copy a file durably; with ``identities`` decrypted."""
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        if identities is None:
            with source.open("rb") as file:
                shutil.copyfileobj(file, out, _PIECE_BYTES)
            out.flush()
        else:
            decrypt(source, out.fileno(), identities)
        os.fsync(out.fileno())


def _encrypted(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def _write_durably(path: Path, content: Mapping[str, Any]) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def _cannot_write(directory: Path, error: OSError) -> PenstockError:
    full = error.errno in NO_SPACE
    return (OutOfSpaceError if full else StorageError)(
        f"{error.filename or directory} cannot be written: {error.strerror or error}",
        path=str(error.filename or directory),
        why=free_space_text(directory) if full else None,
        hint="free space, or choose another directory" if full else "choose a directory that this user may write",
    )
