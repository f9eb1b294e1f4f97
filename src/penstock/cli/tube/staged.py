"""`penstock tube staged`: rows that tasks staged and nobody committed yet."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

import typer

from penstock.cli.output import Cell, note, print_table
from penstock.cli.tube.access import (
    MASTER,
    WEB,
    BrokerHttp,
    BrokerRow,
    Json,
    LoginOptions,
    Master,
    Web,
    administers,
    call_broker,
    logs_in,
    running,
)
from penstock.errors import ConfigError

__all__ = ["staged"]

_COLUMNS = ["query", "batch", "broker", "task", "rows", "bytes", "state", "age_s"]


@logs_in
@administers
def staged(
    login: LoginOptions,
    remove: Annotated[
        str | None, typer.Option(help="Let go what this query staged and nobody committed.", metavar="QUERY")
    ] = None,
    settle: Annotated[
        str | None,
        typer.Option(
            help="Publish everywhere or nowhere what a dead run of this query prepared; a run that lives is fenced.",
            metavar="QUERY",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --remove: also what is prepared, whatever other brokers did.")
    ] = False,
    tube_master: Master = MASTER,
    http: Web = WEB,
    broker_http: BrokerHttp = None,
    as_json: Json = False,
) -> None:
    """Show rows that are staged for writes that are exactly once; let them go, or finish what a dead query left."""
    import asyncio

    if remove is not None and settle is not None:
        raise ConfigError("--remove and --settle exclude each other", option="--settle", do="give one of them")
    if force and remove is None:
        raise ConfigError("--force is for --remove", option="--force", do="name the query: --remove QUERY --force")
    known = running(http, broker_http)
    if remove is not None:
        asked = {"queryName": remove, "modifyUser": "penstock", "force": str(force).lower()}
        gone = [row for broker in known for row in call_broker(broker.web, "admin_rmv_staged_rows", asked)]
        note(f"{sum(int(row['attempts']) for row in gone)} attempts of query {remove} are let go")
        return
    found = [(broker, row) for broker in known for row in call_broker(broker.web, "admin_query_staged_rows", {})]
    if settle is not None:
        concerned = {broker.id: broker for broker, row in found if row["queryName"] == settle}
        if not concerned:
            note(f"query {settle} has nothing staged")
            return
        committed = asyncio.run(_settle(settle, list(concerned.values()), tube_master, login))
        note(f"query {settle} is settled; its last batch committed is {committed if committed >= 0 else 'none'}")
        return
    print_table([_row(broker, row) for broker, row in found], _COLUMNS, as_json=as_json)


async def _settle(query: str, concerned: list[BrokerRow], masters: str, login: LoginOptions) -> int:
    from penstock.tube.client import transaction_commit
    from penstock.tube.codec.strings import BrokerInfo
    from penstock.tube.producer import Producer
    from penstock.tube.staging import BatchId

    addresses = [(broker.id, *broker.address(tls=login.over_tls)) for broker in concerned]
    async with Producer(masters, **login.client()) as producer:
        batch = BatchId(query, f"settled-{uuid.uuid4().hex}", 0)
        return await transaction_commit.settle(producer, batch, [BrokerInfo(*address) for address in addresses])


def _row(broker: BrokerRow, row: dict[str, Any]) -> dict[str, Cell]:
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
