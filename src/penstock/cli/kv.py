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

from penstock.cli.broker_options import StateStoreOptions, Token, connects_to_store, parse_token
from penstock.cli.kv_transfer import export_command, import_command
from penstock.cli.options import Commands, Json, duration_option, input_bytes
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
    from penstock.statestore.client.locks import Lease
    from penstock.statestore.client.observations import Observation
    from penstock.statestore.hlc import Hlc

__all__ = ["app", "lock_command"]

app = Commands("Read, write, watch and lock keys of a state store.")

Key = Annotated[str, typer.Argument(help="Key.", metavar="KEY")]
Base64 = Annotated[bool, typer.Option("--base64", help="KEY is base64, for keys that are not text.")]
Value = Annotated[str | None, typer.Argument(help="Value. Default: --file or standard input.", metavar="VALUE")]
ValueFile = Annotated[
    Path | None, typer.Option(help="Read the value from a file; - for standard input.", metavar="FILE")
]


@app.add("penstock kv get line-3/limit", "penstock kv get line-3/image --file image.png", name="get")
@connects_to_store
def get_command(
    key: Key,
    file: Annotated[
        Path | None, typer.Option(help="Write the value to a file; - for standard output.", metavar="FILE")
    ] = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> None:
    """Write the value of KEY to standard output: unchanged, or escaped on a terminal if it is not text.

    Exit status 1 if the key does not exist.
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


@app.add(
    "penstock kv set line-3/limit 42",
    "penstock kv set line-3/limit 42 --ttl 10m --nx",
    "penstock kv set line-3/image --file image.png",
    name="set",
)
@connects_to_store
def set_command(
    key: Key,
    value: Value = None,
    file: ValueFile = None,
    ttl: Annotated[float | None, duration_option(text="Delete the key after this time.", at_least_s=0.001)] = None,
    only_new: Annotated[bool, typer.Option("--nx", help="Set the key only if it does not exist.")] = False,
    only_new_or_equal: Annotated[
        bool, typer.Option("--nex", help="Set the key only if it does not exist or has this value.")
    ] = False,
    persist: Annotated[
        bool, typer.Option("--persist", help="Keep the key on disk in a store whose durability is memory.")
    ] = False,
    fencing_token: Token = None,
    fence_prefix: Annotated[
        str | None,
        typer.Option(
            help="Protect every key with this prefix by the fencing token (extension prefix-fence).", metavar="TEXT"
        ),
    ] = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> None:
    """Set KEY to VALUE and print the version.

    Exit status 1 if the condition (--nx, --nex) is not met.
    """
    if only_new and only_new_or_equal:
        raise ConfigError("kv set: --nx and --nex exclude each other", option="--nx", do="use one of them")
    name, data, token = _key(key, key_base64), input_bytes("kv set", "VALUE", value, file), parse_token(fencing_token)

    async def set_(store: StateStoreClient) -> bool:
        from penstock.statestore.client.client import Condition

        condition = Condition.NX if only_new else Condition.NEX if only_new_or_equal else Condition.ALWAYS
        result = await store.set(
            name,
            data,
            condition=condition,
            ttl_ms=None if ttl is None else round(ttl * 1000),
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


@app.add("penstock kv del line-3/limit", name="del")
@connects_to_store
def del_command(
    key: Key,
    fencing_token: Token = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> None:
    """Delete KEY.

    Exit status 1 if the key does not exist.
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


@app.add("penstock kv vdel line-3/limit 42", name="vdel")
@connects_to_store
def vdel_command(
    key: Key,
    value: Value = None,
    file: ValueFile = None,
    fencing_token: Token = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> None:
    """Delete KEY if it has VALUE.

    Exit status 1 if the key does not exist or has another value.
    """
    name, data, token = _key(key, key_base64), input_bytes("kv vdel", "VALUE", value, file), parse_token(fencing_token)

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


@app.add("penstock kv watch line-3/limit", "penstock kv watch line-3/ --prefix --json", name="watch")
@connects_to_store
def watch_command(
    key: Key,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Watch every key that begins with KEY (extension prefix-observe).")
    ] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-c", help="Exit after N changes.", min=1, metavar="N")
    ] = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> None:
    """Print each change of KEY as it happens, until interrupted (Ctrl-C).

    A line has the operation (SET or DELETE), the version and the value; with --prefix the key precedes the value. A
    lost connection is restored, and the last change during the interruption is printed ("missed" is true with --json).
    LOST means that changes below a prefix may have been missed. Interruptions are reported on standard error.
    """
    name = _key(key, key_base64)

    async def watch(store: StateStoreClient) -> bool:
        seen = 0
        async with store.observe_prefix(name) if prefix else store.observe(name) as changes:
            note(f"watching '{shown(name)}{'*' if prefix else ''}', interrupt with Ctrl-C")
            if not prefix and name.endswith(b"*"):
                note(f"KEY is not a pattern; to watch every key that begins with '{shown(name[:-1])}' use --prefix")
            _report_outages(store, name, None if prefix else changes)
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


def _report_outages(store: StateStoreClient, name: bytes, observation: Observation | None) -> None:
    """Report lost and restored connections on standard error; ``observation`` is None for a prefix."""
    lost_at: float | None = None

    def lost(error: PenstockError) -> None:
        nonlocal lost_at
        if lost_at is None:
            lost_at = time.monotonic()
            note(f"{escape(error.what)}; reconnecting")

    def restored(whole: bool) -> None:
        nonlocal lost_at
        seconds = 0.0 if lost_at is None else time.monotonic() - lost_at
        lost_at = None
        if whole:
            missed = "no change was missed"
        elif observation is None:
            missed = f"changes may have been missed; list the keys with penstock kv scan '{shown(name)}*'"
        else:
            missed = "only the last of the missed changes is printed"
        note(f"reconnected after {seconds:.1f} s: {missed}")
        if observation is not None:
            entry = observation.entry
            now = "does not exist" if entry is None else f"holds {shown(entry.value)}  {escape(str(entry.version))}"
            note(f"'{shown(name)}' now {now}")

    store.on_lost(lost)
    store.on_restored(restored)


@app.add("penstock kv scan 'line-3/*'", "penstock kv scan --null | xargs -0 -n 1 penstock kv get", name="scan")
@connects_to_store
def scan_command(
    pattern: Annotated[str, typer.Argument(help="Glob: * ? [ab] [0-9] [!ab] [*].", metavar="PATTERN")] = "*",
    null: Annotated[bool, typer.Option("--null", "-0", help="End each key with NUL, for `xargs -0`.")] = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> None:
    """Print the keys that match PATTERN, one per line, escaped if they are not printable text.

    Quote PATTERN, so that the shell does not expand it. Exit status 1 if no key matches.
    """
    if null and as_json:
        raise ConfigError("kv scan: --null and --json exclude each other", option="--null", do="use one of them")

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
            unclosed = "\n  why: '[' without ']' is a literal character" if "[" in pattern.rpartition("]")[2] else ""
            note(f"penstock: no key matches '{shown(name)}'{unclosed}")
        return found

    _finish(options, scan)


app.add("penstock kv export > keys.jsonl", "penstock kv export 'line-3/*' --file line-3.jsonl", name="export")(
    export_command
)
app.add("penstock kv import keys.jsonl", "penstock kv import --nx < keys.jsonl", name="import")(import_command)


def _finish(options: StateStoreOptions, work: Callable[[StateStoreClient], Awaitable[bool]]) -> None:
    """Run ``work`` with the store; exit with 1 if it returns False."""
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
        raise ConfigError("KEY is empty", why="keys have at least one byte")
    return name


def _write(file: Path, value: bytes) -> None:
    try:
        file.write_bytes(value)
    except OSError as error:
        raise ConfigError(f"kv get: --file {file}: {error.strerror}", option="--file") from error


def _no_key(key: bytes) -> None:
    print_error(PenstockError(f"key '{shown(key)}' does not exist"))


END_S = 5.0
"""Time between SIGTERM and SIGKILL after the lock was lost."""

NOT_FOUND, NOT_EXECUTABLE, SIGNALLED = 127, 126, 128
"""Exit statuses as shells give them."""


@app.add(
    "penstock kv lock jobs/nightly -- ./nightly.sh",
    "penstock kv lock jobs/nightly --wait 30s --ttl 1m -- ./nightly.sh",
    name="lock",
)
@connects_to_store
def lock_command(
    name: Annotated[str, typer.Argument(help="Name of the lock, a key.", metavar="NAME")],
    command: Annotated[
        list[str], typer.Argument(help="Command to run while the lock is held, after --.", metavar="COMMAND")
    ],
    ttl: Annotated[
        float,
        duration_option(text="The lock expires after this time if the process dies.", at_least_s=0.1, default="10s"),
    ] = 10.0,
    wait: Annotated[
        float | None, duration_option(text="Give up if the lock is not acquired in time. Default: wait forever.")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", "-n", help="Give up immediately if the lock is held.")] = False,
    conflict_exit_code: Annotated[
        int,
        typer.Option(
            "--conflict-exit-code", "-E", help="Exit status if the lock was not acquired.", min=0, max=255, metavar="N"
        ),
    ] = 1,
    holder: Annotated[
        str | None,
        typer.Option(help="Value of the lock. Default: host, process id and a random number.", metavar="TEXT"),
    ] = None,
    *,
    options: StateStoreOptions,
) -> None:
    """Run COMMAND while the lock NAME is held, and exit with its status.

    COMMAND gets the fencing token in PENSTOCK_FENCING_TOKEN (used by `penstock kv set` and `kv del`), the name of the
    lock in PENSTOCK_LOCK and the broker in PENSTOCK_BROKER. The lock is renewed until COMMAND ends. If it is lost,
    COMMAND gets SIGTERM, after 5 seconds SIGKILL, and the exit status is 1.
    """
    if no_wait and wait is not None:
        raise ConfigError("kv lock: --no-wait and --wait exclude each other", option="--wait", do="use one of them")
    from penstock.runtime.io.loop import run

    status = run(_lock(name, command, round(ttl * 1000), 0.0 if no_wait else wait, conflict_exit_code, holder, options))
    if status:
        raise typer.Exit(status)


async def _lock(
    name: str,
    command: list[str],
    ttl_ms: int,
    wait_s: float | None,
    conflict: int,
    holder: str | None,
    options: StateStoreOptions,
) -> int:
    from penstock.statestore.client.locks import Lease
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
    """Run ``command``; its exit status. If cancelled, end the command first."""
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
