"""`penstock kv lock`: a command that runs while a lock is held, as flock(1) does for one machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.broker import BrokerOptions, connects
from penstock.cli.output import note, print_error
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.statestore.client.lock import Lease
    from penstock.statestore.hlc import Hlc

__all__ = ["lock_command"]

END_S = 5.0
"""How long the command may take to end after SIGTERM, once the lock is lost; then it is killed."""

NOT_FOUND, NOT_EXECUTABLE, SIGNALLED = 127, 126, 128
"""Exit statuses as shells give them."""


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
