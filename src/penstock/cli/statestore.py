"""`penstock statestore`: attach a state store to another MQTT broker, and repair versions after a wrong clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.node_api import data_dir_option
from penstock.cli.options import DATA_DIR, Commands, StateStoreOptions, connects_to_store, duration_option
from penstock.cli.output import escape, print_json, use_colour
from penstock.statestore.options import OPTIONAL_EXTENSIONS, optional_extension

if TYPE_CHECKING:
    from penstock.runtime.io.files import Durability
    from penstock.statestore.options import StoreOptions
    from penstock.statestore.service.attach import Attachment

__all__ = ["app"]

app = Commands("Attach a state store to any MQTT 5 broker; repair its versions.")


class _Durability(StrEnum):
    DURABLE = "durable"
    FLUSHED = "flushed"
    MEMORY = "memory"


class _Dialect(StrEnum):
    AUTO = "auto"
    SDK = "sdk"
    PUBLISHED = "published"
    OLDER = "older"


def _extension(name: str) -> str:
    try:
        return optional_extension(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _extensions_starting_with(incomplete: str) -> list[str]:
    return [name for name in OPTIONAL_EXTENSIONS if name.startswith(incomplete)]


class _LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@app.add(
    "penstock statestore attach --broker mqtts://broker.example",
)
@connects_to_store
def attach(
    data_dir: Annotated[
        Path, typer.Option(help="Data directory.", envvar="PENSTOCK_DATA_DIR", metavar="DIR")
    ] = DATA_DIR,
    durability: Annotated[
        _Durability,
        typer.Option(
            help="Guarantee of a response: durable (fsynced), flushed (written), memory (none).",
            envvar="PENSTOCK_DURABILITY",
            metavar="WORD",
        ),
    ] = _Durability.DURABLE,
    dialect: Annotated[
        _Dialect,
        typer.Option(help="Format of responses: auto (that of the request), sdk, published or older.", metavar="WORD"),
    ] = _Dialect.AUTO,
    max_keys: Annotated[
        int, typer.Option(help="Largest number of keys; 0 for no limit.", min=0, metavar="N")
    ] = 1_000_000,
    extension: Annotated[
        list[str] | None,
        typer.Option(
            help="Enable an extension; repeatable: " + ", ".join(OPTIONAL_EXTENSIONS) + ".",
            metavar="NAME",
            parser=_extension,
            autocompletion=_extensions_starting_with,
        ),
    ] = None,
    observation_lease: Annotated[
        float,
        duration_option(
            text="End the observations of a client that has sent no request for this time.", at_least_s=1, default="1d"
        ),
    ] = 86_400.0,
    log_level: Annotated[
        _LogLevel, typer.Option(help="debug, info, warning or error.", envvar="PENSTOCK_LOG_LEVEL", metavar="WORD")
    ] = _LogLevel.INFO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when it is ready.")] = False,
    *,
    options: StateStoreOptions,
) -> None:
    """Attach a state store to an MQTT 5 broker, whose clients can then use it.

    The documentation page "Attach a state store to your broker" lists the limits of this mode. The data directory may
    be that of a node that does not run. SIGTERM and Ctrl-C stop it: accepted requests are completed, and the exit
    status is 0.
    """
    from penstock.runtime.io.files import Durability
    from penstock.runtime.io.loop import run, tune_process
    from penstock.runtime.observability import logs
    from penstock.statestore.options import StoreOptions, extensions_named

    logs.configure(logs.LogLevel(log_level.value))
    tune_process()
    chosen = StoreOptions(dialect=dialect.value, max_keys=max_keys, extensions=extensions_named(extension or ()))
    attaching = partial(_attach, options, Durability(durability.value), chosen, observation_lease)
    ready = partial(_say_ready, options.shown, data_dir, durability, as_json=as_json)
    run(_serve(options, data_dir, attaching, ready))


def _attach(
    options: StateStoreOptions, durability: Durability, chosen: StoreOptions, lease_s: float, path: Path
) -> Attachment:
    """Return the store at ``path``, to be attached to the broker."""
    from penstock.mqtt.client import MqttClient
    from penstock.statestore.service.attach import Attachment
    from penstock.statestore.service.service import StateStoreService

    connect = partial(MqttClient, options.broker, **options.credentials())
    service = StateStoreService(path, durability, options=chosen)
    return Attachment(service, connect, client_id=options.client_id or "penstock-statestore", lease_s=lease_s)


def _say_ready(broker: str, data_dir: Path, durability: _Durability, *, as_json: bool) -> None:
    if as_json:
        print_json({"event": "ready", "broker": broker, "data_dir": str(data_dir.absolute())})
        return
    bold, plain = ("\x1b[1m", "\x1b[0m") if use_colour(sys.stdout) else ("", "")
    broker = escape(broker)
    sys.stdout.write(
        f"{bold}state store{plain} is ready at {broker} (stop it with Ctrl-C)\n\n"
        f"  data directory  {escape(str(data_dir))}\n  durability      {durability.value}\n\n"
        f"{bold}Try in another terminal:{plain}\n  penstock kv set --broker {broker} greeting hello\n"
    )
    sys.stdout.flush()


async def _serve(
    options: StateStoreOptions, data_dir: Path, attach: Callable[[Path], Attachment], ready: Callable[[], None]
) -> None:
    """Serve until a signal arrives, or the attachment ends."""
    import asyncio
    from contextlib import AsyncExitStack

    from penstock.node.data_dir import DataDirectory
    from penstock.runtime.io.disk_space import DiskSpace, Writer
    from penstock.runtime.io.loop import install_signal_handlers, run_until

    stop = install_signal_handlers()
    with DataDirectory(data_dir) as directory:
        async with AsyncExitStack() as stack:
            async with options.explained("start the broker, or set its address: --broker mqtt://HOST:PORT"):
                attachment = await run_until(stop, stack.enter_async_context(attach(directory.statestore)))
            if attachment is None:
                return
            directory.keep([directory.statestore])
            space = DiskSpace(directory.path)
            stack.push_async_callback(space.close)
            space.add(
                Writer("writes that need space", attachment.service.refuse_growth, attachment.service.reusable_bytes)
            )
            await space.start()
            ready()
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((stopping, attachment.ended), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if attachment.ended.done():
                raise attachment.ended.result()


@app.add(
    "penstock statestore repair --data-dir /var/lib/penstock",
    "penstock statestore repair --data-dir /var/lib/penstock --apply",
)
def repair(
    data_dir: Annotated[Path, data_dir_option("Data directory of a stopped node.")] = DATA_DIR,
    apply: Annotated[bool, typer.Option("--apply", help="Renumber them. Default: report only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Renumber state store versions that are ahead of the system clock.

    Use it if the clock was wrong, is correct now, and /readyz reports versions ahead of it. These versions are replaced
    by versions of the present time, in the same order, greater than all others and smaller than all later ones. Restart
    clients that hold old versions: their fencing tokens are refused. Back up the data directory first.
    """
    from penstock.errors import StorageError
    from penstock.node.data_dir import DataDirectory
    from penstock.runtime.io.clock import CLOCK_IS_SET_MS, utc, wall_clock_ms
    from penstock.statestore.service.repair import repair_versions

    now_ms = wall_clock_ms()
    if now_ms < CLOCK_IS_SET_MS:
        raise StorageError(
            f"statestore: the system clock shows {utc(now_ms)}",
            why="versions are compared with it, and it is not set",
            hint="set the clock, then run this again",
        )
    if not (data_dir / "format.json").is_file():
        raise StorageError(
            f"{data_dir} is not a data directory of penstock: it has no format.json",
            path=str(data_dir),
            hint="set the data directory of the node: --data-dir DIR",
        )
    with DataDirectory(data_dir) as directory:
        found = repair_versions(directory.statestore, now_ms, apply=apply)
    row = {
        "event": "repair",
        "data_dir": str(data_dir.absolute()),
        "now": utc(now_ms),
        "newest": str(found.newest),
        "newest_after": str(found.clock),
        "versions": found.versions,
        "keys": found.keys,
        "fences": found.fences,
        "changes": found.changes,
        "applied": apply and found.versions > 0,
    }
    if as_json:
        print_json(row)
        return
    if not found.versions:
        sys.stdout.write(f"no version is more than 60 s ahead of the clock ({utc(now_ms)}): nothing to repair\n")
        return
    done = "renumbered" if apply else "ahead of the clock"
    sys.stdout.write(
        f"{escape(str(data_dir))}: {found.versions} versions {done} ({found.keys} keys, {found.fences} prefix fences,"
        f" {found.changes} logged changes)\n"
        f"  clock now       {utc(now_ms)}\n"
        f"  newest version  {found.newest} ({utc(found.newest.wall_ms)})\n"
        f"  {'now         ' if apply else 'would become'}    {found.clock} ({utc(found.clock.wall_ms)})\n"
    )
    if not apply:
        sys.stdout.write("nothing was changed: repeat with --apply\n")
