"""Connections of the commands of `penstock tube`: one set of options, the administration by HTTP, shell completion."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import typer

from penstock.cli.options import (
    COMPLETION_S,
    IN_ANOTHER_DIRECTORY,
    CaFile,
    CertFile,
    KeyFile,
    PasswordFile,
    Username,
    local_addresses,
    local_data_dir,
    local_token,
    shared_options,
)
from penstock.cli.output import note
from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.runtime.io.tls import ClientOptions
    from penstock.tube.client.web import WebLogin
    from penstock.tube.reader import PartitionInfo, RangeReader

__all__ = [
    "NOT_DEPLOYED",
    "UNKNOWN_USER",
    "BrokerRow",
    "Group",
    "MasterOptions",
    "Topic",
    "TubeConnectionOptions",
    "check_topic",
    "complete_group",
    "complete_topic",
    "connects",
    "connects_to_master",
    "no_topic",
    "run_client",
]

T = TypeVar("T")

MASTER: Final = "127.0.0.1:8715"
HTTP: Final = "127.0.0.1:8080"
BROKER_HTTP: Final = "127.0.0.1:8081"
RUNNING: Final = "running"
"""Value of runStatus for a broker that has a session at its master."""
NOT_DEPLOYED: Final = 431
"""Error code: no broker offers the topic to consumers."""
UNKNOWN_USER: Final = 415
"""Error code: the request has no signature, or a wrong one."""


@dataclass(frozen=True, slots=True)
class MasterOptions:
    """Address of the TubeMQ master, credentials and TLS."""

    tube_master: Annotated[
        str,
        typer.Option(
            help="TubeMQ master; several, separated by commas. With TLS: its TLS port. Default: that of the local data "
            f"directory, otherwise {MASTER}.",
            envvar="PENSTOCK_TUBE_MASTER",
            metavar="HOST:PORT",
            show_default=False,
        ),
    ] = MASTER
    username: Username = None
    password_file: PasswordFile = None
    tls: Annotated[
        bool | None,
        typer.Option(
            "--tls/--no-tls",
            help="Connect with or without TLS. Default: with TLS if --ca-file or --cert-file is set.",
            envvar="PENSTOCK_TUBE_TLS",
            show_default=False,
        ),
    ] = None
    ca_file: CaFile = None
    cert_file: CertFile = None
    key_file: KeyFile = None

    @property
    def over_tls(self) -> bool:
        """True if connections use TLS."""
        if self.tls is not None:
            return self.tls
        return any(self._tls_files())

    def _tls_files(self) -> tuple[Path | None, Path | None, Path | None]:
        return self.ca_file, self.cert_file, self.key_file

    def spark_options(self) -> dict[str, str]:
        """Credentials and TLS as options of the Spark source `tubemq`."""
        found = {
            "tubemq.user": self.username,
            "tubemq.passwordFile": self.password_file,
            "tubemq.tls": "true" if self.over_tls else None,
            "tubemq.tlsCa": self.ca_file,
            "tubemq.tlsCert": self.cert_file,
            "tubemq.tlsKey": self.key_file,
        }
        return {name: str(value) for name, value in found.items() if value is not None}

    def client(self) -> ClientOptions:
        """Arguments of a TubeMQ client.

        Raises:
            ConfigError: a file cannot be used, or only one of --username and --password-file is set.
        """
        if (self.username is None) != (self.password_file is None):
            given, missing = "--username", "--password-file"
            if self.username is None:
                given, missing = missing, given
            variable = f"PENSTOCK_{missing.removeprefix('--').upper().replace('-', '_')}"
            raise ConfigError(
                f"{given} is set without {missing}",
                option=given,
                hint=f"set {missing} ({variable}) as well, or omit both if the cluster has no users",
            )
        from penstock.runtime.io.tls import Login, TlsOptions

        tls = TlsOptions(*self._tls_files()) if self.over_tls else None
        return Login(self.username, self.password_file, tls).client()


class BrokerRow(NamedTuple):
    """A broker reported by the master. ``http``: address of its administration, if known."""

    id: int
    host: str
    port: int
    http: str | None
    row: dict[str, Any]

    def address(self, *, tls: bool) -> tuple[str, int]:
        """Return host and port for clients.

        Raises:
            ConfigError: the broker has no TLS port, or the master does not report it.
        """
        port = self.row.get("brokerTLSPort") if tls else self.port
        if not port:
            raise ConfigError(
                f"the TLS port of broker {self.id} is not known",
                option="--tls",
                hint="connect without TLS, or to a master that reports TLS ports",
            )
        return self.host, int(port)

    @property
    def web(self) -> str:
        """Return the address of its administration.

        Raises:
            ConfigError: it is not known.
        """
        if self.http is None:
            raise ConfigError(
                f"the administration address of broker {self.id} is not known",
                option="--broker-http",
                why="the broker did not report it to its master",
                hint="set that of every broker, in the order of their ids: --broker-http HOST:PORT,HOST:PORT",
            )
        return self.http


@dataclass(frozen=True, slots=True)
class TubeConnectionOptions(MasterOptions):
    """Options of :class:`MasterOptions`, and the administration of master and brokers by HTTP."""

    http: Annotated[
        str,
        typer.Option(
            help="HTTP address of the node with the master; https://HOST:PORT with TLS. Default: that of the local "
            f"data directory, otherwise {HTTP}. Needed if --tube-master is set to another node.",
            envvar="PENSTOCK_HTTP",
            metavar="HOST:PORT",
            show_default=False,
        ),
    ] = HTTP
    broker_http: Annotated[
        str | None,
        typer.Option(
            help="HTTP addresses of the brokers, in the order of their ids, separated by commas. Default: the "
            "addresses that the master reports, or 127.0.0.1:8081.",
            envvar="PENSTOCK_TUBE_BROKER_HTTP",
            metavar="HOST:PORT",
        ),
    ] = None
    admin_token: Annotated[
        str | None,
        typer.Option(
            help="Administration token; other users of this machine can read it in the list of processes, so prefer "
            "--admin-token-file. Default without --username, for a node on loopback: that of the data directory "
            "(PENSTOCK_DATA_DIR, otherwise that of ./penstock.yaml, otherwise ./penstock-data).",
            envvar="PENSTOCK_ADMIN_TOKEN",
            metavar="TOKEN",
        ),
    ] = None
    admin_token_file: Annotated[
        Path | None,
        typer.Option(help="File with the administration token.", envvar="PENSTOCK_ADMIN_TOKEN_FILE", metavar="FILE"),
    ] = None

    def call(self, method: str, parameters: Mapping[str, str], **more: Any) -> list[dict[str, Any]]:
        """Send a request to the administration of the master; returns the rows of its response."""
        from penstock.tube.client import web

        if not self.http:
            raise ConfigError(
                f"--tube-master {self.tube_master} is set without --http",
                option="--http",
                why="this command uses the administration of the master's node, whose address the master does not tell",
                hint="set it: --http HOST:PORT (PENSTOCK_HTTP), or the http of the context",
            )
        try:
            return web.call(self.http, method, parameters, login=self._web_login(self.http), **more)
        except UnavailableError as error:
            if self.http == HTTP and "penstock up" in (error.hint or ""):
                error.hint = f"{error.hint}{IN_ANOTHER_DIRECTORY}"
            raise

    def call_broker(
        self, address: str, method: str, parameters: Mapping[str, str], **more: Any
    ) -> list[dict[str, Any]]:
        """Send a request to the administration of the broker at ``address``; returns the rows of its response."""
        from penstock.tube.client import web

        return web.call_broker(address, method, parameters, login=self._web_login(address), **more)

    def _web_login(self, address: str) -> WebLogin:
        """Return the credentials for the administration at ``address``: those of the command, otherwise those of the
        local data directory.

        With a user name the local token is not sent: the request has the permissions of that user.
        """
        from penstock.tube.client.web import WebLogin
        from penstock.tube.master.admin_token import read_token

        client = self.client()
        if self.admin_token and self.admin_token_file is not None:
            raise ConfigError(
                "--admin-token and --admin-token-file exclude each other",
                option="--admin-token",
                hint="set one of the two",
            )
        token = self.admin_token or ("" if self.admin_token_file is None else read_token(self.admin_token_file))
        if not token and client["username"] is None:
            token = local_token(address, local_data_dir())
        tls = client["tls"]
        if tls is None and address.startswith("https://") and any(self._tls_files()):  # --no-tls is that of TubeMQ
            from penstock.runtime.io.tls import TlsOptions

            tls = TlsOptions(*self._tls_files()).context()
        return WebLogin(token, client["username"], client["password"] or "", tls)

    def brokers(self) -> list[BrokerRow]:
        """Return the brokers of the master, by id."""
        rows = sorted(self.call("admin_query_broker_run_status", {}), key=lambda row: int(row["brokerId"]))
        given = [text.strip() for text in self.broker_http.split(",")] if self.broker_http else []
        if len(given) > len(rows):
            raise ConfigError(
                f"--broker-http: {len(given)} addresses for {len(rows)} broker{'' if len(rows) == 1 else 's'}",
                option="--broker-http",
                hint="set one for each broker, in the order of their ids: "
                + ", ".join(str(row["brokerId"]) for row in rows),
            )
        found = []
        for index, row in enumerate(rows):
            port = row.get("brokerWebPort")
            web = row.get("brokerWebAddress") or (f"{row['brokerIp']}:{port}" if port else None)
            if web is None and len(rows) == 1:
                web = BROKER_HTTP  # not reported: a single broker is probably on this machine
            web = given[index] if index < len(given) else web
            found.append(BrokerRow(int(row["brokerId"]), row["brokerIp"], int(row["brokerPort"]), web, row))
        return found

    def running_brokers(self) -> list[BrokerRow]:
        """Return the brokers that have a session at the master; report the others on standard error."""
        known = self.brokers()
        unavailable = [broker for broker in known if broker.row.get("runStatus") != RUNNING]
        for broker in unavailable:
            _note_unavailable(broker)
        return [broker for broker in known if broker not in unavailable]

    def ask_each(
        self, ask: Callable[[BrokerRow], T], unavailable: list[int] | None = None
    ) -> list[tuple[BrokerRow, T]]:
        """Return the result of ``ask`` for each available broker; the ids of the others are appended to
        ``unavailable``.

        The master detects a killed broker after half a minute, so a broker that it reports as running may be
        unavailable.

        Raises:
            UnavailableError: none of the brokers that the master reports as running responds.
        """
        found: list[tuple[BrokerRow, T]] = []
        missing: list[int] = []
        last: UnavailableError | None = None
        for broker in self.brokers():
            if broker.row.get("runStatus") != RUNNING:
                _note_unavailable(broker)  # no request is sent, because each would wait for its timeout
                missing.append(broker.id)
                continue
            try:
                found.append((broker, ask(broker)))
            except UnavailableError as error:
                last = error
                missing.append(broker.id)
                note(f"broker {broker.id}: {error.what}: {error.why or 'no response'}; its data is not shown")
        if last is not None and not found:
            raise last
        if unavailable is not None:
            unavailable += missing
        return found

    @contextlib.contextmanager
    def readers(self) -> Iterator[Callable[[BrokerRow], RangeReader]]:
        """Yield a function that returns the reader of a broker. Each broker has one connection, closed with the
        block."""
        from penstock.tube.reader import RangeReader

        client = self.client()
        with contextlib.ExitStack() as stack:

            @functools.cache
            def connect(host: str, port: int) -> RangeReader:
                return stack.enter_context(RangeReader(host, port, **client))

            yield lambda broker: connect(*broker.address(tls=self.over_tls))

    def topics(self) -> list[str]:
        """Return the names of the topics; empty if the administration of the master does not return them soon."""
        return _beginning("", _topics(self)) if self.http else []

    def members(self, group: str) -> int:
        """Return the current number of members of consumer group ``group``."""
        rows = self.call("admin_query_sub_info", {"consumeGroup": group})
        return sum(int(row["consumerNum"]) for row in rows if row["consumeGroup"] == group)


connects_to_master = shared_options(MasterOptions, "master")
"""Decorator: give a command the options of :class:`MasterOptions`, as its argument ``master``."""

connects = shared_options(TubeConnectionOptions, "tube")
"""Decorator: give a command the options of :class:`TubeConnectionOptions`, as its argument ``tube``."""


def _note_unavailable(broker: BrokerRow) -> None:
    note(f"broker {broker.id} at {broker.host}:{broker.port} is unavailable: its data is not shown")


def run_client(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main``. SIGTERM cancels it like Ctrl-C (exit status 143), so that a consumer leaves its group
    immediately."""
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


def partitions(masters: str, topic: str, client: ClientOptions) -> list[PartitionInfo]:
    """Return the partitions of ``topic``; empty if the master does not know it."""
    from penstock.tube import reader

    try:
        return reader.partitions(masters, topic, **client)
    except UnavailableError as error:
        if error.hint is not None:
            raise  # the error has a more specific hint
        raise UnavailableError(
            error.what,
            applied=False,
            why=error.why,
            hint="start a node (penstock up), or set the address of its TubeMQ master: --tube-master HOST:PORT"
            + (IN_ANOTHER_DIRECTORY if masters == MASTER else ""),
        ) from error


def announced(
    masters: str, topic: str, client: ClientOptions, known: Callable[[], Iterable[str]] = tuple
) -> list[PartitionInfo]:
    """Return the partitions of ``topic``; ``known`` returns the names of topics, for the error.

    Raises: RefusedError: there is none. ConfigError: the name is not valid.
    """
    found = partitions(masters, topic, client)
    if not found:
        raise no_topic(masters, topic, "the master announces no partition of it", known=known())
    return found


def no_topic(masters: str, topic: str, why: str | None = None, *, known: Iterable[str] = ()) -> RefusedError:
    """Return the error for a topic that does not exist; ``known``: names of topics. Raises ConfigError if the name is
    not valid."""
    from penstock.runtime.config.values import did_you_mean

    check_topic(topic)
    similar = did_you_mean(topic, known)
    first = f"{similar} Otherwise create it" if similar else "list the topics: penstock tube topic list; or create it"
    return RefusedError(
        f"topic {topic!r} does not exist at the master",
        peer=masters,
        why=why,
        hint=f"{first}: penstock tube topic create {topic}, or name it in a rule or in tube.topics of penstock.yaml, "
        "and restart the node",
    )


def check_topic(topic: str) -> None:
    """Raise ConfigError unless ``topic`` is a valid topic name."""
    from penstock.tube.codec.strings import TOPIC_RULE, valid_topic

    if not valid_topic(topic):
        raise ConfigError(
            f"{topic!r} is not a valid topic name",
            option="TOPIC",
            why=f"a topic name is {TOPIC_RULE}",
            hint="correct the name; list the topics: penstock tube topic list",
        )


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the topics whose names begin with ``incomplete``."""
    return _beginning(incomplete, _topics(_completing(ctx)))


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the groups that have members or committed offsets, and begin with ``incomplete``."""
    return _beginning(incomplete, _groups(_completing(ctx)))


Topic = Annotated[str, typer.Argument(help="Topic.", metavar="TOPIC", autocompletion=complete_topic)]
Group = Annotated[str, typer.Argument(help="Consumer group.", metavar="GROUP", autocompletion=complete_group)]


def _completing(ctx: typer.Context) -> TubeConnectionOptions:
    given = {
        field.name: ctx.params[field.name] for field in fields(TubeConnectionOptions) if ctx.params.get(field.name)
    }
    # Completion parses the line without defaults and environment variables.
    found = os.environ.get("PENSTOCK_HTTP") or ctx.lookup_default("http")
    if found is None:  # of a command that has no --http, or whose node was not found
        found = local_addresses(ctx.params, {"http": False}).get("http", HTTP)
    given.setdefault("http", found)
    return TubeConnectionOptions(**given)


def _beginning(incomplete: str, names: Iterator[str]) -> list[str]:
    found: set[str] = set()
    with contextlib.suppress(PenstockError):  # return the names received so far
        found.update(name for name in names if name.startswith(incomplete))
    return sorted(found)


def _topics(tube: TubeConnectionOptions) -> Iterator[str]:
    for row in tube.call("admin_query_topic_info", {}, timeout_s=COMPLETION_S):
        yield str(row["topicName"])


def _groups(tube: TubeConnectionOptions) -> Iterator[str]:
    for row in tube.call("admin_query_sub_info", {}, timeout_s=COMPLETION_S):
        yield str(row["consumeGroup"])
    for broker in tube.call("admin_query_broker_run_status", {}, timeout_s=COMPLETION_S):
        web = broker.get("brokerWebAddress") or f"{broker['brokerIp']}:{broker.get('brokerWebPort') or 8081}"
        for row in tube.call_broker(web, "admin_query_offset", {}, timeout_s=COMPLETION_S):
            yield str(row["groupName"])
