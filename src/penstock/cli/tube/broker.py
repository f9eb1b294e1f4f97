"""`penstock tube broker`: run, list and check brokers. `penstock tube staged`: their rows of exactly-once writes."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli.options import Commands, Json, duration_option, shared_options, size_option
from penstock.cli.output import Cell, note, print_json, print_table
from penstock.cli.parameters import completes
from penstock.cli.tube.access import BrokerRow, MasterOptions, TubeConnectionOptions, connects, connects_to_master
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.node.config.node import Tube
    from penstock.node.config.tube import TubeTls
    from penstock.node.tube_broker import ReadyBroker
    from penstock.runtime.io.files import Durability
    from penstock.runtime.io.network import Address

__all__ = ["RetentionOptions", "app", "staged_app"]

DEFAULT_TLS_PORT = 8124
W = TypeVar("W", bound=StrEnum)


app = Commands("Run a broker of a cluster, list the brokers, check the data of a broker.")


class _Anonymous(StrEnum):
    ALLOW = "allow"


@dataclass(frozen=True, slots=True)
class TlsListener:
    """TLS listener in addition to the plain one."""

    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file of the certificate; opens a TLS listener.", metavar="FILE")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key, not encrypted.", metavar="FILE")] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file of authorities; clients then need a certificate of one of them.", metavar="FILE"),
    ] = None
    tls_port: Annotated[
        int, typer.Option(help="Port of the TLS listener; 0 for any free port.", min=0, max=65535, metavar="PORT")
    ] = DEFAULT_TLS_PORT

    def settings(self) -> TubeTls | None:
        """Return the section of the configuration; None without a certificate. Raises ConfigError if a part is
        missing."""
        from penstock.node.config.tube import TubeTls

        if self.tls_certificate is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        if self.tls_certificate is None or self.tls_key is None:
            option = "--tls-certificate" if self.tls_certificate is None else "--tls-key"
            raise ConfigError(
                f"{option} is missing", option=option, hint="set both: a TLS listener needs a certificate and its key"
            )
        return TubeTls(
            certificate=self.tls_certificate,
            key=self.tls_key,
            client_ca=self.tls_client_ca,
            broker_port=self.tls_port,
        )


@dataclass(frozen=True, slots=True)
class RetentionOptions:
    """Limits of the broker; `penstock.node.config.node.BROKER_OPTIONS` has their places in the configuration file."""

    max_store_size: Annotated[
        int | None,
        size_option(text="Size limit of each store; whole 64MiB segments are deleted. Default: no limit."),
    ] = None
    staging_max_size: Annotated[
        int | None,
        size_option(text="Size limit of rows staged for exactly-once writes; beyond it, tasks fail. Default: 4GiB."),
    ] = None
    staging_keep: Annotated[
        float | None, duration_option(text="Delete staged rows that are not committed after this time. Default: 24h.")
    ] = None
    consumer_session: Annotated[
        float | None,
        duration_option(text="Release the partitions of a consumer without heartbeats after this time. Default: 30s."),
    ] = None

    def section(self, limits: list[str]) -> Tube:
        """Return the options and ``limits`` (``NAME=VALUE``) as a section of the configuration. Raises ConfigError."""
        from penstock.node.config.node import tube_section

        keep = None if self.staging_keep is None else f"{round(self.staging_keep)}s"
        session_s = None if self.consumer_session is None else round(self.consumer_session)
        return tube_section(
            {
                "max-store-size": self.max_store_size,
                "staging-max-size": self.staging_max_size,
                "staging-keep": keep,
                "consumer-session": session_s,
            },
            dict(_limit(text) for text in limits),
        )


@app.add(
    "penstock tube broker run --broker-id 2 --data-dir broker-2",
    "penstock tube broker run --broker-id 2 --tube-broker two:8123 --passwords pw",
    name="run",
)
@connects_to_master
@shared_options(TlsListener, "listener")
@shared_options(RetentionOptions, "kept")
def run_command(
    listener: TlsListener,
    kept: RetentionOptions,
    master: MasterOptions,
    broker_id: Annotated[int, typer.Option(help="Id of the broker, unique in the cluster.", min=1, metavar="ID")],
    data_dir: Annotated[Path, typer.Option(help="Data directory.", metavar="DIR")] = Path("penstock-broker"),
    tube_broker: Annotated[
        str, typer.Option(help="Address to listen on for clients; port 0 for any free port.", metavar="HOST:PORT")
    ] = "127.0.0.1:0",
    tube_broker_advertise: Annotated[
        str | None, typer.Option(help="Address for clients, if it differs from --tube-broker.", metavar="HOST:PORT")
    ] = None,
    tube_broker_http: Annotated[
        str,
        typer.Option(
            help="Address of HTTP (health, metrics, administration); port 0 for any free port.", metavar="HOST:PORT"
        ),
    ] = "127.0.0.1:0",
    durability: Annotated[
        str,
        typer.Option(
            help="Guarantee of an acknowledgement: durable, flushed or memory.",
            metavar="WORD",
            autocompletion=completes(["durable", "flushed", "memory"]),
        ),
    ] = "durable",
    topic_durability: Annotated[
        list[str] | None, typer.Option(help="Durability of one topic; repeatable.", metavar="TOPIC=WORD")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--set-limit",
            help="A limit, named as in `tube.limits` of the configuration; repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    tube_broker_anonymous: Annotated[
        _Anonymous | None,
        typer.Option(help="allow: accept clients without credentials at --tube-broker.", metavar="WORD"),
    ] = None,
    tube_broker_http_anonymous: Annotated[
        _Anonymous | None, typer.Option(help="allow: accept queries without credentials by HTTP.", metavar="WORD")
    ] = None,
    passwords: Annotated[
        Path | None,
        typer.Option(help="Password file of the cluster's users. Default: accept every client.", metavar="FILE"),
    ] = None,
    policies: Annotated[
        Path | None, typer.Option(help="Policy file. Default: users have all permissions.", metavar="FILE")
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the administration token, such as the node's. Default: a separate token, in "
            "tube/admin-token.",
            metavar="FILE",
        ),
    ] = None,
    wait: Annotated[
        float | None,
        duration_option(text="Exit with 1 if no master accepts the broker within this time. Default: wait forever."),
    ] = None,
    log_level: Annotated[
        str,
        typer.Option(
            help="debug, info, warning or error.",
            metavar="WORD",
            autocompletion=completes(["debug", "info", "warning", "error"]),
        ),
    ] = "info",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when the broker is ready.")] = False,
) -> None:
    """Run a TubeMQ broker at the master of another node.

    The broker gets its topics from the master, where it authenticates like a client. SIGTERM and Ctrl-C stop it:
    accepted requests are completed, and the exit status is 0. SIGHUP reloads passwords, policies
    and the files of the TLS listener.
    """
    from penstock.node.config.tube import tube_limits
    from penstock.node.tube_broker import BrokerSettings, run_broker
    from penstock.runtime.io.files import Durability
    from penstock.runtime.observability.logs import LogLevel
    from penstock.tube.master.admin_token import read_token

    client = master.client()
    section = kept.section(limit or [])
    settings = BrokerSettings(
        broker_id,
        [_address("--tube-master", text) for text in master.tube_master.split(",")],
        data_dir,
        _address("--tube-broker", tube_broker),
        _address("--tube-broker-http", tube_broker_http),
        None if tube_broker_advertise is None else _address("--tube-broker-advertise", tube_broker_advertise),
        _choice("--durability", durability, Durability),
        wait,
        passwords,
        policies,
        tube_broker_anonymous is not None,
        tube_broker_http_anonymous is not None,
        None if client["username"] is None else (client["username"], client["password"] or ""),
        listener.settings(),
        client["tls"],
        None if admin_token_file is None else read_token(admin_token_file),
        section.max_store_bytes,
        section.staging.limits,
        dict(_durability_of_topic(text) for text in topic_durability or []),
        section.consumer_session_s,
        tube_limits(section.limits),
    )
    level = _choice("--log-level", log_level, LogLevel)
    run_broker(settings, log_level=level, on_ready=lambda ready: _show(ready, as_json=as_json))


@app.add("penstock tube broker list", name="list")
@connects
def list_command(tube: TubeConnectionOptions, as_json: Json = False) -> None:
    """List the brokers that the master knows, with their state and addresses."""
    rows: list[dict[str, Cell]] = [
        {
            "broker": broker.id,
            "address": f"{broker.host}:{broker.port}",
            "state": broker.row.get("runStatus"),
            "configuration": broker.row.get("subStatus"),
            "managed": broker.row.get("manageStatus"),
            "http": broker.http,
        }
        for broker in tube.brokers()
    ]
    print_table(rows, ["broker", "address", "state", "configuration", "managed", "http"], as_json=as_json)


@app.add("penstock tube broker fsck penstock-data/tube/broker-1", name="fsck")
def fsck_command(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Directory of a broker: tube/broker-N in the data directory.", file_okay=False, metavar="DIR"
        ),
    ],
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair the files; damaged bytes are kept in separate files.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every record in the directory of a stopped broker.

    Exit status 1 if data is damaged. An incomplete write after a crash is not damage: the next start removes it.
    """
    from penstock.tube.storage import fsck as checker

    report = checker.repair(directory) if repair else checker.check(directory)
    totals: dict[str, object] = {
        "stores": report.stores,
        "segments": report.segments,
        "messages": report.messages,
        "bytes": report.bytes,
        "offsets": report.positions,
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
            f"{report.positions} offsets: " + ("ok" if report.ok else f"{report.lost} lost")
        )
        if not report.ok and not repair:
            note("repair the log and keep the damaged bytes: --repair")
    if not report.ok and not repair:
        raise typer.Exit(1)


def _address(option: str, text: str) -> Address:
    from penstock.runtime.io.network import parse_address

    try:
        return parse_address(text.strip())
    except ValueError as error:
        raise ConfigError(f"{option}: got {text!r}", option=option, why=str(error), hint="write HOST:PORT") from error


def _choice(option: str, text: str, words: type[W]) -> W:
    if text not in set(words):
        *others, last = words
        raise ConfigError(f"{option}: got {text!r}", option=option, hint=f"write {', '.join(others)} or {last}")
    return words(text)


def _limit(text: str) -> tuple[str, str]:
    option = "--set-limit"
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(
            f"{option}: got {text!r}", option=option, hint="write a limit and its value: max_connections=500"
        )
    return name, value


def _durability_of_topic(text: str) -> tuple[str, Durability]:
    from penstock.runtime.io.files import Durability
    from penstock.tube.codec.strings import valid_topic

    option = "--topic-durability"
    topic, equals, word = text.partition("=")
    if not equals or not valid_topic(topic):
        raise ConfigError(
            f"{option}: got {text!r}", option=option, hint="write a topic and its durability: metrics=memory"
        )
    return topic, _choice(option, word, Durability)


def _show(ready: ReadyBroker, *, as_json: bool) -> None:
    if as_json:
        print_json(ready.as_json())
        return
    secured = "" if ready.tube_broker_tls is None else f" (TLS {ready.tube_broker_tls})"
    sys.stdout.write(
        f"broker {ready.broker_id} is ready\n"
        f"  TubeMQ broker   {ready.tube_broker}{secured}\n"
        f"  administration  http://{ready.tube_broker_http}/broker.htm\n"
    )
    sys.stdout.flush()


# --- staged rows ---

_STAGED_COLUMNS = ["query", "batch", "broker", "task", "rows", "bytes", "state", "age_s"]

Query = Annotated[str, typer.Argument(help="Name of the query, as in `tube staged list`.", metavar="QUERY")]

staged_app = Commands("List, delete and resolve the staged rows of exactly-once writes.")


@staged_app.add("penstock tube staged list", name="list")
@connects
def staged_list(tube: TubeConnectionOptions, as_json: Json = False) -> None:
    """List the attempts of tasks whose rows are staged and not committed."""
    print_table([_staged_row(broker, row) for broker, row in _staged(tube)], _STAGED_COLUMNS, as_json=as_json)


@staged_app.add(
    "penstock tube staged delete lake-writer", "penstock tube staged delete lake-writer --force", name="delete"
)
@connects
def staged_delete(
    query: Query,
    tube: TubeConnectionOptions,
    force: Annotated[
        bool, typer.Option("--force", help="Delete prepared rows as well, regardless of commits on other brokers.")
    ] = False,
) -> None:
    """Delete the rows that QUERY has staged and not committed."""
    asked = {"queryName": query, "modifyUser": "penstock", "force": str(force).lower()}
    gone = [
        row for broker in tube.running_brokers() for row in tube.call_broker(broker.web, "admin_rmv_staged_rows", asked)
    ]
    note(f"{sum(int(row['attempts']) for row in gone)} attempts of query {query} were deleted")


@staged_app.add("penstock tube staged resolve lake-writer", name="resolve")
@connects
def staged_resolve(query: Query, tube: TubeConnectionOptions) -> None:
    """Complete the last batch of a QUERY that no longer runs: commit it on all brokers or on none.

    A run of the query that is still active is fenced.
    """
    import asyncio

    concerned = {broker.id: broker for broker, row in _staged(tube) if row["queryName"] == query}
    if not concerned:
        note(f"query {query} has no staged rows")
        return
    committed = asyncio.run(_resolve(query, list(concerned.values()), tube))
    note(f"query {query} was resolved; last committed batch: {committed if committed >= 0 else 'none'}")


def _staged(tube: TubeConnectionOptions) -> list[tuple[BrokerRow, dict[str, Any]]]:
    return [
        (broker, row)
        for broker in tube.running_brokers()
        for row in tube.call_broker(broker.web, "admin_query_staged_rows", {})
    ]


async def _resolve(query: str, concerned: list[BrokerRow], tube: TubeConnectionOptions) -> int:
    from penstock.tube import exactly_once
    from penstock.tube.codec.strings import BrokerInfo
    from penstock.tube.exactly_once import BatchId
    from penstock.tube.producer import Producer

    addresses = [(broker.id, *broker.address(tls=tube.over_tls)) for broker in concerned]
    async with Producer(tube.tube_master, **tube.client()) as producer:
        # A new run: its BEGIN fences a run that may still be active, so that it cannot prepare further batches.
        batch = BatchId(query, f"settled-{uuid.uuid4().hex}", 0)
        return await exactly_once.resolve(producer, batch, [BrokerInfo(*address) for address in addresses])


def _staged_row(broker: BrokerRow, row: dict[str, Any]) -> dict[str, Cell]:
    return {
        "query": row["queryName"],
        "batch": row["batchId"],
        "broker": broker.id,
        "task": row["taskId"],
        "rows": row["rows"],
        "bytes": row["bytes"],
        "state": row["state"],
        "age_s": row["ageMs"] // 1000,
        "run": row["run"],
        "attempt": row["attempt"],
    }
