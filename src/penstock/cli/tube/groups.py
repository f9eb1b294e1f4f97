"""`penstock tube group`: list, describe and delete consumer groups."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.options import Commands, Json, Yes, confirmed
from penstock.cli.output import Cell, escape, note, print_json, print_table
from penstock.cli.tube.access import Group, TubeConnectionOptions, complete_topic, connects
from penstock.errors import RefusedError

__all__ = ["app"]

app = Commands("List, describe and delete consumer groups; show their lag.")


@app.add("penstock tube group list", name="list")
@connects
def groups_list(tube: TubeConnectionOptions, as_json: Json = False) -> None:
    """List the consumer groups that have members or committed offsets."""
    groups: dict[str, dict[str, Any]] = {}

    def group(name: str) -> dict[str, Any]:
        return groups.setdefault(name, {"members": 0, "topics": set(), "brokers": set()})

    for entry in tube.call("admin_query_sub_info", {}):
        found = group(entry["consumeGroup"])
        found["members"] = int(entry["consumerNum"])
        found["topics"] |= set(entry["topicSet"])
    for broker, entries in tube.ask_each(lambda b: tube.call_broker(b.web, "admin_query_offset", {})):
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


@app.add("penstock tube group describe lake", name="describe")
@connects
def groups_describe(group: Group, tube: TubeConnectionOptions, as_json: Json = False) -> None:
    """Show the members of GROUP and the partitions that are assigned to each."""
    rows: list[dict[str, Cell]] = []
    for member in tube.call("admin_query_consume_group_detail", {"consumeGroup": group}):
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
        note(f"group {escape(group)} has no members; its offsets: penstock tube offset list {escape(group)}")


@app.add("penstock tube group delete lake", "penstock tube group delete lake --topic telemetry --yes", name="delete")
@connects
def groups_delete(
    group: Group,
    tube: TubeConnectionOptions,
    topic: Annotated[
        str | None,
        typer.Option(help="Only its offsets in this topic.", metavar="TOPIC", autocompletion=complete_topic),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete the committed offsets of GROUP, which must have no members. It then starts like a new group."""
    if there := tube.members(group):
        raise RefusedError(
            f"group {group!r} has {there} member{'s' if there > 1 else ''}",
            do=f"stop them first; list them: penstock tube group describe {group}",
        )
    wanted = {"groupName": group} | ({} if topic is None else {"topicName": topic})
    known = tube.brokers()  # every one must respond: none may keep its offsets
    committed = [
        (broker, _offsets(tube.call_broker(broker.web, "admin_query_offset", wanted), group)) for broker in known
    ]
    offsets = sum(count for _, count in committed)
    if not offsets:
        raise RefusedError(f"group {group!r} has no committed offsets", do="list the groups: penstock tube group list")
    if not (yes or confirmed(f"Delete {offsets} committed offsets of group {group}?")):
        note(f"group {escape(group)} was not deleted")
        raise typer.Exit(1)
    for broker, count in committed:
        if count:
            tube.call_broker(broker.web, "admin_rmv_offset", {**wanted, "modifyUser": "penstock"})
    if as_json:
        print_json({"group": group, "offsets": offsets})
    else:
        note(f"group {escape(group)} was deleted: {offsets} committed offsets")


def _offsets(rows: list[dict[str, Any]], group: str) -> int:
    return sum(len(sub["offsets"]) for row in rows if row["groupName"] == group for sub in row["subInfo"])
