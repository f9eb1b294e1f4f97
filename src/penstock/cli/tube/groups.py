"""`penstock tube groups`: who reads, who has which partition, and forgetting a group."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.options import command_group
from penstock.cli.output import Cell, escape, note, print_json, print_table
from penstock.cli.tube.access import (
    WEB,
    BrokerHttp,
    Json,
    Web,
    administers,
    agreed,
    ask_each,
    brokers,
    call,
    call_broker,
    complete_group,
    complete_topic,
    identifies,
)
from penstock.errors import RefusedError

__all__ = ["app", "members"]

Group = Annotated[str, typer.Argument(help="The consumer group.", metavar="GROUP", autocompletion=complete_group)]

app = command_group("List consumer groups (the default), describe or delete one.", alone=False)


@app.callback()
@administers
@identifies
def groups_default(ctx: typer.Context, http: Web = WEB, broker_http: BrokerHttp = None, as_json: Json = False) -> None:
    """List consumer groups (the default), describe or delete one."""
    if ctx.invoked_subcommand is None:
        _list_groups(http, broker_http, as_json=as_json)


@app.command("list")
@administers
@identifies
def groups_list(http: Web = WEB, broker_http: BrokerHttp = None, as_json: Json = False) -> None:
    """List the consumer groups: those with members now, and those that left a position."""
    _list_groups(http, broker_http, as_json=as_json)


@app.command("describe")
@administers
@identifies
def groups_describe(group: Group, http: Web = WEB, as_json: Json = False) -> None:
    """Show the members of GROUP and the partitions that each has. Its positions: `penstock tube lag`."""
    rows: list[dict[str, Cell]] = []
    for member in call(http, "admin_query_consume_group_detail", {"consumeGroup": group}):
        parts: list[dict[str, Any]] = member.get("parInfo") or [{}]
        for part in parts:
            address = part.get("brokerAddr")
            rows.append(
                {
                    "member": member["consumerId"],
                    "topic": part.get("topicName"),
                    "broker": None if address is None else int(str(address).partition(":")[0]),
                    "partition": part.get("partId"),
                }
            )
    rows.sort(key=lambda row: (str(row["topic"]), row["broker"] or 0, row["partition"] or 0))
    print_table(rows, ["topic", "broker", "partition", "member"], as_json=as_json)
    if not rows:
        note(f"group {escape(group)} has no member now; where it stands: penstock tube lag {escape(group)}")


@app.command("delete")
@administers
@identifies
def groups_delete(
    group: Group,
    topic: Annotated[
        str | None,
        typer.Option(help="Only its positions in this topic.", metavar="TOPIC", autocompletion=complete_topic),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    http: Web = WEB,
    broker_http: BrokerHttp = None,
    as_json: Json = False,
) -> None:
    """Forget the positions of GROUP, which has to have no member: it then begins like a new one."""
    if there := members(http, group):
        raise RefusedError(
            f"group {group!r} has {there} member{'s' if there > 1 else ''}",
            do=f"stop them first; who they are: penstock tube groups describe {group}",
        )
    wanted = {"groupName": group} | ({} if topic is None else {"topicName": topic})
    known = brokers(http, broker_http)  # each has to answer: none is left behind
    standing = [(broker, _places(call_broker(broker.web, "admin_query_offset", wanted), group)) for broker in known]
    places = sum(count for _, count in standing)
    if not places:
        raise RefusedError(f"group {group!r} has no position", do="look at the groups: penstock tube groups")
    if not (yes or agreed(f"Forget {places} positions of group {group}?")):
        note(f"group {escape(group)} is not deleted")
        raise typer.Exit(1)
    for broker, count in standing:
        if count:
            call_broker(broker.web, "admin_rmv_offset", {**wanted, "modifyUser": "penstock"})
    if as_json:
        print_json({"group": group, "positions": places})
    else:
        note(f"group {escape(group)} is deleted: {places} positions are forgotten")


def members(http: str, group: str) -> int:
    """How many members ``group`` has now, as the master at ``http`` knows."""
    rows = call(http, "admin_query_sub_info", {"consumeGroup": group})
    return sum(int(row["consumerNum"]) for row in rows if row["consumeGroup"] == group)


def _places(rows: list[dict[str, Any]], group: str) -> int:
    return sum(len(sub["offsets"]) for row in rows if row["groupName"] == group for sub in row["subInfo"])


def _list_groups(http: str, broker_http: str | None, *, as_json: bool) -> None:
    groups: dict[str, dict[str, Any]] = {}

    def group(name: str) -> dict[str, Any]:
        return groups.setdefault(name, {"members": 0, "topics": set(), "brokers": set()})

    for entry in call(http, "admin_query_sub_info", {}):
        found = group(entry["consumeGroup"])
        found["members"] = int(entry["consumerNum"])
        found["topics"] |= set(entry["topicSet"])
    for broker, entries in ask_each(http, broker_http, lambda b: call_broker(b.web, "admin_query_offset", {})):
        for entry in entries:
            found = group(entry["groupName"])
            found["topics"] |= {sub["topicName"] for sub in entry["subInfo"]}
            found["brokers"].add(broker.id)
    rows: list[dict[str, Cell]] = [
        {
            "group": name,
            "members": found["members"],
            "topics": ",".join(sorted(found["topics"])),
            "brokers": ",".join(map(str, sorted(found["brokers"]))),
        }
        for name, found in sorted(groups.items())
    ]
    print_table(rows, ["group", "members", "topics", "brokers"], as_json=as_json)
