"""`penstock kv`: keys of a state store, over MQTT, against any broker that has one."""

from __future__ import annotations

import base64
import binascii
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.broker import BrokerOptions, Token, connects, parse_token
from penstock.cli.groups import command_group
from penstock.cli.input import given_bytes
from penstock.cli.kv_lock import lock_command
from penstock.cli.kv_transfer import export_command, import_command
from penstock.cli.output import (
    bytes_fields,
    escape,
    note,
    print_error,
    print_json,
    print_raw,
    shown,
    unless_standard,
)
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.statestore.client.client import StateStoreClient
    from penstock.statestore.client.observation import Observation

__all__ = ["app"]

app = command_group("Read, write, watch and lock keys of a state store.")

Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Key = Annotated[str, typer.Argument(help="The key.", metavar="KEY")]
Base64 = Annotated[bool, typer.Option("--base64", help="KEY is given in base64: for keys that are no text.")]
Value = Annotated[
    str | None, typer.Argument(help="The value; without it, it is read from --file or stdin.", metavar="VALUE")
]
ValueFile = Annotated[
    Path | None, typer.Option(help="Take the value from this file, byte for byte; -: from stdin.", metavar="PATH")
]


@app.command(name="get")
@connects
def get_command(
    key: Key,
    file: Annotated[
        Path | None, typer.Option(help="Write the value to this file; -: to stdout.", metavar="PATH")
    ] = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: BrokerOptions,
) -> None:
    """Write the value of KEY to standard output, byte for byte; to a terminal as text, what is none escaped.

    Exit status 1 when there is no such key.
    """
    name, file = _key(key, key_base64), unless_standard(file)

    async def get(store: StateStoreClient) -> bool:
        entry = await store.get(name)
        if entry is not None and file is not None:
            _write(file, entry.value)
        if as_json:
            value, version = (None, None) if entry is None else (entry.value, str(entry.version))
            row = {**bytes_fields("key", name), "found": entry is not None, **bytes_fields("value", value)}
            print_json({**row, "version": version})
        elif entry is None:
            _no_key(name)
        elif file is None:
            print_raw(entry.value)
        return entry is not None

    _finish(options, get)


@app.command(name="set")
@connects
def set_command(
    key: Key,
    value: Value = None,
    file: ValueFile = None,
    ttl_ms: Annotated[int | None, typer.Option(help="Expire after so many milliseconds.", min=1, metavar="MS")] = None,
    only_new: Annotated[bool, typer.Option("--nx", help="Only where the key does not exist.")] = False,
    only_new_or_equal: Annotated[
        bool, typer.Option("--nex", help="Only where the key does not exist or has this value.")
    ] = False,
    persist: Annotated[
        bool, typer.Option("--persist", help="Ask a store that keeps its keys in memory to have this one on disk.")
    ] = False,
    fencing_token: Token = None,
    fence_prefix: Annotated[
        str | None,
        typer.Option(help="Fence every key that begins so with the token; the store must offer it.", metavar="TEXT"),
    ] = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: BrokerOptions,
) -> None:
    """Set KEY to VALUE and print the version.

    Exit status 1 when the condition was not met.
    """
    if only_new and only_new_or_equal:
        raise ConfigError("kv set: --nx and --nex exclude each other", option="--nx", do="give one of the two")
    name, data, token = _key(key, key_base64), given_bytes("kv set", "VALUE", value, file), parse_token(fencing_token)

    async def set_(store: StateStoreClient) -> bool:
        from penstock.statestore.client.client import Condition

        condition = Condition.NX if only_new else Condition.NEX if only_new_or_equal else Condition.ALWAYS
        result = await store.set(
            name,
            data,
            condition=condition,
            ttl_ms=ttl_ms,
            fencing_token=token,
            persist=persist,
            fence_prefix=fence_prefix,
        )
        version = None if result.version is None else str(result.version)
        if as_json:
            print_json({**bytes_fields("key", name), "applied": result.applied, "version": version})
        elif result.applied:
            sys.stdout.write(f"{escape(version or '')}\n")
        else:
            note(
                f"penstock: key '{shown(name)}' was not set\n"
                f"  why: the condition {'--nx' if only_new else '--nex'} is not met;"
                f" the key has version {escape(version or 'unknown')}"
            )
        return result.applied

    _finish(options, set_)


@app.command(name="del")
@connects
def del_command(
    key: Key, fencing_token: Token = None, key_base64: Base64 = False, as_json: Json = False, *, options: BrokerOptions
) -> None:
    """Delete KEY.

    Exit status 1 when there is no such key.
    """
    name, token = _key(key, key_base64), parse_token(fencing_token)

    async def delete(store: StateStoreClient) -> bool:
        deleted = await store.delete(name, fencing_token=token)
        if as_json:
            print_json({**bytes_fields("key", name), "deleted": deleted})
        elif not deleted:
            _no_key(name)
        return deleted > 0

    _finish(options, delete)


@app.command(name="vdel")
@connects
def vdel_command(
    key: Key,
    value: Value = None,
    file: ValueFile = None,
    fencing_token: Token = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: BrokerOptions,
) -> None:
    """Delete KEY if it has VALUE.

    Exit status 1 when there is no such key or it has another value.
    """
    name, data, token = _key(key, key_base64), given_bytes("kv vdel", "VALUE", value, file), parse_token(fencing_token)

    async def vdelete(store: StateStoreClient) -> bool:
        deleted = await store.vdelete(name, data, fencing_token=token)
        if as_json:
            print_json({**bytes_fields("key", name), "deleted": deleted})
        elif deleted < 0:
            print_error(PenstockError(f"key '{shown(name)}' was not deleted", why="it has another value"))
        elif not deleted:
            _no_key(name)
        return deleted > 0

    _finish(options, vdelete)


@app.command(name="watch")
@connects
def watch_command(
    key: Key,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Watch every key that begins with KEY; the store must offer it.")
    ] = False,
    count: Annotated[int | None, typer.Option(help="End after so many changes.", min=1, metavar="N")] = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: BrokerOptions,
) -> None:
    """Print each change of KEY as it happens, until Ctrl-C.

    A line is the operation (SET or DELETE), the version and the value; with --prefix the key stands before the value. A
    lost connection is opened again, and a change that happened meanwhile is printed then (with --json: "missed" is
    true). LOST says that changes under a prefix may have been missed. Standard error tells of lost connections, and
    once they are back whether changes may have been missed and what KEY holds.
    """
    name = _key(key, key_base64)

    async def watch(store: StateStoreClient) -> bool:
        seen = 0
        async with store.observe_prefix(name) if prefix else store.observe(name) as changes:
            note(f"watching '{shown(name)}{'*' if prefix else ''}', Ctrl-C ends")
            if not prefix and name.endswith(b"*"):
                note(f"KEY is no pattern; for every key that begins with '{shown(name[:-1])}': --prefix")
            _tell_outages(store, name, None if prefix else changes)
            async for change in changes:
                version = None if change.version is None else str(change.version)
                if as_json:
                    row = {**bytes_fields("key", change.key), "operation": change.operation}
                    row |= {**bytes_fields("value", change.value), "version": version}
                    print_json({**row, "missed": change.missed})
                else:
                    parts = [f"{change.operation:<6}", escape(version or "-")]
                    parts += [shown(change.key)] if prefix else []
                    parts += [] if change.value is None else [shown(change.value)]
                    sys.stdout.write("  ".join(parts) + "\n")
                    sys.stdout.flush()
                seen += 1
                if seen == count:
                    break
        return True

    with contextlib.suppress(KeyboardInterrupt):
        _finish(options, watch)


def _tell_outages(store: StateStoreClient, name: bytes, observation: Observation | None) -> None:
    """Say on standard error when the connection is lost, and how things are once it is back; None: of a prefix."""
    lost_at: float | None = None

    def lost(error: PenstockError) -> None:
        nonlocal lost_at
        if lost_at is None:
            lost_at = time.monotonic()
            note(f"{escape(error.what)}; connecting again")

    def restored(whole: bool) -> None:
        nonlocal lost_at
        seconds = 0.0 if lost_at is None else time.monotonic() - lost_at
        lost_at = None
        if whole:
            missed = "no change was missed"
        elif observation is None:
            missed = f"changes may have been missed; penstock kv scan '{shown(name)}*' prints the keys there are now"
        else:
            missed = "changes that were overwritten meanwhile are not printed"
        note(f"connected again after {seconds:.1f} s: {missed}")
        if observation is not None:
            entry = observation.entry
            now = "does not exist" if entry is None else f"holds {shown(entry.value)}  {escape(str(entry.version))}"
            note(f"'{shown(name)}' now {now}")

    store.on_lost(lost)
    store.on_restored(restored)


@app.command(name="scan")
@connects
def scan_command(
    pattern: Annotated[str, typer.Argument(help="Glob: * ? [ab] [0-9] [!ab] [*].", metavar="PATTERN")] = "*",
    null: Annotated[
        bool, typer.Option("--null", "-0", help="End each key with NUL, byte for byte: for `xargs -0`.")
    ] = False,
    as_json: Json = False,
    *,
    options: BrokerOptions,
) -> None:
    """Print the keys that match PATTERN, one a line; what is no printable text is escaped.

    Quote PATTERN, or the shell takes it for file names. If no key matches, standard error says so and the exit status
    is 1.
    """
    if null and as_json:
        raise ConfigError("kv scan: --null and --json exclude each other", option="--null", do="give one of the two")

    async def scan(store: StateStoreClient) -> bool:
        from penstock.statestore.client.client import as_bytes

        found = False
        name = as_bytes(pattern)
        async for key in store.scan(name):
            found = True
            if as_json:
                print_json(bytes_fields("key", key))
            elif null:
                sys.stdout.buffer.write(key + b"\0")
            else:
                sys.stdout.write(shown(key) + "\n")
        sys.stdout.flush()
        if not found:
            unclosed = "\n  why: '[' without ']' stands for itself" if "[" in pattern.rpartition("]")[2] else ""
            note(f"penstock: no key matches '{shown(name)}'{unclosed}")
        return found

    _finish(options, scan)


app.command(name="lock")(lock_command)
app.command(name="export")(export_command)
app.command(name="import")(import_command)


def _finish(options: BrokerOptions, work: Callable[[StateStoreClient], Awaitable[bool]]) -> None:
    """Do ``work`` with the store and exit 1 where it says so."""
    from penstock.runtime.io.loop import run

    async def main() -> bool:
        async with options.store() as store:
            return await work(store)

    if not run(main()):
        raise typer.Exit(1)


def _key(key: str, is_base64: bool) -> bytes:
    if is_base64:
        try:
            name = base64.b64decode(key.encode(), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"KEY: {key!r} is not base64", option="--base64", why=str(error)) from error
    else:
        name = key.encode("utf-8", "surrogateescape")
    if not name:
        raise ConfigError("KEY: it is empty", why="keys have at least one byte")
    return name


def _write(file: Path, value: bytes) -> None:
    try:
        file.write_bytes(value)
    except OSError as error:
        raise ConfigError(f"kv get: --file {file}: {error.strerror}", option="--file") from error


def _no_key(key: bytes) -> None:
    print_error(PenstockError(f"key '{shown(key)}' is not in the state store"))
