"""What the commands of `penstock tube` share: options, addresses, the brokers of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.errors import ConfigError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.tube.reader import PartitionInfo

__all__ = [
    "MASTER",
    "TOKEN",
    "WEB",
    "AdminToken",
    "BrokerHttp",
    "BrokerRow",
    "Json",
    "Master",
    "Topic",
    "Web",
    "announced",
    "brokers",
    "partitions",
]

Master = Annotated[
    str,
    typer.Option(
        help="Master of the tube; several, separated by commas.", envvar="PENSTOCK_TUBE_MASTER", metavar="HOST:PORT"
    ),
]
Web = Annotated[str, typer.Option(help="Administration of the master.", envvar="PENSTOCK_HTTP", metavar="HOST:PORT")]
BrokerHttp = Annotated[
    str | None,
    typer.Option(
        help="Administration of the brokers, in the order of their ids, separated by commas; else what the master "
        "says, or 127.0.0.1:8081.",
        envvar="PENSTOCK_TUBE_BROKER_HTTP",
        metavar="HOST:PORT",
    ),
]
AdminToken = Annotated[str, typer.Option(help="Token for changes.", envvar="PENSTOCK_ADMIN_TOKEN", metavar="TEXT")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Topic = Annotated[str, typer.Argument(help="The topic.", metavar="TOPIC")]
MASTER = "127.0.0.1:8715"
WEB = "127.0.0.1:8080"
BROKER_WEB = "127.0.0.1:8081"
TOKEN = "abc"  # noqa: S105 - the reference's sample, which a node takes on loopback only


class BrokerRow(NamedTuple):
    """A broker as the master knows it, and where its administration answers, if that is known."""

    id: int
    host: str
    port: int
    http: str | None
    row: dict[str, Any]

    @property
    def web(self) -> str:
        """Where its administration answers. Raises ConfigError where nobody told."""
        if self.http is None:
            raise ConfigError(
                f"the administration of broker {self.id} is not known",
                option="--broker-http",
                why="penstock's brokers do not tell it to their master",
                do="name that of every broker, in the order of their ids: --broker-http HOST:PORT,HOST:PORT",
            )
        return self.http


def brokers(http: str, broker_http: str | None) -> list[BrokerRow]:
    """The brokers of the master at ``http``, by id."""
    from penstock.cli.webapi import call

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
        web = f"{row['brokerIp']}:{port}" if port else BROKER_WEB if len(rows) == 1 else None
        web = given[place] if place < len(given) else web
        found.append(BrokerRow(int(row["brokerId"]), row["brokerIp"], int(row["brokerPort"]), web, row))
    return found


def announced(masters: str, topic: str) -> list[PartitionInfo]:
    """The partitions of ``topic``; refused where there are none."""
    found = partitions(masters, topic)
    if not found:
        raise RefusedError(
            f"the master announces no topic {topic!r}",
            peer=masters,
            do="look at the names (penstock tube topics), or create it (penstock tube topics create)",
        )
    return found


def partitions(masters: str, topic: str) -> list[PartitionInfo]:
    """The partitions of ``topic``; none where the master announces it not."""
    from penstock.tube import reader

    try:
        return reader.partitions(masters, topic)
    except UnavailableError as error:
        raise UnavailableError(
            error.what,
            applied=False,
            why=error.why,
            do="start a node (penstock up), or name its TubeMQ master: --tube-master HOST:PORT",
        ) from error
