"""Connections of the commands of `penstock tube`: options, administration, shell completion."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from penstock.cli.options import SHARED_OPTIONS, grouped
from penstock.cli.output import note
from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.runtime.io.credentials import ClientOptions
    from penstock.tube.client.web import WebLogin
    from penstock.tube.reader import PartitionInfo

__all__ = [
    "MASTER",
    "NOT_DEPLOYED",
    "UNKNOWN_USER",
    "WEB",
    "BrokerHttp",
    "BrokerRow",
    "Json",
    "LoginOptions",
    "Master",
    "Topic",
    "Web",
    "administers",
    "agreed",
    "announced",
    "ask_each",
    "brokers",
    "call",
    "call_broker",
    "complete_group",
    "complete_topic",
    "identifies",
    "logs_in",
    "no_topic",
    "partitions",
    "run_client",
    "running",
]

T = TypeVar("T")

WEB = "127.0.0.1:8080"
ANSWER_S = 1.0


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    """The topics that begin with ``incomplete``."""
    return _beginning(incomplete, _topics(_http(ctx)))


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """The groups that begin with ``incomplete``: those with members, and those that left a position."""
    return _beginning(incomplete, _groups(_http(ctx)))


def _http(ctx: typer.Context) -> str:
    return str(ctx.params.get("http") or os.environ.get("PENSTOCK_HTTP") or WEB)


def _beginning(incomplete: str, names: Iterator[str]) -> list[str]:
    found: set[str] = set()
    with contextlib.suppress(PenstockError):  # what was told until then is offered
        found.update(name for name in names if name.startswith(incomplete))
    return sorted(found)


def _topics(http: str) -> Iterator[str]:
    for row in call(http, "admin_query_topic_info", {}, timeout_s=ANSWER_S):
        yield str(row["topicName"])


def _groups(http: str) -> Iterator[str]:
    for row in call(http, "admin_query_sub_info", {}, timeout_s=ANSWER_S):
        yield str(row["consumeGroup"])
    for broker in call(http, "admin_query_broker_run_status", {}, timeout_s=ANSWER_S):
        web = broker.get("brokerWebAddress") or f"{broker['brokerIp']}:{broker.get('brokerWebPort') or 8081}"
        for row in call_broker(web, "admin_query_offset", {}, timeout_s=ANSWER_S):
            yield str(row["groupName"])


Master = Annotated[
    str,
    typer.Option(
        help="Master of the tube; several, separated by commas.", envvar="PENSTOCK_TUBE_MASTER", metavar="HOST:PORT"
    ),
]
Web = Annotated[
    str,
    typer.Option(
        help="Administration of the master; https://HOST:PORT with TLS.", envvar="PENSTOCK_HTTP", metavar="HOST:PORT"
    ),
]
BrokerHttp = Annotated[
    str | None,
    typer.Option(
        help="Administration of the brokers, in the order of their ids, separated by commas; else what the master "
        "says, or 127.0.0.1:8081.",
        envvar="PENSTOCK_TUBE_BROKER_HTTP",
        metavar="HOST:PORT",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Topic = Annotated[str, typer.Argument(help="The topic.", metavar="TOPIC", autocompletion=complete_topic)]
MASTER = "127.0.0.1:8715"
BROKER_WEB = "127.0.0.1:8081"
RUNNING = "running"
"""runStatus of a broker that has a session at its master."""
NOT_DEPLOYED = 431
"""Code of a refusal: no broker has the topic for consumers."""
UNKNOWN_USER = 415
"""Code of a refusal: who asks did not sign, or wrongly."""


@dataclass(frozen=True, slots=True)
class LoginOptions:
    """Who asks the tube, and whom it trusts."""

    username: Annotated[
        str | None,
        typer.Option(help="User, where the tube has users.", envvar="PENSTOCK_TUBE_USERNAME", metavar="NAME"),
    ] = None
    password_file: Annotated[
        Path | None,
        typer.Option(
            help="File whose first line is the password.", envvar="PENSTOCK_TUBE_PASSWORD_FILE", metavar="PATH"
        ),
    ] = None
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Over TLS: --tube-master names the TLS port. --ca-file implies it.",
            envvar="PENSTOCK_TUBE_TLS",
        ),
    ] = False
    ca_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM of the authorities to trust; default: the system's.",
            envvar="PENSTOCK_TUBE_CA_FILE",
            metavar="PATH",
        ),
    ] = None
    cert_file: Annotated[
        Path | None,
        typer.Option(help="PEM of the client's certificate.", envvar="PENSTOCK_TUBE_CERT_FILE", metavar="PATH"),
    ] = None
    key_file: Annotated[
        Path | None,
        typer.Option(help="PEM of its key; default: in --cert-file.", envvar="PENSTOCK_TUBE_KEY_FILE", metavar="PATH"),
    ] = None

    @property
    def over_tls(self) -> bool:
        """Whether connections use TLS."""
        return self.tls or any(path is not None for path in (self.ca_file, self.cert_file, self.key_file))

    def client(self) -> ClientOptions:
        """The options of a client. Raises ConfigError if a file cannot be used or half of the login is missing."""
        if (self.username is None) != (self.password_file is None):
            given, missing = "--username", "--password-file"
            if self.username is None:
                given, missing = missing, given
            variable = f"PENSTOCK_TUBE_{missing.removeprefix('--').upper().replace('-', '_')}"
            raise ConfigError(
                f"{given} is given without {missing}",
                option=given,
                do=f"set {missing} ({variable}) as well, or omit both if the cluster has no users",
            )
        from penstock.runtime.io.credentials import Login
        from penstock.runtime.io.tls import TlsOptions

        tls = TlsOptions(self.ca_file, self.cert_file, self.key_file) if self.over_tls else None
        return Login(self.username, self.password_file, tls).client()


logs_in = grouped(LoginOptions, "login")
"""Give a command the options of :class:`LoginOptions`; it takes them as its argument ``login``."""


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """Credentials for the administration by HTTP; :func:`call` reads them."""

    admin_token: Annotated[
        str | None,
        typer.Option(
            help="Administration token. Default without --username, for a node on loopback: that of the data "
            "directory (PENSTOCK_DATA_DIR, else ./penstock-data).",
            envvar="PENSTOCK_ADMIN_TOKEN",
            metavar="TEXT",
        ),
    ] = None


identifies = grouped(LoginOptions, None)
"""Give a command that only uses HTTP the options of :class:`LoginOptions`; :func:`call` reads them."""
administers = grouped(AdminOptions, None)
"""Give a command the options of :class:`AdminOptions`."""


class BrokerRow(NamedTuple):
    """A broker as the master knows it, and where its administration answers, if that is known."""

    id: int
    host: str
    port: int
    http: str | None
    row: dict[str, Any]

    def address(self, *, tls: bool) -> tuple[str, int]:
        """Where it serves clients. Raises ConfigError where it does not with TLS, or the master does not say so."""
        port = self.row.get("brokerTLSPort") if tls else self.port
        if not port:
            raise ConfigError(
                f"the TLS port of broker {self.id} is not known",
                option="--tls",
                do="ask without TLS, or a master that tells it",
            )
        return self.host, int(port)

    @property
    def web(self) -> str:
        """Where its administration answers. Raises ConfigError where nobody told."""
        if self.http is None:
            raise ConfigError(
                f"the administration of broker {self.id} is not known",
                option="--broker-http",
                why="the broker has not told it to its master",
                do="name that of every broker, in the order of their ids: --broker-http HOST:PORT,HOST:PORT",
            )
        return self.http


def call(address: str, method: str, parameters: Mapping[str, str], **more: Any) -> list[dict[str, Any]]:
    """Send a request to the administration of the master at ``address``, with the command's credentials."""
    from penstock.tube.client import web

    return web.call(address, method, parameters, login=_web_login(address), **more)


def call_broker(address: str, method: str, parameters: Mapping[str, str], **more: Any) -> list[dict[str, Any]]:
    """As :func:`call`, to a broker."""
    from penstock.tube.client import web

    return web.call_broker(address, method, parameters, login=_web_login(address), **more)


def _web_login(address: str) -> WebLogin:
    """Credentials for the administration at ``address``: those of the command, else the local data directory's.

    With a user name the local token is not sent: the request has the rights of that user, not of the file's reader.
    """
    from penstock.tube.client.web import WebLogin

    given = SHARED_OPTIONS.get()
    options = {field.name: given[field.name] for field in fields(LoginOptions) if field.name in given}
    client = LoginOptions(**options).client()
    token = given.get("admin_token") or os.environ.get("PENSTOCK_ADMIN_TOKEN")
    if not token:
        token = _local_token(address) if client["user"] is None else ""
    return WebLogin(token, client["user"], client["password"] or "", client["tls"])


def _local_token(address: str) -> str:
    """The token of the data directory here; blank where there is none, or the server is not on this machine."""
    from penstock.runtime.io.network import parse_address

    try:
        if not parse_address(address.rpartition("//")[2].rstrip("/")).is_loopback:
            return ""  # the token of this node is a secret that other machines must not get
        path = Path(os.environ.get("PENSTOCK_DATA_DIR") or "penstock-data") / "tube" / "admin-token"
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def brokers(http: str, broker_http: str | None) -> list[BrokerRow]:
    """The brokers of the master at ``http``, by id."""
    rows = sorted(call(http, "admin_query_broker_run_status", {}), key=lambda row: int(row["brokerId"]))
    given = [text.strip() for text in broker_http.split(",")] if broker_http else []
    if len(given) > len(rows):
        raise ConfigError(
            f"--broker-http: {len(given)} addresses for {len(rows)} brokers",
            option="--broker-http",
            do="give one for each broker, in the order of their ids: "
            + ", ".join(str(row["brokerId"]) for row in rows),
        )
    found = []
    for place, row in enumerate(rows):
        port = row.get("brokerWebPort")
        web = row.get("brokerWebAddress") or (f"{row['brokerIp']}:{port}" if port else None)
        if web is None and len(rows) == 1:
            web = BROKER_WEB
        web = given[place] if place < len(given) else web
        found.append(BrokerRow(int(row["brokerId"]), row["brokerIp"], int(row["brokerPort"]), web, row))
    return found


def running(http: str, broker_http: str | None) -> list[BrokerRow]:
    """Those of :func:`brokers` that have a session at the master; the others are named, and left out."""
    known = brokers(http, broker_http)
    away = [broker for broker in known if broker.row.get("runStatus") != RUNNING]
    for broker in away:
        _note_away(broker)
    return [broker for broker in known if broker not in away]


def ask_each(
    http: str, broker_http: str | None, ask: Callable[[BrokerRow], T], away: list[int] | None = None
) -> list[tuple[BrokerRow, T]]:
    """What ``ask`` finds at each broker of the master at ``http``; who is away is named, left out, and in ``away``.

    The master notices half a minute late that a broker was killed, so one that it believes running may be away too.

    Raises:
        UnavailableError: of all that the master believes running none answers.
    """
    found: list[tuple[BrokerRow, T]] = []
    gone: list[int] = []
    last: UnavailableError | None = None
    for broker in brokers(http, broker_http):
        if broker.row.get("runStatus") != RUNNING:
            _note_away(broker)
            gone.append(broker.id)
            continue
        try:
            found.append((broker, ask(broker)))
        except UnavailableError as error:
            last = error
            gone.append(broker.id)
            note(f"broker {broker.id}: {error.what}: {error.why or 'no answer'}; what it has is not shown")
    if last is not None and not found:
        raise last
    if away is not None:
        away += gone
    return found


def _note_away(broker: BrokerRow) -> None:
    note(f"broker {broker.id} at {broker.host}:{broker.port} is away: what it has is not shown")


def run_client(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main``; SIGTERM ends it as Ctrl-C does, with exit status 143: a group is left at once, not after 30 s."""
    import asyncio
    import signal

    from penstock.runtime.io.loop import run

    async def until_terminated() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    try:
        return run(until_terminated())
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None


def announced(masters: str, topic: str, client: ClientOptions) -> list[PartitionInfo]:
    """The partitions of ``topic``; refused where there are none."""
    found = partitions(masters, topic, client)
    if not found:
        raise no_topic(masters, topic, "no broker that is here serves it")
    return found


def no_topic(masters: str, topic: str, why: str | None = None) -> RefusedError:
    """The error of a command that finds ``topic`` nowhere."""
    return RefusedError(
        f"the master announces no topic {topic!r}",
        peer=masters,
        why=why,
        do="look at the names (penstock tube topics), or create it (penstock tube topics create)",
    )


def partitions(masters: str, topic: str, client: ClientOptions) -> list[PartitionInfo]:
    """The partitions of ``topic``; none where the master announces it not."""
    from penstock.tube import reader

    try:
        return reader.partitions(masters, topic, **client)
    except UnavailableError as error:
        if error.do is not None:
            raise  # it knows better what to do
        raise UnavailableError(
            error.what,
            applied=False,
            why=error.why,
            do="start a node (penstock up), or name its TubeMQ master: --tube-master HOST:PORT",
        ) from error


def agreed(question: str) -> bool:
    """Whether whoever sits at the terminal says yes.

    Raises:
        ConfigError: nobody answers.
    """
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:  # also for Ctrl-C, which comes before anything was done
        raise ConfigError("nothing is deleted: the question was not answered", do="--yes deletes without one") from None
