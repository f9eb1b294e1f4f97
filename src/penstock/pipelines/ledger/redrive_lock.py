"""One redrive of a table of dead letters at a time: two would send a letter twice.

The file ``_sending/lock`` of the table is locked by the process that redrives. The kernel releases the lock when the
process ends, and not while it is paused. In a bucket the object exists during a redrive: a bucket has no locks that end
with their process, and one that expires would end while its holder is paused. A redrive that was killed therefore
leaves the object, which the user removes.
"""

from __future__ import annotations

import json
import os
import platform
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from penstock.errors import PenstockError
from penstock.pipelines.state_dir.layout import create_text, locked, make_directory, read_bytes
from penstock.spark.files.object_storage import ObjectPath, StoragePath

__all__ = ["redriving"]


@contextmanager
def redriving(table: StoragePath) -> Iterator[None]:
    """Hold the lock of the letters in ``table``: read their states inside the block, and redrive them there.

    Raises:
        PenstockError: another redrive holds it; the error says which, and since when.
        StorageError, UnavailableError: it cannot be written.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    # In a bucket equal contents would be taken for those of this call.
    holder = json.dumps({"host": platform.node(), "process": os.getpid(), "since": now, "id": uuid.uuid4().hex})
    if isinstance(table, ObjectPath):
        lock = table / "_sending" / "lock"
        if not create_text(lock, holder):
            raise _held(_contents(lock), f"wait until it has ended; if that process was killed, remove {lock}")
        try:
            yield
        finally:
            # If the user has removed it meanwhile, it may be that of another redrive.
            if _contents(lock) == holder.encode():
                lock.unlink(missing_ok=True)
    elif not table.exists():
        yield
    else:
        make_directory(table / "_sending")
        with locked(table / "_sending" / "lock", _held_by_process) as file:
            os.ftruncate(file, 0)
            os.pwrite(file, holder.encode(), 0)
            yield


def _held_by_process(file: int) -> PenstockError:
    return _held(os.pread(file, 1_000, 0), "wait until it has ended")


def _contents(lock: StoragePath) -> bytes:
    try:
        return read_bytes(lock)
    except FileNotFoundError:
        return b""


def _held(found: bytes, hint: str) -> PenstockError:
    try:
        holder = json.loads(found)
        who = f"process {holder['process']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        # It has just been created, or removed.
        who = "another process"
    return PenstockError(
        "these dead letters are being redriven",
        why=f"{who} holds the lock, and two redrives could send a letter twice",
        hint=hint,
    )
