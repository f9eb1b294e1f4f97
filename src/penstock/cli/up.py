"""`penstock up`: run a node until it is told to stop."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock import compiled
from penstock.cli.output import escape, print_json, use_colour

if TYPE_CHECKING:
    from penstock.node.config.node import NodeConfig
    from penstock.node.node import Ready

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def _option(flag: str, text: str, default: str, metavar: str) -> Any:
    variable = "PENSTOCK_" + flag.upper().replace("-", "_")
    return typer.Option(f"--{flag}", help=text, envvar=variable, metavar=metavar, show_default=default)


def _listen(flag: str, text: str, default: str) -> Any:
    return _option(flag, f"Where {text} listens; port 0 takes a free one.", default, "HOST:PORT")


def _anonymous(flag: str, text: str) -> Any:
    words = f"allow: accept clients without credentials at {text}, also off loopback."
    return _option(f"{flag}-anonymous", words, "only without users, on loopback", "WORD")


def _told(flag: str, text: str) -> Any:
    return _option(f"{flag}-advertise", f"What others are told for {text}.", f"as --{flag}", "HOST:PORT")


@app.command()
def up(
    ctx: typer.Context,
    config: Annotated[Path | None, _option("config", "Configuration file.", "penstock.yaml, if there", "FILE")] = None,
    data_dir: Annotated[str | None, _option("data-dir", "Where everything is kept.", "./penstock-data", "PATH")] = None,
    durability: Annotated[
        str | None,
        _option(
            "durability",
            "What an acknowledgement promises: durable (fsynced), flushed (written), memory (at once).",
            "durable",
            "WORD",
        ),
    ] = None,
    mqtt: Annotated[str | None, _listen("mqtt", "MQTT 5", "127.0.0.1:1883")] = None,
    tube_master: Annotated[str | None, _listen("tube-master", "the TubeMQ master", "127.0.0.1:8715")] = None,
    tube_broker: Annotated[str | None, _listen("tube-broker", "the TubeMQ broker", "127.0.0.1:8123")] = None,
    tube_broker_http: Annotated[
        str | None, _listen("tube-broker-http", "the TubeMQ broker's administration", "127.0.0.1:8081")
    ] = None,
    http: Annotated[str | None, _listen("http", "HTTP (health, metrics, administration)", "127.0.0.1:8080")] = None,
    mqtt_advertise: Annotated[str | None, _told("mqtt", "MQTT")] = None,
    tube_master_advertise: Annotated[str | None, _told("tube-master", "the master")] = None,
    tube_broker_advertise: Annotated[str | None, _told("tube-broker", "the broker; tube clients connect to it")] = None,
    tube_broker_http_advertise: Annotated[str | None, _told("tube-broker-http", "the broker's administration")] = None,
    http_advertise: Annotated[str | None, _told("http", "HTTP")] = None,
    mqtt_anonymous: Annotated[str | None, _anonymous("mqtt", "MQTT")] = None,
    tube_master_anonymous: Annotated[str | None, _anonymous("tube-master", "the master")] = None,
    tube_broker_anonymous: Annotated[str | None, _anonymous("tube-broker", "the broker")] = None,
    tube_broker_http_anonymous: Annotated[
        str | None, _anonymous("tube-broker-http", "the broker's administration, for queries")
    ] = None,
    http_anonymous: Annotated[str | None, _anonymous("http", "HTTP, for queries and metrics")] = None,
    passwords: Annotated[
        str | None, _option("passwords", "Password file, as `penstock passwd` writes it.", "no users", "FILE")
    ] = None,
    policies: Annotated[
        str | None, _option("policies", "Policy file: what users may do.", "users may do everything", "FILE")
    ] = None,
    mqtt_faults: Annotated[
        str | None,
        _option(
            "mqtt-faults", "A further MQTT listener that obeys the fault switches; for tests.", "none", "HOST:PORT"
        ),
    ] = None,
    log_level: Annotated[str | None, _option("log-level", "debug, info, warning or error.", "info", "WORD")] = None,
    log_format: Annotated[str | None, _option("log-format", "text or json.", "text", "WORD")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON once all parts are ready.")] = False,
) -> None:
    """Run a node: MQTT broker, state store, tube log and rules in one process.

    A flag goes before its environment variable, that before the configuration file, that before the default. SIGTERM
    and Ctrl-C drain what was accepted and exit 0; a second one ends at once. SIGHUP reads certificates, passwords,
    policies and limits again.
    """
    given = locals()
    from penstock.node.config.node import OPTIONS, load_config

    flags: dict[str, str | None] = {}
    for option in OPTIONS:
        name = option.flag.replace("-", "_")
        # What the parser took from the environment is read there again, so that errors name the right place.
        source = ctx.get_parameter_source(name)
        flags[option.flag] = given[name] if source is not None and source.name == "COMMANDLINE" else None

    def read() -> NodeConfig:
        return load_config(config, flags, os.environ)

    settings = read()

    from penstock.node.run import run_node

    users = settings.security.passwords is not None
    show = (lambda ready: print_json(ready.as_json())) if as_json else (lambda ready: _banner(ready, users=users))
    run_node(settings, on_ready=show, read_again=read)


def _banner(ready: Ready, *, users: bool) -> None:
    bold, plain = ("\x1b[1m", "\x1b[0m") if use_colour(sys.stdout) else ("", "")
    url = ready.listeners.get("mqtt", f"mqtt://{ready.mqtt}")
    broker = "" if url == "mqtt://127.0.0.1:1883" else f" --broker {url}"
    master = "" if ready.tube_master == "127.0.0.1:8715" else f" --tube-master {ready.tube_master}"
    web = "" if ready.http == "127.0.0.1:8080" else f" --http {ready.http}"
    if ready.http_tls:
        web = f" --http https://{ready.http}"
    listeners = "\n                  ".join(ready.listeners.values()) or f"mqtt://{ready.mqtt}"
    secured = ""
    if ready.tube_master_tls is not None:
        secured = f"\n                  TLS: master {ready.tube_master_tls}, broker {ready.tube_broker_tls}"
    token = "tube.admin_token of the configuration" if ready.admin_token_file is None else ready.admin_token_file
    login = " (add --username NAME --password-file FILE)" if users else ""
    page = "https" if ready.http_tls else "http"
    broker_page = "https" if ready.tube_broker_http_tls else "http"
    sys.stdout.write(
        f"""{bold}penstock {ready.version}{plain} is ready (process {ready.pid}, core {compiled.form()}, Ctrl-C ends it)

  data directory  {escape(ready.data_dir)}
  durability      {ready.durability}
  MQTT 5          {listeners}
  TubeMQ          master {ready.tube_master}, broker {ready.tube_broker}{secured}
  administration  {page}://{ready.http}/webapi.htm (master)
                  {broker_page}://{ready.tube_broker_http}/broker.htm (broker)
                  token in {escape(token)}
  health          {page}://{ready.http}/readyz
                  {page}://{ready.http}/metrics

{bold}Try in another terminal{login}:{plain}
  penstock kv set{broker} greeting hello
  penstock kv get{broker} greeting
  penstock tube topics create{web} events
  penstock tube produce{master} events hello
  penstock tube consume{master} events

"""
    )
    sys.stdout.flush()
