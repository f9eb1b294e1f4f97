"""`penstock kv`: keys of a state store, over MQTT, with any broker that has one."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.broker_options import BrokerOptions, Token, connects, parse_token
from penstock.cli.kv_transfer import export_command, import_command
from penstock.cli.options import command_group, given_bytes
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
    from penstock.statestore.client.lock import Lease
    from penstock.statestore.client.observation import Observation
    from penstock.statestore.hlc import Hlc

__all__ = ["app", "lock_command"]

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


END_S = 5.0
"""How long the command may take to end after SIGTERM, once the lock is lost; then it is killed."""

NOT_FOUND, NOT_EXECUTABLE, SIGNALLED = 127, 126, 128
"""Exit statuses as shells give them."""


@app.command(name="lock")
@connects
def lock_command(
    name: Annotated[str, typer.Argument(help="The lock: a key.", metavar="NAME")],
    command: Annotated[
        list[str], typer.Argument(help="What to run while the lock is held, after --.", metavar="COMMAND")
    ],
    ttl_ms: Annotated[
        int, typer.Option(help="How long the lock stays taken should this process die.", min=100, metavar="MS")
    ] = 10_000,
    wait: Annotated[
        float | None, typer.Option(help="Give up after so many seconds, default: never.", min=0.0, metavar="SECONDS")
    ] = None,
    nonblock: Annotated[bool, typer.Option("--nonblock", "-n", help="Give up at once where another holds it.")] = False,
    conflict_exit_code: Annotated[
        int, typer.Option("--conflict-exit-code", "-E", help="Exit status then.", min=0, max=255, metavar="N")
    ] = 1,
    holder: Annotated[
        str | None, typer.Option(help="Who holds it, default: host, process and a number.", metavar="TEXT")
    ] = None,
    *,
    options: BrokerOptions,
) -> None:
    """Run COMMAND while the lock NAME is held; its exit status is this one's.

    COMMAND finds the fencing token in PENSTOCK_FENCING_TOKEN (which `penstock kv set` and `del` use by themselves), the
    lock's name in PENSTOCK_LOCK and the broker in PENSTOCK_BROKER. The lock is renewed until COMMAND ends. Where it is
    lost all the same, COMMAND gets SIGTERM, 5 seconds later SIGKILL, and the exit status is 1.
    """
    if nonblock and wait is not None:
        raise ConfigError(
            "kv lock: --nonblock and --wait exclude each other", option="--wait", do="give one of the two"
        )
    from penstock.runtime.io.loop import run

    status = run(_lock(name, command, ttl_ms, 0.0 if nonblock else wait, conflict_exit_code, holder, options))
    if status:
        raise typer.Exit(status)


async def _lock(
    name: str,
    command: list[str],
    ttl_ms: int,
    wait_s: float | None,
    conflict: int,
    holder: str | None,
    options: BrokerOptions,
) -> int:
    from penstock.statestore.client.lock import Lease
    from penstock.statestore.errors import LockHeldError

    unique = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    environment = os.environ | {"PENSTOCK_BROKER": options.broker, "PENSTOCK_LOCK": name}
    async with options.store() as store:
        lease = Lease(store, name.encode("utf-8", "surrogateescape"), holder=holder or unique, ttl_ms=ttl_ms)
        try:
            return await lease.run(lambda token: _run(command, token, environment, lease), timeout_s=wait_s)
        except LockHeldError as error:
            print_error(error)
            return conflict


async def _run(command: list[str], token: Hlc, environment: dict[str, str], lease: Lease) -> int:
    """Run ``command`` to its end; its exit status. Cancelled, end it first."""
    import asyncio

    loop = asyncio.get_running_loop()
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env={**environment, "PENSTOCK_FENCING_TOKEN": str(token)}
        )
    except OSError as error:
        note(f"penstock: {command[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE

    def forward(number: int) -> None:
        # At a terminal the command gets Ctrl-C from there.
        if process.returncode is None and not (number == signal.SIGINT and sys.stdin.isatty()):
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, forward, number)
    try:
        status = await process.wait()
        return status if status >= 0 else SIGNALLED - status
    except asyncio.CancelledError:
        note(f"penstock: the lock was lost, ending the command (process {process.pid})\n  why: {lease.lost_why}")
        with contextlib.suppress(ProcessLookupError):  # it ended in the same moment
            process.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
