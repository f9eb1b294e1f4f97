"""`penstock backup`: back up a node, running or stopped."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.node_api import NodeOptions, connects_to_node
from penstock.cli.options import Commands, Json, size_option
from penstock.cli.output import escape, print_json, shown_bytes

if TYPE_CHECKING:
    from penstock.node.backup_directory import BackupReceiver, Received

__all__ = ["ByteProgress", "IdentityFile", "app", "shown_time"]

app = Commands()

IdentityFile = Annotated[
    Path | None,
    typer.Option(help="Secret key of an encrypted backup, of age or SSH; /dev/stdin to use a pipe.", metavar="FILE"),
]

_PROGRESS_S = 0.2


class ByteProgress:
    """Counts bytes, and shows them on standard error if it is a terminal. Context manager."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bytes = 0
        self._shown_at = time.monotonic()
        self._visible = False

    def __call__(self, size: int) -> None:
        """Add ``size`` bytes."""
        self._bytes += size
        now = time.monotonic()
        if now - self._shown_at >= _PROGRESS_S and sys.stderr.isatty():
            self._shown_at = now
            self._visible = True
            sys.stderr.write(f"\r{self._what}: {shown_bytes(self._bytes)}\x1b[K")
            sys.stderr.flush()

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._visible:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def shown_time(ms: int) -> str:
    """A time in UTC, with milliseconds."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@app.add(
    "penstock backup /var/backups/penstock",
    "penstock backup /var/backups/penstock --keep-last 7",
    "penstock backup /var/backups/penstock --recipients-file backup.pub",
    "penstock backup backups --http https://node:8080 --admin-token-file token",
)
@connects_to_node
def backup(
    directory: Annotated[
        Path, typer.Argument(help="Directory of the backups; created if it does not exist.", metavar="DIRECTORY")
    ],
    keep_last: Annotated[
        int | None, typer.Option(help="Then delete the oldest backups until N are left.", min=1, metavar="N")
    ] = None,
    recipients_file: Annotated[
        Path | None,
        typer.Option(help="Encrypt to the public keys in FILE, one per line: of age or SSH.", metavar="FILE"),
    ] = None,
    max_rate: Annotated[int | None, size_option(text="Limit of the transfer, per second.", default="no limit")] = None,
    as_json: Json = False,
    *,
    node: NodeOptions,
) -> None:
    """Back up a node to a new subdirectory of DIRECTORY: keys, sessions, retained messages, log, offsets, topics.

    The backup is of one point in time, also while clients write: it contains everything that was acknowledged before.
    Files of the log that the newest backup in DIRECTORY has are not copied again, but each backup is complete.

    A running node, or broker in its own process, is found by its data directory, or by --http; it sends its data to
    this command, which needs the administration token or a user who may administer. The data directory of a stopped
    one is read directly.

    With --recipients-file every file is encrypted in the format of age before it is written. Restore it with the secret
    key: `penstock keygen` creates one.
    """
    from penstock.node.backup_directory import BackupReceiver
    from penstock.node.backup_encryption import read_recipients

    recipients = None if recipients_file is None else read_recipients(recipients_file)
    with BackupReceiver(directory, recipients) as receiver, ByteProgress("copied") as progress:
        if _is_stopped(node):
            asyncio.run(_read_directory(node.data_dir, receiver, max_rate, progress))
        else:
            _read_node(node, receiver, max_rate, progress)
        received = receiver.finish(keep=keep_last)
    _show(received, as_json=as_json)


def _is_stopped(node: NodeOptions) -> bool:
    """Whether to read the data directory, because no node is named and none uses it."""
    from penstock.node.data_dir import is_in_use

    data_dir = node.data_dir
    if node.http is not None or is_in_use(data_dir):
        return False
    return (data_dir / "format.json").is_file() or (data_dir / "tube").is_dir()


async def _read_directory(
    data_dir: Path, receiver: BackupReceiver, max_rate: int | None, progress: ByteProgress
) -> None:
    from penstock.node.backup import backup_items, stopped_source

    with stopped_source(data_dir) as source:
        async with aclosing(backup_items(source, receiver.have, max_rate)) as items:
            async for item in items:
                receiver.take(item)
                progress(len(item.payload))


def _read_node(node: NodeOptions, receiver: BackupReceiver, max_rate: int | None, progress: ByteProgress) -> None:
    from penstock.node.backup import read_items

    have = json.dumps(receiver.have).encode()
    with node.connect(also_broker=True).stream("backup", have, {"rate": max_rate}) as response:

        def read(size: int) -> bytes:
            try:
                return response.read(size)
            except (OSError, http.client.HTTPException):
                return b""  # a part of a backup is not one

        for item in read_items(read):
            receiver.take(item)
            progress(len(item.payload))


def _show(received: Received, *, as_json: bool) -> None:
    manifest = received.manifest
    row = {
        "backup": str(manifest.path),
        "point": shown_time(manifest.point_at),
        "pause_ms": manifest.pause_ms,
        "files": len(manifest.files),
        "bytes": manifest.size,
        "copied_bytes": received.copied_bytes,
        "unchanged_bytes": received.linked_bytes,
        "recipients": list(manifest.recipients),
        "deleted": [str(path) for path in received.removed],
    }
    if as_json:
        print_json(row)
        return
    sys.stdout.writelines(_lines(row))


def _lines(row: dict[str, object]) -> Iterator[str]:
    copied, unchanged = row["copied_bytes"], row["unchanged_bytes"]
    assert isinstance(copied, int)
    assert isinstance(unchanged, int)
    yield f"backup   {escape(str(row['backup']))}\n"
    yield f"point    {row['point']}: everything acknowledged before is in it\n"
    yield f"copied   {shown_bytes(copied)}, {shown_bytes(unchanged)} unchanged since the backup before\n"
    if recipients := row["recipients"]:
        assert isinstance(recipients, list)
        for recipient in recipients:
            yield f"key      {escape(recipient)}\n"
    deleted = row["deleted"]
    assert isinstance(deleted, list)
    for path in deleted:
        yield f"deleted  {escape(path)}\n"
