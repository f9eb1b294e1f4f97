"""`penstock tube broker`: one more broker for a cluster."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from penstock.cli.options import grouped
from penstock.cli.output import Cell, note, print_json, print_table
from penstock.cli.tube.access import (
    MASTER,
    WEB,
    BrokerHttp,
    Json,
    LoginOptions,
    Master,
    Web,
    administers,
    brokers,
    identifies,
    logs_in,
)
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.node.config.node import Tube
    from penstock.node.config.tube import TubeTls
    from penstock.node.tube_broker import ReadyBroker
    from penstock.runtime.io.files import Durability
    from penstock.runtime.io.network import Address

__all__ = ["Kept", "broker", "fsck", "list_brokers"]

DEFAULT_TLS_PORT = 8124
W = TypeVar("W", bound=StrEnum)


class _Anonymous(StrEnum):
    ALLOW = "allow"


@dataclass(frozen=True, slots=True)
class TlsListener:
    """The listener with TLS beside the plain one."""

    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM of its certificate; with it, it listens with TLS too.", metavar="PATH")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM of its key, not encrypted.", metavar="PATH")] = None
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM of authorities: clients need a certificate of theirs.", metavar="PATH")
    ] = None
    tls_port: Annotated[
        int, typer.Option(help="Port of the TLS listener; 0: a free one.", min=0, max=65535, metavar="PORT")
    ] = DEFAULT_TLS_PORT

    def settings(self) -> TubeTls | None:
        """What the broker is given; None without a certificate. Raises ConfigError where half of it is there."""
        from penstock.node.config.tube import TubeTls

        if self.tls_certificate is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        if self.tls_certificate is None or self.tls_key is None:
            option = "--tls-certificate" if self.tls_certificate is None else "--tls-key"
            raise ConfigError(
                f"{option} is missing", option=option, do="a TLS listener needs a certificate and its key"
            )
        return TubeTls(
            certificate=self.tls_certificate,
            key=self.tls_key,
            client_ca=self.tls_client_ca,
            broker_port=self.tls_port,
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """Limits of the broker; `penstock.node.config.node.BROKER_OPTIONS` says where the configuration file has them."""

    max_store_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes that each store keeps, 64 MiB segments at a time; default: no limit by size.", metavar="N"
        ),
    ] = None
    staging_max_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes staged at most for writes that are exactly once; beyond, tasks are refused. Default: 4 GiB.",
            metavar="N",
        ),
    ] = None
    staging_keep: Annotated[
        str | None,
        typer.Option(
            help="How long rows stay staged that nobody commits, as in 90s, 30m or 12h; default: 24h.", metavar="TEXT"
        ),
    ] = None

    consumer_session_s: Annotated[
        int | None,
        typer.Option(
            help="Seconds after which a silent consumer's partitions are free; as at the master. Default: 30.",
            metavar="N",
        ),
    ] = None

    def limits(self) -> Tube:
        """The same, checked as in the configuration file. Raises ConfigError."""
        from penstock.node.config.node import BROKER_OPTIONS, broker_limits

        return broker_limits({option.flag: getattr(self, option.flag.replace("-", "_")) for option in BROKER_OPTIONS})


@logs_in
@grouped(TlsListener, "listener")
@grouped(Kept, "kept")
def broker(
    listener: TlsListener,
    kept: Kept,
    login: LoginOptions,
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
    topic_durability: Annotated[
        list[str] | None, typer.Option(help="The same for one topic; may be repeated.", metavar="TOPIC=WORD")
    ] = None,
    anonymous: Annotated[
        _Anonymous | None,
        typer.Option(help="allow: accept clients without credentials at --bind, also off loopback.", metavar="WORD"),
    ] = None,
    http_anonymous: Annotated[_Anonymous | None, typer.Option(help="The same for --http.", metavar="WORD")] = None,
    passwords: Annotated[
        Path | None,
        typer.Option(help="Password file of the cluster's users; default: every client is accepted.", metavar="PATH"),
    ] = None,
    policies: Annotated[
        Path | None, typer.Option(help="Policy file; default: every user may do everything.", metavar="PATH")
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the administration token of its HTTP methods, such as the node's; default: its own, in "
            "tube/admin-token.",
            metavar="PATH",
        ),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            help="Exit status 1 where no master takes it for so long; default: try on.", min=0, metavar="SECONDS"
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", metavar="WORD")] = "info",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON once it is ready.")] = False,
) -> None:
    """Run a tube broker alone, at the master of another node, to which it signs and connects as a client does.

    It learns its topics from the master. SIGTERM and Ctrl-C drain what was accepted and exit 0.
    """
    from penstock.node.tube_broker import BrokerSettings, run_broker
    from penstock.runtime.io.files import Durability
    from penstock.runtime.observability.logs import LogLevel
    from penstock.tube.master.admin_token import read_token

    client = login.client()
    limits = kept.limits()
    settings = BrokerSettings(
        broker_id,
        [_address("--tube-master", text) for text in tube_master.split(",")],
        data_dir,
        _address("--bind", bind),
        _address("--http", http),
        None if advertise is None else _address("--advertise", advertise),
        _word("--durability", durability, Durability),
        wait,
        passwords,
        policies,
        anonymous is not None,
        http_anonymous is not None,
        None if client["user"] is None else (client["user"], client["password"] or ""),
        listener.settings(),
        client["tls"],
        None if admin_token_file is None else read_token(admin_token_file),
        limits.max_store_bytes,
        limits.staging.limits,
        dict(_durability_of_topic(text) for text in topic_durability or []),
        limits.consumer_session_s,
    )
    level = _word("--log-level", log_level, LogLevel)
    run_broker(settings, log_level=level, on_ready=lambda ready: _show(ready, as_json=as_json))


@administers
@identifies
def list_brokers(http: Web = WEB, broker_http: BrokerHttp = None, as_json: Json = False) -> None:
    """List the brokers that the master knows."""
    rows: list[dict[str, Cell]] = [
        {
            "broker": broker.id,
            "address": f"{broker.host}:{broker.port}",
            "state": broker.row.get("runStatus"),
            "configuration": broker.row.get("subStatus"),
            "managed": broker.row.get("manageStatus"),
            "http": broker.http,
        }
        for broker in brokers(http, broker_http)
    ]
    print_table(rows, ["broker", "address", "state", "configuration", "managed", "http"], as_json=as_json)


def fsck(
    directory: Annotated[
        Path,
        typer.Argument(
            help="A broker's directory: tube/broker-N in the data directory.", file_okay=False, metavar="DIR"
        ),
    ],
    repair: Annotated[bool, typer.Option("--repair", help="Repair it; damaged bytes are kept beside it.")] = False,
    as_json: Json = False,
) -> None:
    """Check every record in a stopped broker's directory.

    Exit status 1 where something is wrong; what an abrupt end leaves is not: a start puts it right.
    """
    from penstock.tube.storage import fsck as checker

    report = checker.repair(directory) if repair else checker.check(directory)
    totals: dict[str, object] = {
        "stores": report.stores,
        "segments": report.segments,
        "messages": report.messages,
        "bytes": report.bytes,
        "positions": report.positions,
        "lost": report.lost,
        "ok": report.ok,
    }
    rows: list[dict[str, Cell]] = [
        {"kind": found.kind, "lost": found.lost, "path": found.path, "finding": found.text} for found in report.findings
    ]
    if as_json:
        print_json({**totals, "findings": rows})
    else:
        if rows:
            print_table(rows, ["kind", "lost", "path", "finding"], as_json=False)
        note(
            f"{report.messages} messages in {report.segments} segments of {report.stores} stores, "
            f"{report.positions} positions: " + ("sound" if report.ok else f"{report.lost} lost")
        )
        if not report.ok and not repair:
            note("mend what can be mended, and keep the damaged bytes beside it: --repair")
    if not report.ok and not repair:
        raise typer.Exit(1)


def _address(option: str, text: str) -> Address:
    from penstock.runtime.io.network import parse_address

    try:
        return parse_address(text.strip())
    except ValueError as error:
        raise ConfigError(f"{option}: got {text!r}, {error}", option=option) from error


def _word(option: str, text: str, words: type[W]) -> W:
    if text not in set(words):
        *others, last = words
        raise ConfigError(f"{option}: got {text!r}", option=option, do=f"write {', '.join(others)} or {last}")
    return words(text)


def _durability_of_topic(text: str) -> tuple[str, Durability]:
    from penstock.runtime.io.files import Durability
    from penstock.tube.codec.strings import valid_topic

    option = "--topic-durability"
    topic, equals, word = text.partition("=")
    if not equals or not valid_topic(topic):
        raise ConfigError(
            f"{option}: got {text!r}", option=option, do="write a topic and its durability, as in metrics=memory"
        )
    return topic, _word(option, word, Durability)


def _show(ready: ReadyBroker, *, as_json: bool) -> None:
    if as_json:
        print_json(ready.as_json())
        return
    secured = "" if ready.tube_broker_tls is None else f" (TLS {ready.tube_broker_tls})"
    sys.stdout.write(
        f"broker {ready.broker_id} is ready\n"
        f"  tube broker     {ready.tube_broker}{secured}\n"
        f"  administration  http://{ready.tube_broker_http}/broker.htm\n"
    )
    sys.stdout.flush()
