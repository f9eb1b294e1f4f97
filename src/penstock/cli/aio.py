"""`penstock aio`: settings of applications of Azure IoT Operations."""

from __future__ import annotations

import secrets
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Commands, Json
from penstock.cli.output import print_json
from penstock.errors import UnavailableError

__all__ = ["app"]

app = Commands("Connect applications of Azure IoT Operations to a node.")


@app.add(
    "penstock aio env --client-id line-3",
    "penstock aio env --data-dir /var/lib/penstock --json",
    name="env",
)
def env(
    data_dir: Annotated[
        Path,
        typer.Option(help="Data directory of the node.", envvar="PENSTOCK_DATA_DIR", metavar="DIR"),
    ] = Path("penstock-data"),
    client_id: Annotated[
        str | None,
        typer.Option(help="MQTT client identifier of the application. Default: a random one.", metavar="ID"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the environment variables with which an application connects to a node with the profile aio.

    The SDKs of Azure IoT Operations read them. In a shell: eval "$(penstock aio env --client-id line-3)". Each
    application needs its own client identifier: a second connection with the same one ends the first.
    """
    from penstock.mqtt.url import parse_broker_url
    from penstock.node.config.profiles import AIO_LISTENER, AioFiles
    from penstock.node.data_dir import running_node

    node = running_node(data_dir)
    listener = None if node is None else node.get("listeners", {}).get(AIO_LISTENER)
    if listener is None:
        raise UnavailableError(
            f"no node with the profile aio runs in the data directory {data_dir}",
            applied=False,
            why="the directory is not in use by a node" if node is None else "the node has no listener 'aio'",
            do=f"start one: penstock up --profile aio --data-dir {shlex.quote(str(data_dir))}",
        )
    url = parse_broker_url(listener)
    files = AioFiles(data_dir.absolute())
    variables = {
        "AIO_BROKER_HOSTNAME": url.host,
        "AIO_BROKER_TCP_PORT": str(url.port),
        "AIO_MQTT_USE_TLS": "true",
        "AIO_MQTT_CLIENT_ID": client_id or f"aio-{secrets.token_hex(6)}",
        "AIO_TLS_CA_FILE": str(files.authority),
        "AIO_SAT_FILE": str(files.token),
    }
    if as_json:
        print_json(variables)
        return
    for name, value in variables.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
