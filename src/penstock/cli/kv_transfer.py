"""`penstock kv export` and `import`: keys as lines of JSON, to copy them between stores.

A line is an object with ``key`` and ``value``, or ``key_base64`` and ``value_base64`` for bytes that are not text.
Export adds ``version``; import uses ``ttl_ms`` if present and ignores everything else, since versions are assigned by
the store.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.broker_options import StateStoreOptions, Token, connects_to_store, parse_token
from penstock.cli.output import bytes_fields, note, print_json, unless_standard
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.statestore.client.client import StateStoreClient
    from penstock.statestore.hlc import Hlc

__all__ = ["export_command", "import_command"]

AT_ONCE = 64
"""Keys read concurrently; below any Receive Maximum."""
LINES_AT_ONCE = 10_000
"""Keys set in one batch, held in memory."""

MAX_TTL_MS = 2**63 - 1


class ImportLine(NamedTuple):
    """One key to import."""

    key: bytes
    value: bytes
    ttl_ms: int | None


@connects_to_store
def export_command(
    pattern: Annotated[str, typer.Argument(help="Glob pattern of keys.", metavar="PATTERN")] = "*",
    file: Annotated[
        Path | None, typer.Option(help="Write to a file. Default, or -: standard output.", metavar="FILE")
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="Export the keys listed in a file (- for standard input), one per line, for stores without SCAN.",
            metavar="FILE",
        ),
    ] = None,
    *,
    options: StateStoreOptions,
) -> None:
    """Write the keys that match PATTERN as JSON lines with key, value and version (base64 if they are not text).

    Keys are read one by one, so changes during the export may or may not be included. The time to live (ttl_ms) is
    exported if the store has the extension ttl. Otherwise imported keys do not expire, locks and leases included: a
    note reports this.
    """
    wanted, file = None if keys is None else _key_list(keys), unless_standard(file)
    from penstock.runtime.io.loop import run

    with ExitStack() as stack:
        out = sys.stdout if file is None else stack.enter_context(_writable(file))
        count = run(_export(pattern, wanted, out, options))
    if file is not None:
        note(f"exported {count} keys to {file}")


@connects_to_store
def import_command(
    file: Annotated[
        Path | None, typer.Argument(help="JSON lines. Default, or -: standard input.", metavar="FILE")
    ] = None,
    only_new: Annotated[bool, typer.Option("--nx", help="Do not change keys that exist.")] = False,
    fencing_token: Token = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    *,
    options: StateStoreOptions,
) -> None:
    """Set the keys of an export. All lines are checked before the first key is set.

    A line is an object with "key" or "key_base64", "value" or "value_base64", and optionally "ttl_ms".
    """
    from penstock.runtime.io.loop import run

    token = parse_token(fencing_token)
    with _readable(unless_standard(file)) as lines:
        for _ in _lines(lines):
            pass
        lines.seek(0)
        imported, skipped = run(_import(_lines(lines), options, token, only_new))
    if as_json:
        print_json({"imported": imported, "skipped": skipped})
    else:
        note(f"imported {imported} keys" + (f", skipped {skipped} that exist" if only_new else ""))


async def _export(pattern: str, keys: list[bytes] | None, out: IO[str], options: StateStoreOptions) -> int:
    import asyncio

    count = 0
    async with options.store() as store:
        tells = await _tells_expiry(store)
        if not tells:
            note(
                "note: the store does not report expiry, so imported keys never expire: enable the extension ttl,"
                " or leave out keys of locks and leases"
            )
        pending: list[asyncio.Task[str | None]] = []
        async for key in _keys(store, pattern, keys):
            pending.append(asyncio.create_task(_row(store, key, with_expiry=tells)))
            if len(pending) >= AT_ONCE:
                count += _put(await asyncio.gather(*pending), out)
                pending.clear()
        count += _put(await asyncio.gather(*pending), out)
    out.flush()
    return count


async def _keys(store: StateStoreClient, pattern: str, keys: list[bytes] | None) -> AsyncIterator[bytes]:
    if keys is None:
        async for key in store.scan(pattern.encode("utf-8", "surrogateescape")):
            yield key
    else:
        for key in keys:
            yield key


async def _tells_expiry(store: StateStoreClient) -> bool:
    from penstock.statestore.errors import StateStoreError

    try:
        await store.expiry("penstock/export")
    except StateStoreError:
        return False
    return True


async def _row(store: StateStoreClient, key: bytes, *, with_expiry: bool) -> str | None:
    entry = await store.get(key)
    if entry is None:
        return None
    row: dict[str, object] = {**_only(bytes_fields("key", key)), **_only(bytes_fields("value", entry.value))}
    row["version"] = str(entry.version)
    if with_expiry and (left_ms := (await store.expiry(key)).left_ms) is not None:
        # 0 means "expires now", which is not a valid ttl_ms.
        row["ttl_ms"] = max(1, left_ms)
    return json.dumps(row, ensure_ascii=False)


def _only(fields: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value is not None}


def _put(rows: list[str | None], out: IO[str]) -> int:
    there = [row for row in rows if row is not None]
    out.writelines(row + "\n" for row in there)
    return len(there)


async def _import(
    lines: Iterator[ImportLine], options: StateStoreOptions, token: Hlc | None, only_new: bool
) -> tuple[int, int]:
    from penstock.statestore.client.client import Condition, Write
    from penstock.statestore.errors import WritesRefusedError

    imported = skipped = 0
    condition = Condition.NX if only_new else Condition.ALWAYS
    async with options.store() as store:
        while chunk := _chunk(lines):
            writes = [Write.set(line.key, line.value, ttl_ms=line.ttl_ms, condition=condition) for line in chunk]
            try:
                applied = await store.write_many(writes, fencing_token=token, stop=True)
            except WritesRefusedError as error:
                note(f"imported {imported + sum(error.applied)} keys before this error")
                raise
            except PenstockError:
                note(f"imported at least {imported} keys before this error")
                raise
            imported += sum(applied)
            skipped += len(applied) - sum(applied)
    return imported, skipped


def _chunk(lines: Iterator[ImportLine]) -> list[ImportLine]:
    """The next lines to set, each key once."""
    chunk: dict[bytes, ImportLine] = {}
    for line in lines:
        # Of several lines with one key, only the last counts.
        chunk[line.key] = line
        if len(chunk) >= LINES_AT_ONCE:
            break
    return list(chunk.values())


def _lines(file: IO[bytes]) -> Iterator[ImportLine]:
    for number, text in enumerate(file, 1):
        if text.strip():
            try:
                yield _line(json.loads(text))
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"kv import: line {number} cannot be used",
                    why=str(error),
                    do='write {"key": "...", "value": "..."}, ..._base64 for bytes; nothing was set',
                ) from error


def _line(row: Any) -> ImportLine:
    if not isinstance(row, dict):
        raise TypeError("it is not an object")
    key = _bytes(row, "key")
    if not key:
        raise ValueError("the key is empty")
    ttl_ms = row.get("ttl_ms")
    if ttl_ms is not None and (type(ttl_ms) is not int or not 1 <= ttl_ms <= MAX_TTL_MS):
        raise ValueError(f"ttl_ms is {ttl_ms!r}, expected an integer of at least 1")
    return ImportLine(key, _bytes(row, "value"), ttl_ms)


def _bytes(row: dict[str, Any], name: str) -> bytes:
    text, encoded = row.get(name), row.get(f"{name}_base64")
    if (text is None) == (encoded is None):
        raise ValueError(f"expected exactly one of {name} and {name}_base64")
    found = encoded if text is None else text
    if not isinstance(found, str):
        raise TypeError(f"{name} is {found!r}, expected text")
    if text is not None:
        return found.encode()
    try:
        return base64.b64decode(found.encode(), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{name}_base64 is not base64: {error}") from error


def _key_list(path: Path) -> list[bytes]:
    try:
        names = path.read_bytes() if unless_standard(path) else sys.stdin.buffer.read()
    except OSError as error:
        raise ConfigError(f"kv export: --keys {path}: {error.strerror}", option="--keys") from error
    return [line for line in names.splitlines() if line]


def _writable(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"kv export: --file {path}: {error.strerror}", option="--file") from error


@contextlib.contextmanager
def _readable(path: Path | None) -> Iterator[IO[bytes]]:
    """The input as a seekable file, since it is read twice; a pipe is copied to a temporary file."""
    if path is None:
        if sys.stdin.isatty():
            raise ConfigError("kv import: no input", do="give a FILE, or JSON lines on standard input")
        with tempfile.TemporaryFile() as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.seek(0)
            yield kept
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"kv import: {path}: {error.strerror}") from error
    with file:
        if not file.seekable():
            with tempfile.TemporaryFile() as kept:
                shutil.copyfileobj(file, kept)
                kept.seek(0)
                yield kept
            return
        yield file
