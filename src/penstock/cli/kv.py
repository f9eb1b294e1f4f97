"""`penstock kv`: keys of a state store, over MQTT, with any broker that has one.

`export` and `import` copy keys between stores as lines of JSON. A line is an object with ``key`` and ``value``, or
``key_base64`` and ``value_base64`` for bytes that are not text. Export adds ``version``; import uses ``ttl_ms`` if
present and ignores all other fields, since the store assigns versions.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

from penstock.cli.declarations import Argument, Option
from penstock.cli.options import (
    DEFAULT,
    BrokerOptions,
    Commands,
    Json,
    StateStoreOptions,
    Token,
    connects_to_broker,
    connects_to_store,
    duration_option,
    input_bytes,
    parse_token,
    stored_keys,
)
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
from penstock.errors import ConfigError, PenstockError, StorageError

if TYPE_CHECKING:
    from penstock.statestore.client.client import StateStoreClient
    from penstock.statestore.client.locks import Lease
    from penstock.statestore.client.observations import KeyChange, Observation
    from penstock.statestore.hlc import Hlc

__all__ = ["app", "export_command", "import_command", "lock_command"]

app = Commands("Read, write, watch and lock keys of a state store.")

_CREDENTIALS = ("username", "password_file", "ca_file", "cert_file", "key_file")


def complete_key(ctx: Any, incomplete: str) -> list[str]:
    """Shell completion: the first keys of the store that begin with ``incomplete`` and are printable text."""
    return _stored_texts(ctx, incomplete)


def complete_pattern(ctx: Any, incomplete: str) -> list[str]:
    """Shell completion: keys that begin with ``incomplete``; of keys with a further ``/``, the pattern up to it."""
    found = set()
    for key in _stored_texts(ctx, incomplete):
        first, slash, _ = key[len(incomplete) :].partition("/")
        found.add(incomplete + _literal(first) + (f"{slash}*" if slash else ""))
    return sorted(found)


def _literal(text: str) -> str:
    """Return the pattern that only ``text`` matches."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


def _stored_texts(ctx: Any, incomplete: str) -> list[str]:
    # Completion parses the line without environment variables and defaults.
    given: dict[str, Any] = {"broker": DEFAULT}
    for name in ("broker", *_CREDENTIALS):
        value = ctx.params.get(name) or os.environ.get(f"PENSTOCK_{name.upper()}") or ctx.lookup_default(name)
        if value:
            given[name] = Path(value) if name.endswith("_file") else value
    found = stored_keys(StateStoreOptions(**given), _literal(incomplete) + "*")
    texts = (key.decode("utf-8", "replace") for key in found)
    return sorted(text for text in texts if text.isprintable() and "\ufffd" not in text)


Pattern = Annotated[
    str, Argument(help="Glob: * ? [ab] [0-9] [!ab] [*].", metavar="PATTERN", autocompletion=complete_pattern)
]
Key = Annotated[str, Argument(help="Key.", metavar="KEY", autocompletion=complete_key)]
Base64 = Annotated[bool, Option("--base64", help="KEY is base64, for keys that are not text.")]
Value = Annotated[str | None, Argument(help="Value. Default: --file or standard input.", metavar="VALUE")]
ValueFile = Annotated[Path | None, Option(help="Read the value from a file; - for standard input.", metavar="FILE")]


@app.add("penstock kv get line-3/limit", "penstock kv get line-3/image --file image.png", name="get")
@connects_to_store
def get_command(
    key: Key,
    file: Annotated[
        Path | None, Option(help="Write the value to a file; - for standard output.", metavar="FILE")
    ] = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> int:
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

    return _finish(options, get)


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
    only_new: Annotated[bool, Option("--nx", help="Set the key only if it does not exist.")] = False,
    only_new_or_equal: Annotated[
        bool, Option("--nex", help="Set the key only if it does not exist or has this value.")
    ] = False,
    persist: Annotated[
        bool, Option("--persist", help="Keep the key on disk in a store whose durability is memory.")
    ] = False,
    fencing_token: Token = None,
    fence_prefix: Annotated[
        str | None,
        Option(
            help="Protect every key with this prefix by the fencing token (extension prefix-fence).", metavar="TEXT"
        ),
    ] = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> int:
    """Set KEY to VALUE and print the version.

    Exit status 1 if the condition (--nx, --nex) is not met.
    """
    if only_new and only_new_or_equal:
        raise ConfigError("kv set: --nx and --nex exclude each other", option="--nx", hint="use one of them")
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

    return _finish(options, set_, keeps_session=only_new)


@app.add("penstock kv del line-3/limit", name="del")
@connects_to_store
def del_command(
    key: Key,
    fencing_token: Token = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> int:
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

    return _finish(options, delete, keeps_session=True)


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
) -> int:
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

    return _finish(options, vdelete, keeps_session=True)


@app.add("penstock kv watch line-3/limit", "penstock kv watch line-3/ --prefix --json", name="watch")
@connects_to_broker
def watch_command(
    key: Key,
    prefix: Annotated[
        bool, Option("--prefix", help="Watch every key that begins with KEY (extension prefix-observe).")
    ] = False,
    count: Annotated[int | None, Option("--count", "-c", help="Exit after N changes.", min=1, metavar="N")] = None,
    timeout: Annotated[
        float | None, duration_option(text="Exit after this time; with status 1 if --count was not reached.")
    ] = None,
    key_base64: Base64 = False,
    as_json: Json = False,
    *,
    access: BrokerOptions,
) -> int:
    """Print each change of KEY as it happens, until interrupted (Ctrl-C).

    A line has the operation (SET or DELETE), the version and the value; with --prefix the key precedes the value. A
    lost connection is restored, and the last change during the interruption is printed ("missed" is true with --json).
    LOST means that changes below a prefix may have been missed. Interruptions are reported on standard error.
    """
    name = _key(key, key_base64)

    def show(change: KeyChange) -> None:
        version = None if change.version is None else str(change.version)
        if as_json:
            row = {**bytes_fields("key", change.key), "operation": change.operation}
            row |= {**bytes_fields("value", change.value), "version": version}
            print_json({**row, "missed": change.missed})
            return
        parts = [f"{change.operation:<6}", escape(version or "-")]
        parts += [shown(change.key)] if prefix else []
        parts += [] if change.value is None else [shown(change.value)]
        sys.stdout.write("  ".join(parts) + "\n")
        sys.stdout.flush()

    async def watch(store: StateStoreClient) -> bool:
        import asyncio

        seen = 0
        async with store.observe_prefix(name) if prefix else store.observe(name) as changes:
            note(f"watching '{shown(name)}{'*' if prefix else ''}', interrupt with Ctrl-C")
            if not prefix and name.endswith((b"*", b"/")):
                start = shown(name.removesuffix(b"*"))
                note(f"KEY is not a pattern; to watch every key that begins with '{start}' use --prefix")
            _report_outages(store, name, None if prefix else changes)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    async for change in changes:
                        show(change)
                        seen += 1
                        if seen == count:
                            return True
        if count is not None and timeout is not None:
            note(f"penstock: {seen} of {count} changes within {timeout:g} s")
        return count is None

    with contextlib.suppress(KeyboardInterrupt):
        return _finish(StateStoreOptions(*(getattr(access, field.name) for field in fields(access))), watch)
    return 0


def _report_outages(store: StateStoreClient, name: bytes, observation: Observation | None) -> None:
    """Report lost and restored connections on standard error; ``observation`` is None for a prefix."""
    lost_at: float | None = None

    def lost(error: PenstockError) -> None:
        nonlocal lost_at
        if lost_at is None:
            lost_at = time.monotonic()
            note(f"penstock: {escape(error.what)}; reconnecting")

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


@app.add(
    "penstock kv scan 'line-3/*' --limit 20", "penstock kv scan --null | xargs -0 -n 1 penstock kv get", name="scan"
)
@connects_to_store
def scan_command(
    pattern: Pattern = "*",
    limit: Annotated[int | None, Option("--limit", "-n", help="Show at most N keys.", min=1, metavar="N")] = None,
    null: Annotated[bool, Option("--null", "-0", help="End each key with NUL, for `xargs -0`.")] = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> int:
    """Print the keys that match PATTERN, one per line, escaped if they are not printable text.

    Quote PATTERN, so that the shell does not expand it. Exit status 1 if no key matches.
    """
    if null and as_json:
        raise ConfigError("kv scan: --null and --json exclude each other", option="--null", hint="use one of them")

    async def scan(store: StateStoreClient) -> bool:
        from penstock.statestore.client.client import as_bytes

        found = 0
        name = as_bytes(pattern)
        async for key in store.scan(name):
            if found == limit:
                note(f"penstock: more keys match '{shown(name)}' than the {limit} shown: raise --limit or omit it")
                break
            found += 1
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
        return found > 0

    return _finish(options, scan)


def _finish(
    options: StateStoreOptions, work: Callable[[StateStoreClient], Awaitable[bool]], *, keeps_session: bool = False
) -> int:
    """Run ``work`` with the store; return the exit status, 1 if it returns False.

    ``keeps_session``: for requests whose repetition has another answer, since the first one has executed them.
    """
    import asyncio

    async def main() -> bool:
        async with options.store(keeps_session=keeps_session) as store:
            return await work(store)

    done = asyncio.run(main())  # without uvloop, whose import takes longer than it saves in a few requests
    return 0 if done else 1


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
"""Seconds between SIGTERM and SIGKILL after the lock was lost."""

NOT_FOUND, NOT_EXECUTABLE, SIGNALLED = 127, 126, 128
"""Exit statuses that shells use."""


@app.add(
    "penstock kv lock jobs/nightly -- ./nightly.sh",
    "penstock kv lock jobs/nightly --wait 30s --ttl 1m -- ./nightly.sh",
    name="lock",
)
@connects_to_store
def lock_command(
    name: Annotated[str, Argument(help="Name of the lock, a key.", metavar="NAME", autocompletion=complete_key)],
    command: Annotated[list[str], Argument(help="Command to run while the lock is held, after --.", metavar="COMMAND")],
    ttl: Annotated[
        float,
        duration_option(text="The lock expires after this time if the process dies.", at_least_s=0.1, default="10s"),
    ] = 10.0,
    wait: Annotated[
        float | None, duration_option(text="Give up if the lock is not acquired in time. Default: wait forever.")
    ] = None,
    no_wait: Annotated[bool, Option("--no-wait", "-n", help="Give up immediately if the lock is held.")] = False,
    conflict_exit_code: Annotated[
        int,
        Option(
            "--conflict-exit-code", "-E", help="Exit status if the lock was not acquired.", min=0, max=255, metavar="N"
        ),
    ] = 1,
    holder: Annotated[
        str | None,
        Option(help="Value of the lock. Default: host, process id and a random number.", metavar="TEXT"),
    ] = None,
    *,
    options: StateStoreOptions,
) -> int:
    """Run COMMAND while the lock NAME is held, and exit with its status.

    COMMAND gets the fencing token in PENSTOCK_FENCING_TOKEN (used by `penstock kv set` and `kv del`), the name of the
    lock in PENSTOCK_LOCK and the broker in PENSTOCK_BROKER. The lock is renewed until COMMAND ends. If it is lost,
    COMMAND gets SIGTERM, after 5 seconds SIGKILL, and the exit status is 1.
    """
    if no_wait and wait is not None:
        raise ConfigError("kv lock: --no-wait and --wait exclude each other", option="--wait", hint="use one of them")
    from penstock.runtime.io.loop import run

    return run(_lock(name, command, round(ttl * 1000), 0.0 if no_wait else wait, conflict_exit_code, holder, options))


async def _lock(
    name: str,
    command: list[str],
    ttl_ms: int,
    wait_s: float | None,
    conflict: int,
    holder: str | None,
    options: StateStoreOptions,
) -> int:
    import secrets
    import socket

    from penstock.statestore.client.locks import Lease
    from penstock.statestore.errors import LockHeldError

    unique = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    environment = os.environ | {"PENSTOCK_BROKER": options.broker, "PENSTOCK_LOCK": name}
    async with options.store(keeps_session=True) as store:
        lease = Lease(store, name.encode("utf-8", "surrogateescape"), holder=holder or unique, ttl_ms=ttl_ms)
        try:
            return await lease.run(lambda token: _run(command, token, environment, lease), timeout_s=wait_s)
        except LockHeldError as error:
            print_error(error)
            return conflict


async def _run(command: list[str], token: Hlc, environment: dict[str, str], lease: Lease) -> int:
    """Run ``command``; returns its exit status. If cancelled, end the command first."""
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
        # On a terminal the command gets Ctrl-C from the terminal.
        if process.returncode is None and not (number == signal.SIGINT and sys.stdin.isatty()):
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, forward, number)
    try:
        status = await process.wait()
        return status if status >= 0 else SIGNALLED - status
    except asyncio.CancelledError:
        note(f"penstock: the lock was lost, ending the command (process {process.pid})\n  why: {lease.lost_why}")
        with contextlib.suppress(ProcessLookupError):  # the command ended at the same moment
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


AT_ONCE = 20
"""Number of keys read concurrently, with up to three requests each: together less than any Receive Maximum."""
LINES_AT_ONCE = 10_000
"""Number of keys set in one batch, which is in memory."""

MAX_TTL_MS = 2**63 - 1
MOST_SHOWN = 80
"""Maximum characters of an invalid line in an error."""


class ImportLine(NamedTuple):
    """One key to import."""

    key: bytes
    value: bytes
    ttl_ms: int | None


@app.add("penstock kv export > keys.jsonl", "penstock kv export 'line-3/*' --file line-3.jsonl", name="export")
@connects_to_store
def export_command(
    pattern: Pattern = "*",
    file: Annotated[
        Path | None, Option(help="Write to a file. Default, or -: standard output.", metavar="FILE")
    ] = None,
    keys: Annotated[
        Path | None,
        Option(
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

    if file is None:
        run(_export(pattern, wanted, sys.stdout, options))
        return
    with _replaced(file) as out:
        count = run(_export(pattern, wanted, out, options))
    note(f"exported {count} {_keys_word(count)} to {file}")


@app.add("penstock kv import keys.jsonl", "penstock kv import --nx < keys.jsonl", name="import")
@connects_to_store
def import_command(
    file: Annotated[Path | None, Argument(help="JSON lines. Default, or -: standard input.", metavar="FILE")] = None,
    only_new: Annotated[bool, Option("--nx", help="Do not change keys that exist.")] = False,
    fencing_token: Token = None,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
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
        note(f"imported {imported} {_keys_word(imported)}" + (f", skipped {skipped} that exist" if only_new else ""))


def _keys_word(count: int) -> str:
    return "key" if count == 1 else "keys"


async def _export(pattern: str, keys: list[bytes] | None, out: IO[str], options: StateStoreOptions) -> int:
    import asyncio

    count = 0
    async with options.store(keeps_session=True) as store:
        tells = await _supports_expiry(store)
        if not tells:
            note(
                "note: the store does not report expiry, so imported keys never expire: enable the extension ttl,"
                " or omit keys of locks and leases"
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


async def _supports_expiry(store: StateStoreClient) -> bool:
    from penstock.statestore.errors import StateStoreError

    try:
        await store.expiry("penstock/export")
    except StateStoreError:
        return False
    return True


async def _row(store: StateStoreClient, key: bytes, *, with_expiry: bool) -> str | None:
    """Return the line of ``key``; None if it does not exist."""
    import asyncio
    import json

    expiry = None
    entry = None if with_expiry else await store.get(key)
    while with_expiry:
        # A SET between two requests would give the earlier value the expiry of the later one. These are sent together,
        # so that a key that changes often can be read as well.
        before, expiry, entry = await asyncio.gather(store.get(key), store.expiry(key), store.get(key))
        if entry is None or (before is not None and before.version == entry.version):
            break
    if entry is None or (expiry is not None and not expiry.exists):
        return None  # without a time to live, an imported key would not expire
    row: dict[str, object] = {**_only(bytes_fields("key", key)), **_only(bytes_fields("value", entry.value))}
    row["version"] = str(entry.version)
    if expiry is not None and expiry.left_ms is not None:
        # 0 means "expires now", which is not a valid ttl_ms.
        row["ttl_ms"] = max(1, expiry.left_ms)
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
    async with options.store(keeps_session=True) as store:
        while chunk := _chunk(lines):
            writes = [Write.set(line.key, line.value, ttl_ms=line.ttl_ms, condition=condition) for line in chunk]
            try:
                applied = await store.write_many(writes, fencing_token=token, stop=True)
            except WritesRefusedError as error:
                done = imported + sum(error.applied)
                note(f"imported {done} {_keys_word(done)} before this error")
                raise
            except PenstockError:
                note(f"imported at least {imported} keys before this error")
                raise
            imported += sum(applied)
            skipped += len(applied) - sum(applied)
    return imported, skipped


def _chunk(lines: Iterator[ImportLine]) -> list[ImportLine]:
    """Return the next lines to set, each key once."""
    chunk: dict[bytes, ImportLine] = {}
    for line in lines:
        # Of several lines with the same key, only the last one is used.
        chunk[line.key] = line
        if len(chunk) >= LINES_AT_ONCE:
            break
    return list(chunk.values())


def _lines(file: IO[bytes]) -> Iterator[ImportLine]:
    import json

    for number, text in enumerate(file, 1):
        if text.strip():
            try:
                yield _line(json.loads(text))
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"kv import: line {number} cannot be used: {_start_of(text)}",
                    why=_problem(error),
                    hint='write one object per line, as in {"key": "line-3/target", "value": "12.5"};'
                    " bytes that are not text as key_base64, value_base64; nothing was set",
                ) from error


def _problem(error: Exception) -> str:
    from json import JSONDecodeError

    if isinstance(error, JSONDecodeError):
        return f"it is not JSON: {error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}"
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def _start_of(line: bytes) -> str:
    text = shown(line.strip())
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _line(row: Any) -> ImportLine:
    if not isinstance(row, dict):
        raise TypeError("it is JSON, but not an object")
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
        how, conjunction = ("neither", "nor") if text is None else ("both", "and")
        raise ValueError(f"it has {how} {name!r} {conjunction} '{name}_base64'")
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


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    """Yield a file that replaces ``path`` at the end, so that a failure loses no earlier export."""
    import secrets

    path = path.resolve()  # a symbolic link stays
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    replaces = path.is_file() or not path.exists()  # no pipe or device
    try:
        if path.exists():
            path.open("a").close()  # refuse a file that this user may not write
        file = (new if replaces else path).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"kv export: --file {path}: {error.strerror}", option="--file") from error
    if not replaces:
        with file:
            yield file
        return
    try:
        with file:
            if path.exists():
                new.chmod(path.stat().st_mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise StorageError(
            f"kv export: --file {path} cannot be written",
            path=str(path),
            why=error.strerror,
            hint="free disk space, or export to another file system; an earlier export is unchanged",
        ) from error
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def _readable(path: Path | None) -> Iterator[IO[bytes]]:
    """Return the input as a seekable file, since it is read twice; a pipe is copied to a temporary file."""
    import shutil
    import tempfile

    if path is None:
        if sys.stdin.isatty():
            raise ConfigError("kv import: no input", hint="give a FILE, or JSON lines on standard input")
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
