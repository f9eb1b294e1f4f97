"""`penstock aio`: settings of applications of Azure IoT Operations."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.node_api import data_dir_option
from penstock.cli.options import DATA_DIR, Commands, Json
from penstock.cli.output import print_json
from penstock.errors import ConfigError, UnavailableError

__all__ = ["app"]

CONTAINER_DIRECTORY = "/run/penstock"
"""Directory of the authority and the token in a container."""


class Format(StrEnum):
    """Output of `penstock aio env`."""

    SHELL = "shell"
    DOCKER = "docker"


app = Commands("Connect applications of Azure IoT Operations to a node.")


@app.add(
    "penstock aio env --client-id line-3",
    "penstock aio env --data-dir /var/lib/penstock --json",
    "penstock aio env --client-id line-3 --format docker",
    name="env",
)
def env(
    data_dir: Annotated[Path, data_dir_option("Data directory of the node.")] = DATA_DIR,
    client_id: Annotated[
        str | None,
        typer.Option(help="MQTT client identifier of the application. Default: a random one.", metavar="ID"),
    ] = None,
    output: Annotated[
        Format,
        typer.Option(
            "--format",
            help="shell: export statements; docker: options of docker run and podman run, with the host's network.",
            metavar="WORD",
        ),
    ] = Format.SHELL,
    as_json: Json = False,
) -> None:
    """Print the environment variables with which an application connects to a node with the profile aio.

    The SDKs of Azure IoT Operations read them. In a shell: eval "$(penstock aio env --client-id line-3)". Each
    application needs its own client identifier: a second connection with the same one ends the first.

    With --format docker: docker run $(penstock aio env --client-id line-3 --format docker) IMAGE. The options mount the
    authority and the token, and select the user of this process, who may read them.
    """
    from penstock.mqtt.url import parse_broker_url
    from penstock.node.config.profiles import AIO_LISTENER, AioFiles
    from penstock.node.data_dir import running_node, why_unused

    node = running_node(data_dir)
    listener = None if node is None else node.get("listeners", {}).get(AIO_LISTENER)
    if listener is None:
        raise UnavailableError(
            f"no node with the profile aio runs in the data directory {data_dir}",
            applied=False,
            why=why_unused(data_dir) if node is None else "the node has no listener 'aio'",
            hint=f"start one: penstock up --profile aio --data-dir {shlex.quote(str(data_dir))}",
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
    if output is Format.DOCKER:
        sys.stdout.writelines(f"{option}\n" for option in _docker_options(variables))
        return
    for name, value in variables.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")


def _docker_options(variables: Mapping[str, str]) -> Iterator[str]:
    """Return options of docker run, one word each, so that the shell needs no quotes around ``$(…)``.

    Raises:
        ConfigError: a value has characters that the shell would split or expand, or that separate a mount's paths.
    """
    yield "--network=host"
    yield f"--user={os.getuid()}:{os.getgid()}"
    for name, value in variables.items():
        if name.endswith("_FILE"):
            inside = f"{CONTAINER_DIRECTORY}/{Path(value).name}"
            yield f"--volume={_checked_value(name, value, without=':')}:{inside}:ro"
            yield f"--env={name}={inside}"
        else:
            yield f"--env={name}={_checked_value(name, value)}"


def _checked_value(name: str, value: str, without: str = "") -> str:
    if any(character.isspace() or character in "*?[" + without for character in value):
        raise ConfigError(
            f"{name}={value!r} cannot be an option of docker run in $(…)",
            why="it has blanks, or characters with a special meaning",
            hint="use another client identifier or data directory, or --json",
        )
    return value
