"""`penstock context`: named addresses and credentials of nodes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.context_file import (
    ADDRESSES,
    FIELDS,
    NO_CONTEXT,
    Contexts,
    complete_context,
    contexts_path,
    read_contexts,
    write_contexts,
)
from penstock.cli.options import Commands, Json, Yes, confirmed, shared_options
from penstock.cli.output import note, print_table
from penstock.errors import ConfigError

__all__ = ["app"]

app = Commands("""Manage contexts: named addresses and credentials of nodes.

    A command uses the context of `penstock --context NAME …`, of PENSTOCK_CONTEXT, or the current one. An option has
    precedence over an environment variable, both over the context, and the context over the default. The credentials of
    a context are used with its own addresses only: if an address or a credential is set elsewhere, none of them is.""")

Name = Annotated[str, typer.Argument(help="Name of the context.", metavar="NAME")]
Known = Annotated[str, typer.Argument(help="Name of the context.", metavar="NAME", autocompletion=complete_context)]


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """The values of a context; see :data:`penstock.cli.context_file.FIELDS`."""

    broker: Annotated[
        str | None, typer.Option(help="MQTT broker: mqtt://HOST[:PORT], mqtts://, ws:// or wss://.", metavar="URL")
    ] = None
    http: Annotated[
        str | None, typer.Option(help="HTTP address of the node; https://HOST:PORT with TLS.", metavar="HOST:PORT")
    ] = None
    tube_master: Annotated[
        str | None, typer.Option(help="TubeMQ master; several, separated by commas.", metavar="HOST:PORT")
    ] = None
    tube_broker_http: Annotated[
        str | None, typer.Option(help="HTTP addresses of the TubeMQ brokers.", metavar="HOST:PORT")
    ] = None
    username: Annotated[str | None, typer.Option(help="User name.", metavar="NAME")] = None
    password_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the password.", metavar="FILE")
    ] = None
    admin_token_file: Annotated[
        Path | None, typer.Option(help="File with the administration token.", metavar="FILE")
    ] = None
    ca_file: Annotated[Path | None, typer.Option(help="PEM file of the trusted authorities.", metavar="FILE")] = None
    cert_file: Annotated[Path | None, typer.Option(help="PEM file of the client certificate.", metavar="FILE")] = None
    key_file: Annotated[Path | None, typer.Option(help="PEM file of its key.", metavar="FILE")] = None
    tls: Annotated[
        bool | None,
        typer.Option("--tls/--no-tls", help="Connect to TubeMQ with or without TLS.", show_default=False),
    ] = None

    def values(self) -> dict[str, str | bool]:
        """Return what is set; names of files become absolute.

        Raises:
            ConfigError: no address is set, or one has a password.
        """
        found: dict[str, str | bool] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                found[each.name] = str(value.absolute()) if isinstance(value, Path) else value
        if not found.keys() & ADDRESSES.keys():
            raise ConfigError("a context needs an address", hint="set --broker, --http or --tube-master")
        if self.broker is not None:
            from penstock.mqtt.url import parse_broker_url

            if parse_broker_url(self.broker).password is not None:
                raise ConfigError(
                    "--broker contains a password, which a context does not store",
                    option="--broker",
                    hint="put the password into a file: --username NAME --password-file FILE",
                )
        return found


@app.add("penstock context list", name="list")
def list_command(as_json: Json = False) -> None:
    """List the contexts. The current one, which commands use by default, has a star."""
    found = read_contexts()
    rows: list[dict[str, str | bool | None]] = []
    for name, context in found.contexts.items():
        is_current = name == found.current
        current = is_current if as_json else "*" if is_current else ""
        rows.append({"current": current, "context": name, **{key: context.get(key) for key in FIELDS}})
    if not rows:
        note(f"there are no contexts in {contexts_path()}")
    shown = [key for key in FIELDS if any(row[key] is not None for row in rows)]
    for row in rows if not as_json else ():
        row.update({key: "-" for key in shown if row[key] is None})
    print_table(rows, ["current", "context", *(FIELDS if as_json else shown)], as_json=as_json)


@app.add(
    "penstock context add plant --broker mqtts://plant.example:8883 --username ann",
    "penstock context add lab --broker lab.example --http lab.example:8080",
)
@shared_options(ContextOptions, "options")
def add(name: Name, *, options: ContextOptions) -> None:
    """Create the context NAME. The first one becomes the current one.

    Passwords and tokens stay in their files. Exit status 2 if the context exists.
    """
    found = read_contexts()
    if name in found.contexts:
        raise ConfigError(f"context {name!r} exists", hint=f"remove it first: penstock context remove {name}")
    if name == NO_CONTEXT or not name.isprintable() or not name:
        raise ConfigError(f"{name!r} cannot be the name of a context", why=f"{NO_CONTEXT!r} means no context")
    contexts = {**found.contexts, name: options.values()}
    write_contexts(Contexts(found.current or name, contexts))


@app.add("penstock context use plant", "penstock context use none")
def use(name: Known) -> None:
    """Make NAME the current context; none: commands use no context by default."""
    found = read_contexts()
    found.selected(name)
    write_contexts(Contexts(None if name == NO_CONTEXT else name, found.contexts))


@app.add("penstock context remove plant")
def remove(name: Known, yes: Yes = False) -> None:
    """Remove the context NAME. The files that it names stay."""
    found = read_contexts()
    found.selected(name)
    if not (yes or confirmed(f"Remove context {name}?")):
        return
    contexts = {each: context for each, context in found.contexts.items() if each != name}
    write_contexts(Contexts(None if found.current == name else found.current, contexts))
