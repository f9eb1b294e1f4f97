"""`penstock kv`: keys of a state store, over MQTT, against any broker that has one."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from penstock.cli.output import bytes_fields, escape, note, print_error, print_json, print_raw, shown
from penstock.errors import ConfigError, PenstockError, UnavailableError

if TYPE_CHECKING:
    from penstock.statestore.client import StateStoreClient
    from penstock.statestore.hlc import Hlc

__all__ = ["app"]

T = TypeVar("T")

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Read, write and watch keys of a state store.",
)

Broker = Annotated[
    str,
    typer.Option(help="MQTT broker with the state store.", envvar="PENSTOCK_BROKER", metavar="URL", show_default=True),
]
Token = Annotated[
    str | None, typer.Option(help="Fencing token: the version of the SET that acquired the lock.", metavar="HLC")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Key = Annotated[str, typer.Argument(help="The key.", metavar="KEY")]
DEFAULT = "mqtt://127.0.0.1:1883"


@app.command(name="get")
def get_command(key: Key, broker: Broker = DEFAULT, as_json: Json = False) -> None:
    """Write the value of KEY to standard output, byte for byte.

    Exit status 1 when there is no such key.
    """

    async def get(store: StateStoreClient) -> bool:
        entry = await store.get(key)
        if as_json:
            value, version = (None, None) if entry is None else (entry.value, str(entry.version))
            print_json({"key": key, "found": entry is not None, **bytes_fields("value", value), "version": version})
        elif entry is not None:
            print_raw(entry.value)
        else:
            _no_key(key)
        return entry is not None

    _finish(_with_store(broker, get))


@app.command(name="set")
def set_command(
    key: Key,
    value: Annotated[
        str | None, typer.Argument(help="The value; without it, it is read from --file or stdin.", metavar="VALUE")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Take the value from this file, byte for byte.", metavar="PATH")
    ] = None,
    ttl_ms: Annotated[int | None, typer.Option(help="Expire after so many milliseconds.", min=1, metavar="MS")] = None,
    only_new: Annotated[bool, typer.Option("--nx", help="Only where the key does not exist.")] = False,
    only_new_or_equal: Annotated[
        bool, typer.Option("--nex", help="Only where the key does not exist or has this value.")
    ] = False,
    fencing_token: Token = None,
    broker: Broker = DEFAULT,
    as_json: Json = False,
) -> None:
    """Set KEY to VALUE and print the version.

    Exit status 1 when the condition was not met.
    """
    if only_new and only_new_or_equal:
        raise ConfigError("kv set: --nx and --nex exclude each other", option="--nx", do="give one of the two")
    data = _value(value, file)
    token = _token(fencing_token)

    async def set_(store: StateStoreClient) -> bool:
        from penstock.statestore.client import Condition

        condition = Condition.NX if only_new else Condition.NEX if only_new_or_equal else Condition.ALWAYS
        result = await store.set(key, data, condition=condition, ttl_ms=ttl_ms, fencing_token=token)
        version = None if result.version is None else str(result.version)
        if as_json:
            print_json({"key": key, "applied": result.applied, "version": version})
        elif result.applied:
            sys.stdout.write(f"{escape(version or '')}\n")
        else:
            note(
                f"penstock: key '{escape(key)}' was not set\n"
                f"  why: the condition {'--nx' if only_new else '--nex'} is not met;"
                f" the key has version {escape(version or 'unknown')}"
            )
        return result.applied

    _finish(_with_store(broker, set_))


@app.command(name="del")
def del_command(key: Key, fencing_token: Token = None, broker: Broker = DEFAULT, as_json: Json = False) -> None:
    """Delete KEY.

    Exit status 1 when there is no such key.
    """
    token = _token(fencing_token)

    async def delete(store: StateStoreClient) -> bool:
        deleted = await store.delete(key, fencing_token=token)
        if as_json:
            print_json({"key": key, "deleted": deleted})
        elif not deleted:
            _no_key(key)
        return deleted > 0

    _finish(_with_store(broker, delete))


@app.command(name="watch")
def watch_command(
    key: Key,
    count: Annotated[int | None, typer.Option(help="End after so many changes.", min=1, metavar="N")] = None,
    broker: Broker = DEFAULT,
    as_json: Json = False,
) -> None:
    """Print each change of KEY as it happens, until Ctrl-C.

    A line is the operation (SET or DELETE), the version and the value. A lost connection is opened again, and a change
    that happened meanwhile is printed then.
    """

    async def watch(store: StateStoreClient) -> bool:
        seen = 0
        async with store.observe(key) as changes:
            note(f"watching '{escape(key)}', Ctrl-C ends")
            async for change in changes:
                version = None if change.version is None else str(change.version)
                if as_json:
                    row = {"key": key, "operation": change.operation, **bytes_fields("value", change.value)}
                    print_json({**row, "version": version})
                else:
                    value = "" if change.value is None else f"  {shown(change.value)}"
                    sys.stdout.write(f"{change.operation:<6}  {escape(version or '-')}{value}\n")
                    sys.stdout.flush()
                seen += 1
                if seen == count:
                    break
        return True

    with contextlib.suppress(KeyboardInterrupt):
        _finish(_with_store(broker, watch))


async def _with_store(broker: str, work: Callable[[StateStoreClient], Awaitable[T]]) -> T:
    async with contextlib.AsyncExitStack() as stack:
        try:
            store = await stack.enter_async_context(_store(broker))
        except UnavailableError as error:
            raise UnavailableError(
                error.what,
                applied=False,
                why=error.why,
                do="start a node (penstock up), or name its MQTT listener: --broker mqtt://HOST:PORT",
            ) from error
        return await work(store)


@contextlib.asynccontextmanager
async def _store(broker: str) -> AsyncIterator[StateStoreClient]:
    from penstock.statestore.client import StateStoreClient

    async with StateStoreClient.connect(broker, client_id=f"penstock-kv-{secrets.token_hex(6)}") as store:
        yield store


def _finish(work: Awaitable[bool]) -> None:
    """Run ``work`` and exit 1 where it says so."""
    from penstock.runtime.loop import run

    async def main() -> bool:
        return await work

    if not run(main()):
        raise typer.Exit(1)


def _value(value: str | None, file: Path | None) -> bytes:
    if value is not None and file is not None:
        raise ConfigError("kv set: a VALUE and --file exclude each other", option="--file", do="give one of the two")
    if file is not None:
        try:
            return file.read_bytes()
        except OSError as error:
            raise ConfigError(f"kv set: --file {file}: {error.strerror}", option="--file") from error
    if value is not None:
        return value.encode("utf-8", "surrogateescape")
    if sys.stdin.isatty():
        raise ConfigError("kv set: no value", do="give a VALUE, or --file PATH, or pipe it in")
    return sys.stdin.buffer.read()


def _token(text: str | None) -> Hlc | None:
    if text is None:
        return None
    from penstock.statestore.hlc import parse

    token = parse(text)
    if token is None:
        raise ConfigError(
            f"--fencing-token: got {text!r}, expected a version as `kv set` prints it: MILLISECONDS:COUNTER:NODE",
            option="--fencing-token",
        )
    return token


def _no_key(key: str) -> None:
    print_error(PenstockError(f"key '{key}' is not in the state store"))
