"""`penstock up`: run a node until it is interrupted."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock import compiled
from penstock.cli.options import DATA_DIR, Commands
from penstock.cli.output import escape, print_json, use_colour
from penstock.cli.parameters import completes, source_of

if TYPE_CHECKING:
    from penstock.node.config.node import NodeConfig
    from penstock.node.node import ReadyNode

__all__ = ["app"]

app = Commands()


def _option(flag: str, text: str, default: str, metavar: str, words: Iterable[str] = ()) -> Any:
    variable, complete = "PENSTOCK_" + flag.upper().replace("-", "_"), completes(words) if words else None
    return typer.Option(
        f"--{flag}", help=text, envvar=variable, metavar=metavar, show_default=default, autocompletion=complete
    )


def _listen(flag: str, text: str, default: str) -> Any:
    return _option(flag, f"Address of {text}; port 0 for any free port.", default, "HOST:PORT")


def _anonymous(flag: str, text: str) -> Any:
    help_text = f"allow: accept clients without credentials at {text}, from other machines as well."
    return _option(f"{flag}-anonymous", help_text, "only without users, on loopback", "WORD", ["allow"])


def _advertise(flag: str, text: str) -> Any:
    return _option(f"{flag}-advertise", f"Address for clients of {text}.", f"as --{flag}", "HOST:PORT")


@app.add(
    "penstock up",
    "penstock up --config penstock.yaml --data-dir /var/lib/penstock",
    "penstock up --mqtt 0.0.0.0:1883 --passwords passwords",
    "penstock up --profile aio",
)
def up(
    ctx: typer.Context,
    config: Annotated[
        Path | None, _option("config", "Configuration file.", "penstock.yaml, if it exists", "FILE")
    ] = None,
    profile: Annotated[
        str | None,
        _option("profile", "Settings to add: aio, for applications of Azure IoT Operations.", "none", "WORD", ["aio"]),
    ] = None,
    data_dir: Annotated[str | None, _option("data-dir", "Data directory.", "./penstock-data", "DIR")] = None,
    durability: Annotated[
        str | None,
        _option(
            "durability",
            "Guarantee of an acknowledgement: durable (fsynced), flushed (written), memory (none).",
            "durable",
            "WORD",
            ["durable", "flushed", "memory"],
        ),
    ] = None,
    mqtt: Annotated[str | None, _listen("mqtt", "MQTT 5", "127.0.0.1:1883")] = None,
    tube_master: Annotated[str | None, _listen("tube-master", "the TubeMQ master", "127.0.0.1:8715")] = None,
    tube_broker: Annotated[str | None, _listen("tube-broker", "the TubeMQ broker", "127.0.0.1:8123")] = None,
    tube_broker_http: Annotated[
        str | None, _listen("tube-broker-http", "the TubeMQ broker's administration", "127.0.0.1:8081")
    ] = None,
    http: Annotated[str | None, _listen("http", "HTTP (health, metrics, administration)", "127.0.0.1:8080")] = None,
    mqtt_advertise: Annotated[str | None, _advertise("mqtt", "MQTT")] = None,
    tube_master_advertise: Annotated[str | None, _advertise("tube-master", "the TubeMQ master")] = None,
    tube_broker_advertise: Annotated[str | None, _advertise("tube-broker", "the TubeMQ broker")] = None,
    tube_broker_http_advertise: Annotated[
        str | None, _advertise("tube-broker-http", "the TubeMQ broker's administration")
    ] = None,
    http_advertise: Annotated[str | None, _advertise("http", "HTTP")] = None,
    mqtt_anonymous: Annotated[str | None, _anonymous("mqtt", "MQTT")] = None,
    tube_master_anonymous: Annotated[str | None, _anonymous("tube-master", "the TubeMQ master")] = None,
    tube_broker_anonymous: Annotated[str | None, _anonymous("tube-broker", "the TubeMQ broker")] = None,
    tube_broker_http_anonymous: Annotated[
        str | None, _anonymous("tube-broker-http", "the TubeMQ broker's administration, for queries")
    ] = None,
    http_anonymous: Annotated[str | None, _anonymous("http", "HTTP, for queries and metrics")] = None,
    passwords: Annotated[
        str | None, _option("passwords", "Password file, as written by `penstock user`.", "no users", "FILE")
    ] = None,
    policies: Annotated[
        str | None, _option("policies", "Policy file: permissions of users.", "all permissions", "FILE")
    ] = None,
    mqtt_faults: Annotated[
        str | None,
        _option("mqtt-faults", "Additional MQTT listener with fault injection, for tests.", "none", "HOST:PORT"),
    ] = None,
    log_level: Annotated[
        str | None,
        _option("log-level", "debug, info, warning or error.", "info", "WORD", ["debug", "info", "warning", "error"]),
    ] = None,
    log_format: Annotated[str | None, _option("log-format", "text or json.", "text", "WORD", ["text", "json"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when the node is ready.")] = False,
) -> None:
    """Run a node: MQTT broker, state store, TubeMQ and rules in one process.

    Options override environment variables, these override the configuration file. SIGTERM and Ctrl-C stop the node:
    accepted requests are completed, and the exit status is 0; a second signal stops it immediately. SIGHUP reloads
    certificates, passwords, policies and limits.
    """
    given = locals()
    from penstock.node.config.node import OPTIONS, load_config

    flags: dict[str, str | None] = {}
    for option in OPTIONS:
        name = option.flag.replace("-", "_")
        # Values from the environment are read by load_config, so that errors name the variable.
        flags[option.flag] = given[name] if source_of(ctx, name) == "COMMANDLINE" else None

    def read() -> NodeConfig:
        return load_config(config, flags, os.environ)

    settings = read()

    from penstock.node.process import run_node

    users = settings.security.passwords is not None
    show = (lambda ready: print_json(ready.as_json())) if as_json else (lambda ready: _banner(ready, users=users))
    run_node(settings, on_ready=show, read_again=read)


def _banner(ready: ReadyNode, *, users: bool) -> None:
    if not ready.tube_master:  # a cluster without it
        sys.stdout.write(
            f"penstock {ready.version} is active (pid {ready.pid}): mqtt {ready.mqtt}, http {ready.http}\n"
        )
        sys.stdout.flush()
        return
    bold, plain = ("\x1b[1m", "\x1b[0m") if use_colour(sys.stdout) else ("", "")
    url = ready.listeners.get("mqtt", f"mqtt://{ready.mqtt}")
    broker = "" if url == "mqtt://127.0.0.1:1883" else f" --broker {url}"
    if url.startswith(("mqtts:", "wss:")):
        broker += " --ca-file FILE"
    aio = ""
    if "aio" in ready.listeners:
        where = "" if ready.data_dir == str(DATA_DIR.absolute()) else f" --data-dir {shlex.quote(ready.data_dir)}"
        aio = f"  penstock aio env{where} --client-id my-app    # variables for an application\n"
    master = "" if ready.tube_master == "127.0.0.1:8715" else f" --tube-master {ready.tube_master}"
    web = "" if ready.http == "127.0.0.1:8080" else f" --http {ready.http}"
    watched = "penstock status, penstock top"
    if ready.http_tls:
        web = f" --http https://{ready.http} --ca-file FILE"
        watched = "penstock status or top, with --ca-file FILE"
    listeners = "\n                  ".join(ready.listeners.values()) or f"mqtt://{ready.mqtt}"
    secured = ""
    if ready.tube_master_tls is not None:
        secured = f"\n                  TLS: master {ready.tube_master_tls}, broker {ready.tube_broker_tls}"
    token = "tube.admin_token of the configuration" if ready.admin_token_file is None else ready.admin_token_file
    login = " (add --username NAME --password-file FILE)" if users else ""
    page = "https" if ready.http_tls else "http"
    broker_page = "https" if ready.tube_broker_http_tls else "http"
    sys.stdout.write(
        f"""{bold}penstock {ready.version}{plain} is ready (pid {ready.pid}, core {compiled.form()}; Ctrl-C stops it)

  data directory  {escape(ready.data_dir)}
  durability      {ready.durability}
  MQTT 5          {listeners}
  TubeMQ          master {ready.tube_master}, broker {ready.tube_broker}{secured}
  console         {ready.http_url or f"{page}://{ready.http}/"}
                  (in a terminal: {watched})
  administration  {page}://{ready.http}/webapi.htm (master)
                  {broker_page}://{ready.tube_broker_http}/broker.htm (broker)
                  token in {escape(token)}
  health          {page}://{ready.http}/readyz
                  {page}://{ready.http}/metrics

{bold}Try in another terminal{login}:{plain}
  penstock kv set{broker} greeting hello
  penstock kv get{broker} greeting
  penstock tube topic create{web} events
  penstock tube produce{master} events hello
  penstock tube consume{master} events
{aio}
"""
    )
    sys.stdout.flush()
