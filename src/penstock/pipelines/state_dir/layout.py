"""The state directory of a pipeline: its paths, the pipeline that owns it, and files that survive a crash.

The directory is local or mounted, or a path in a bucket (``ObjectPath``).

<state>/checkpoints/<sink>/             the sink's checkpoint, in Spark's format
<state>/checkpoints/<sink>/births/      births of Sparkplug that the sink has read (``births``)
<state>/checkpoints/<sink>/changes/     how much of the changes of keys each batch knows (``checkpoint``)
<state>/checkpoints/<sink>/schemas/     what batches have decided about ids of schemas (``schemas``)
<state>/schemas/<registry>/<id>.json    schemas that the pipeline has looked up (``schemas``)
<state>/changes/<step>-<digest>/        changes of keys that an as-of join has read (``changes``)
<state>/shared/<sink>-<id>.transient/   Spark's checkpoint of a query of several sinks, another one at each start
<state>/shared/<sink>.rows/             rows of a batch on their way to a sink without files of its own
<state>/ledger/<sink>/<batch>.json      counts of the records of each batch
<state>/ledger/<sink>/closed/           those of older batches, many together (``ledger``)
<state>/starts/<sink>.json              start offsets of each query, and the end offsets of a replay
<state>/files/<sink>-<source>.jsonl     files that a query has found, in order
<state>/file_batches/<sink>/            notes of the files of the newest batches (``sinks/files``)
<state>/clocks/<sink>-<source>.json     start of a source that generates records
<state>/inbox/<source>/                 dead letters of files, to be read again
<state>/shapes/<sink>.json              properties on which the checkpoint of the query depends
<state>/letter_writers.json             sinks that write the dead letters of shared steps (``letter_writers``)
<state>/failures/<sink>.txt             Spark's last error of the sink's query, with its Java stacks
<state>/pipeline.json                   the pipeline that owns the directory
<state>/plan.json                       description of the last run's plan
<state>/applied/                        versions of the pipeline file (``versions``)
<state>/replay.json                     range of a replay as requested

JSON files are written atomically: after a crash a file has either its old or its new content. An object in a bucket is
replaced as a whole, and created or replaced under a condition that the storage checks: ``If-None-Match``, ``If-Match``.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from penstock.errors import ConfigError, PenstockError, StorageError, UnavailableError
from penstock.spark.files.object_storage import AnyPath, ObjectPath, StoragePath
from penstock.statestore import hlc

__all__ = [
    "TRANSIENT",
    "applied",
    "changes",
    "check_owner",
    "checkpoint",
    "claim",
    "clock",
    "create_bytes",
    "create_json",
    "create_text",
    "failure",
    "file_batches",
    "file_log",
    "first_json",
    "inbox",
    "is_newer",
    "ledger",
    "letter_writers",
    "listed",
    "local_directory",
    "locked",
    "make_directory",
    "owner",
    "plan",
    "read_bytes",
    "read_each",
    "read_json",
    "ready_directory",
    "remove_abandoned",
    "remove_tree",
    "replay",
    "shape",
    "shared",
    "staged",
    "starts",
    "sync_directory",
    "sync_file",
    "sync_names",
    "sync_parents",
    "update_json",
    "write_json",
    "write_text",
]


_Result = TypeVar("_Result")


def _below(path: AnyPath, *names: str) -> AnyPath:
    found: StoragePath = path
    for name in names:
        found = found / name
    return cast("AnyPath", found)


def checkpoint(state: AnyPath, sink: str) -> AnyPath:
    """Return the directory of the checkpoint of ``sink``."""
    return _below(state, "checkpoints", sink)


TRANSIENT = ".transient"
"""End of the name of a checkpoint on which nothing depends after its run: ``LocalFileContext`` syncs nothing of it."""


def shared(state: AnyPath) -> AnyPath:
    """Return the directory of files that the shared queries of a run need while they run."""
    return _below(state, "shared")


def staged(state: AnyPath, sink: str) -> AnyPath:
    """Return the directory of rows of a batch on their way to ``sink``."""
    return _below(shared(state), f"{sink}.rows")


def changes(state: AnyPath, history: str) -> AnyPath:
    """Return the directory of the changes of the as-of join with the name ``history``."""
    return _below(state, "changes", history)


def ledger(state: AnyPath) -> AnyPath:
    """Return the directory of the ledger."""
    return _below(state, "ledger")


def letter_writers(state: AnyPath) -> AnyPath:
    """Return the file with the sinks that write the dead letters of steps that several sinks have."""
    return _below(state, "letter_writers.json")


def starts(state: AnyPath) -> AnyPath:
    """Return the directory of the start offsets of each query."""
    return _below(state, "starts")


def file_log(state: AnyPath, query: str, source: str) -> AnyPath:
    """Return the list of files of ``source`` that ``query`` has found."""
    return _below(state, "files", f"{query}-{source}.jsonl")


def file_batches(state: AnyPath, sink: str) -> AnyPath:
    """Return the directory of the notes of the files that ``sink`` has written."""
    return _below(state, "file_batches", sink)


def clock(state: AnyPath, query: str, source: str) -> AnyPath:
    """Return the file with the time since which ``source`` generates records for ``query``."""
    return _below(state, "clocks", f"{query}-{source}.json")


def inbox(state: AnyPath, source: str) -> AnyPath:
    """Return the directory of dead letters from the files of ``source`` that are to be read again."""
    return _below(state, "inbox", source)


def shape(state: AnyPath, sink: str) -> AnyPath:
    """Return the file with the properties on which the checkpoint of ``sink`` depends."""
    return _below(state, "shapes", f"{sink}.json")


def failure(state: AnyPath, sink: str) -> AnyPath:
    """Return the file with the last error of the query of ``sink``, with its Java stacks."""
    return _below(state, "failures", f"{sink}.txt")


def owner(state: AnyPath) -> AnyPath:
    """Return the file with the name of the pipeline that owns the directory."""
    return _below(state, "pipeline.json")


def plan(state: AnyPath) -> AnyPath:
    """Return the file with the description of the last run's plan."""
    return _below(state, "plan.json")


def applied(state: AnyPath) -> AnyPath:
    """Return the directory of the versions of the pipeline file."""
    return _below(state, "applied")


def replay(state: AnyPath) -> AnyPath:
    """Return the file with the options of a replay."""
    return _below(state, "replay.json")


def local_directory(state: StoragePath, source: str) -> Path:
    """Return the directory ``state`` for ``source``, which reads files and lists them in a file that it appends to.

    Raises:
        ConfigError: it is in a bucket.
    """
    if isinstance(state, ObjectPath):
        raise ConfigError(
            f"the source {source!r} reads files, and the state directory {str(state)!r} is in a bucket",
            option="state-dir",
            why="the list of the files that were read is appended to, which objects do not support",
            hint="use a state directory in a local or mounted file system",
        )
    return state


def claim(state: StoragePath, pipeline: str) -> None:
    """Claim the directory ``state`` for ``pipeline`` unless it has an owner.

    Raises:
        ConfigError: another pipeline owns the directory.
    """
    create_json(owner(state), {"pipeline": pipeline})
    check_owner(state, pipeline)


def check_owner(state: StoragePath, pipeline: str) -> None:
    """Check that no other pipeline owns the directory ``state``.

    Raises:
        ConfigError: another pipeline owns it.
    """
    try:
        found = read_json(owner(state))["pipeline"]
    except FileNotFoundError:
        return
    if found != pipeline:
        raise ConfigError(
            f"{str(state)!r} is the state directory of the pipeline {found!r}, not of {pipeline!r}",
            option="state-dir",
            why="it contains the checkpoints and the ledger of that pipeline",
            hint=f"use another directory; if the pipeline was renamed, rename it to {found!r} again in its file",
        )


_PROBE_BYTES = 65_536
_REMEDIES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space",
    errno.EACCES: "give this user permission, or run the command as another user",
    errno.EROFS: "mount it read-write, or use another directory",
}
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


def ready_directory(path: StoragePath) -> None:
    """Create the directory ``path`` if it does not exist, and check that it is writable.

    Raises:
        StorageError: it cannot be created or is not writable.
    """
    if isinstance(path, ObjectPath):
        path.check_writable("state directory", replaces=True)
        return
    probe = path / f".{uuid.uuid4().hex[:12]}.tmp"
    try:
        path.mkdir(parents=True, exist_ok=True)
        sync_parents(path)
        probe.write_bytes(b"\0" * _PROBE_BYTES)
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
        raise StorageError(
            f"the directory {str(path)!r} is not writable: {error.strerror}",
            path=str(path),
            hint="use another directory, free disk space, or give this user write permission",
        ) from error


def write_json(path: StoragePath, value: Mapping[str, Any]) -> None:
    """Replace ``path`` atomically by ``value``: write a temporary file, sync it, rename it, sync the directory.

    Raises:
        StorageError: it cannot be written; the previous contents are unchanged.
    """
    write_text(path, _as_json(value))


def write_text(path: StoragePath, text: str) -> None:
    """Like :func:`write_json`, for ``text``."""
    if isinstance(path, ObjectPath):
        path.write_bytes(text.encode())
        return
    with _temporary(path, text.encode()) as temporary:
        temporary.replace(path)
        sync_directory(path.parent)


def create_json(path: StoragePath, value: Mapping[str, Any]) -> bool:
    """Like :func:`write_json`, but do not replace an existing file; return True if this call created the file.

    In a bucket also if the file has the same content: see :meth:`ObjectPath.create`.
    """
    return create_text(path, _as_json(value))


def first_json(path: StoragePath, value: Mapping[str, Any]) -> dict[str, Any]:
    """Create the file ``path`` with ``value`` unless it exists; return what it has: the first caller decides."""
    create_json(path, value)
    return dict(read_json(path))


def create_text(path: StoragePath, text: str, *, exclusively: bool = False) -> bool:
    """Like :func:`create_json`, for ``text``; ``exclusively``: see :func:`create_bytes`."""
    return create_bytes(path, text.encode(), exclusively=exclusively)


def create_bytes(path: StoragePath, data: bytes, *, exclusively: bool = False) -> bool:
    """Like :func:`create_json`, for ``data``.

    ``exclusively``: raise StorageError on a file system without links, where two concurrent calls may both return True.
    """
    if isinstance(path, ObjectPath):
        return path.create(data)
    with _temporary(path, data) as temporary:
        return _linked(temporary, path, exclusively=exclusively)


@contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[Path]:
    """A file next to ``path`` that has ``data``, synced; removed at the end, unless it was renamed.

    Its name is unique: another process may be writing the same file, such as that of a run that has lost its lease.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        make_directory(path.parent)
        _write(temporary, data)
        yield temporary
    except OSError as error:
        raise _failed(path, "written", error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


_ABANDONED_S = 3600.0
"""Age in seconds from which a temporary file is that of a process that ended: it takes seconds to write and rename."""
_TEMPORARY = re.compile(r"\.(?:.+\.)?[0-9a-f]{12}\.tmp")
"""Names of temporary files of this module; those of Spark's checkpoints have other ones."""


def remove_abandoned(state: Path) -> int:
    """Remove the temporary files that killed processes left in the local state directory ``state``; return their
    number.

    Files of other processes that write now, such as commands, are younger than an hour by the clock of the file system.
    A process that was paused for longer cannot rename its file any more, and reports that as an error.
    """
    probe = state / f".{uuid.uuid4().hex[:12]}.tmp"
    removed = 0
    with suppress(OSError):
        probe.touch()
        oldest = probe.stat().st_mtime - _ABANDONED_S
        probe.unlink()
        for directory, _, names in os.walk(state):
            for name in names:
                if _TEMPORARY.fullmatch(name) is None:
                    continue
                path = Path(directory) / name
                with suppress(OSError):
                    if path.stat().st_mtime < oldest:
                        path.unlink()
                        removed += 1
    return removed


def update_json(path: StoragePath, change: Callable[[dict[str, Any] | None], Mapping[str, Any]]) -> None:
    """Replace the JSON object in ``path`` by ``change(object)``; the argument is None if the file does not exist.

    In a bucket no other process changes it in between: ``change`` is called again if one did. On a file system one may,
    in the moment between reading and renaming.

    Raises:
        StorageError: see :func:`read_json` and :func:`write_json`; and what ``change`` raises.
    """
    if not isinstance(path, ObjectPath):
        try:
            before: dict[str, Any] | None = read_json(path)
        except FileNotFoundError:
            before = None
        write_json(path, change(before))
        return
    while True:
        try:
            found = path.stored()
        except FileNotFoundError:
            if path.create(_as_json(change(None)).encode()):
                return
        else:
            if path.replace(_as_json(change(_parsed(path, found.data))).encode(), found.etag):
                return


def is_newer(token: object, other: str) -> bool:
    """Return True if ``token`` is a fencing token, and newer than ``other``."""
    found, mine = hlc.parse(str(token)), hlc.parse(other)
    return found is not None and mine is not None and found > mine


def _linked(temporary: Path, path: Path, *, exclusively: bool) -> bool:
    """Link ``path`` to ``temporary``; return False if ``path`` exists. Its name is on disk in both cases."""
    created = True
    try:
        os.link(temporary, path)
    except FileExistsError:
        created = False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if exclusively:
            raise StorageError(
                f"{str(path)!r} cannot be created: {error.strerror}",
                path=str(path),
                why="the file system does not support hard links, without which two programs could replace each other's"
                " file",
                hint="use a file system with hard links, or a bucket",
            ) from error
        # Some mounted file systems do not support links: there, two concurrent calls may both return True.
        created = not path.exists()
        if created:
            temporary.replace(path)
    # Also the name that another process created: it may have been killed before it synced it.
    sync_directory(path.parent)
    return created


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: StoragePath) -> dict[str, Any]:
    """Read the JSON object in ``path``.

    Raises:
        FileNotFoundError: the file does not exist.
        StorageError: it is not a JSON object, or cannot be read.
    """
    return _parsed(path, read_bytes(path))


def read_bytes(path: StoragePath) -> bytes:
    """Return the contents of the file ``path``.

    Raises:
        FileNotFoundError: the file does not exist.
        StorageError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _failed(path, "read", error) from error


def read_each(read: Callable[[AnyPath], _Result], paths: Sequence[AnyPath]) -> list[_Result]:
    """Return ``read(path)`` for each of ``paths``, in order; with concurrent requests if they are in a bucket."""
    if not paths or not isinstance(paths[0], ObjectPath):
        return [read(path) for path in paths]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(read, paths))


_REQUESTS = 16
"""Maximum number of requests to a bucket at a time."""


def _parsed(path: StoragePath, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise StorageError(f"{path} is not JSON: {error}", path=str(path)) from error
    if not isinstance(value, dict):
        raise StorageError(f"{path} is not a JSON object", path=str(path))
    return value


def listed(directory: StoragePath, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Return the names in ``directory`` that match ``pattern``; empty if the directory does not exist.

    In a bucket these are objects only, not directories.

    Raises:
        StorageError: the directory is not readable; an empty result would be mistaken for an empty directory.
    """
    if isinstance(directory, ObjectPath):
        names = directory.names()
    else:
        try:
            with os.scandir(directory) as entries:
                names = [entry.name for entry in entries]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failed(directory, "read", error) from error
    return [match for name in names if (match := pattern.fullmatch(name)) is not None]


def remove_tree(directory: StoragePath) -> None:
    """Remove ``directory`` with everything in it, which nothing needs any more; what cannot be removed stays."""
    if not isinstance(directory, ObjectPath):
        shutil.rmtree(directory, ignore_errors=True)
        return
    with suppress(StorageError, UnavailableError):
        directory.remove_tree()


def _failed(path: StoragePath, what: str, error: OSError) -> StorageError:
    return StorageError(
        f"{str(path)!r} cannot be {what}: {error.strerror}",
        path=str(path),
        hint=_REMEDIES.get(error.errno or 0, "check the path and the disk"),
    )


@contextmanager
def locked(path: Path, held: Callable[[int], PenstockError], *, wait: bool = False) -> Iterator[int]:
    """Hold the lock of the file ``path``, which is created if it does not exist; yield its descriptor.

    The kernel releases the lock when the process ends, and not while it is paused. ``wait``: wait until another process
    has released it.

    Raises:
        PenstockError: another process holds it; this is what ``held`` returns for the descriptor.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise held(file) from error
        yield file
    finally:
        os.close(file)


def sync_file(path: Path) -> None:
    """Sync the contents of the file ``path`` to disk (fsync)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def make_directory(path: Path) -> None:
    """Create the directory ``path`` and its missing parents, durably; nothing if it exists."""
    missing = list(itertools.takewhile(lambda each: not each.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


def sync_names(directory: StoragePath) -> None:
    """Sync the names in ``directory``: a process that was killed may have created them, and not synced them.

    Nothing if it does not exist, or in a bucket.
    """
    if not isinstance(directory, ObjectPath):
        with suppress(FileNotFoundError):
            sync_directory(directory)


def sync_parents(path: Path) -> None:
    """Sync the directories above ``path`` to disk: other processes may have created them, and not synced them."""
    for each in path.absolute().parents:
        try:
            sync_directory(each)
        except PermissionError:
            # Another user created it, and it exists for longer than the table.
            return


def sync_directory(path: Path) -> None:
    """Sync the entries of the directory ``path`` to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
