"""`penstock tube staged list`: rows that tasks of exactly-once writes have staged, and that are not committed yet."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

import typer

from penstock.cli.options import Commands, Json
from penstock.cli.output import Cell, note, print_table
from penstock.cli.tube.access import BrokerRow, TubeConnectionOptions, connects

__all__ = ["app"]

_COLUMNS = ["query", "batch", "broker", "task", "rows", "bytes", "state", "age_s"]

Query = Annotated[str, typer.Argument(help="Name of the query, as in `tube staged list`.", metavar="QUERY")]

app = Commands("List, delete and settle the staged rows of exactly-once writes.")


@app.add("penstock tube staged list", name="list")
@connects
def staged_list(tube: TubeConnectionOptions, as_json: Json = False) -> None:
    """List the attempts of tasks whose rows are staged and not committed."""
    print_table([_row(broker, row) for broker, row in _staged(tube)], _COLUMNS, as_json=as_json)


@app.add("penstock tube staged delete lake-writer", "penstock tube staged delete lake-writer --force", name="delete")
@connects
def staged_delete(
    query: Query,
    tube: TubeConnectionOptions,
    force: Annotated[
        bool, typer.Option("--force", help="Delete prepared rows as well, whatever other brokers committed.")
    ] = False,
) -> None:
    """Delete the rows that QUERY has staged and not committed."""
    asked = {"queryName": query, "modifyUser": "penstock", "force": str(force).lower()}
    gone = [
        row for broker in tube.running_brokers() for row in tube.call_broker(broker.web, "admin_rmv_staged_rows", asked)
    ]
    note(f"{sum(int(row['attempts']) for row in gone)} attempts of query {query} were deleted")


@app.add("penstock tube staged settle lake-writer", name="settle")
@connects
def staged_settle(query: Query, tube: TubeConnectionOptions) -> None:
    """Complete the last batch of a QUERY that no longer runs: commit it on all brokers or on none.

    A run of the query that is still alive is fenced.
    """
    import asyncio

    concerned = {broker.id: broker for broker, row in _staged(tube) if row["queryName"] == query}
    if not concerned:
        note(f"query {query} has nothing staged")
        return
    committed = asyncio.run(_settle(query, list(concerned.values()), tube))
    note(f"query {query} was settled; last committed batch: {committed if committed >= 0 else 'none'}")


def _staged(tube: TubeConnectionOptions) -> list[tuple[BrokerRow, dict[str, Any]]]:
    return [
        (broker, row)
        for broker in tube.running_brokers()
        for row in tube.call_broker(broker.web, "admin_query_staged_rows", {})
    ]


async def _settle(query: str, concerned: list[BrokerRow], tube: TubeConnectionOptions) -> int:
    from penstock.tube import exactly_once
    from penstock.tube.codec.strings import BrokerInfo
    from penstock.tube.exactly_once import BatchId
    from penstock.tube.producer import Producer

    addresses = [(broker.id, *broker.address(tls=tube.over_tls)) for broker in concerned]
    async with Producer(tube.tube_master, **tube.client()) as producer:
        batch = BatchId(query, f"settled-{uuid.uuid4().hex}", 0)
        return await exactly_once.settle(producer, batch, [BrokerInfo(*address) for address in addresses])


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
