"""`penstock tube broker`: one more broker for a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import print_json
from penstock.cli.tube_common import MASTER, Master
from penstock.errors import ConfigError

__all__ = ["broker"]


def broker(
    broker_id: Annotated[int, typer.Option(help="Its number, different for each broker.", min=1, metavar="N")],
    tube_master: Master = MASTER,
    data_dir: Annotated[Path, typer.Option(help="Where its log is kept.", metavar="PATH")] = Path("penstock-broker"),
    bind: Annotated[str, typer.Option(help="Where clients connect; port 0: a free one.", metavar="HOST:PORT")] = (
        "127.0.0.1:0"
    ),
    advertise: Annotated[
        str | None, typer.Option(help="Where clients reach it, if that is another address.", metavar="HOST:PORT")
    ] = None,
    http: Annotated[
        str, typer.Option(help="Its administration; port 0: a free one.", metavar="HOST:PORT")
    ] = "127.0.0.1:0",
    durability: Annotated[str, typer.Option(help="durable, flushed or memory.", metavar="WORD")] = "durable",
    users: Annotated[
        Path | None,
        typer.Option(help="File of the cluster's users, name:password lines; default: anybody.", metavar="PATH"),
    ] = None,
    username: Annotated[
        str | None,
        typer.Option(
            help="User as which it signs to the master, where the cluster has users.",
            envvar="PENSTOCK_TUBE_USERNAME",
            metavar="NAME",
        ),
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(
            help="File whose first line is the password.", envvar="PENSTOCK_TUBE_PASSWORD_FILE", metavar="PATH"
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", metavar="WORD")] = "info",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON once it is ready.")] = False,
) -> None:
    """Run a tube broker alone, at the master of another node.

    It learns its topics from the master. SIGTERM and Ctrl-C drain what was accepted and exit 0.
    """
    from penstock.node.broker import BrokerSettings, ReadyBroker, run_broker
    from penstock.runtime.addresses import Address, parse_address
    from penstock.runtime.durability import Durability
    from penstock.runtime.login import Login
    from penstock.runtime.logs import LogLevel

    def address(option: str, text: str) -> Address:
        try:
            return parse_address(text.strip())
        except ValueError as error:
            raise ConfigError(f"{option}: got {text!r}, {error}", option=option) from error

    if durability not in set(Durability):
        raise ConfigError(
            f"--durability: got {durability!r}", option="--durability", do="write durable, flushed or memory"
        )

    if log_level not in set(LogLevel):
        raise ConfigError(
            f"--log-level: got {log_level!r}", option="--log-level", do="write debug, info, warning or error"
        )

    def show(ready: ReadyBroker) -> None:
        if as_json:
            print_json(ready.as_json())
            return
        sys.stdout.write(
            f"broker {ready.broker_id} is ready\n"
            f"  tube broker     {ready.tube_broker}\n  administration  http://{ready.tube_broker_http}/broker.htm\n"
        )
        sys.stdout.flush()

    settings = BrokerSettings(
        broker_id,
        [address("--tube-master", text) for text in tube_master.split(",")],
        data_dir,
        address("--bind", bind),
        address("--http", http),
        None if advertise is None else address("--advertise", advertise),
        Durability(durability),
        users=users,
        user=None if username is None else (username, Login(username, password_file).password() or ""),
    )
    run_broker(settings, log_level=LogLevel(log_level), on_ready=show)
