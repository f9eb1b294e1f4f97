"""`penstock tube topics`: list, describe, create, change and delete topics."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from penstock.cli.options import command_group
from penstock.cli.output import Cell, note, print_json, print_table
from penstock.cli.tube.access import (
    WEB,
    BrokerHttp,
    Json,
    Topic,
    Web,
    administers,
    agreed,
    ask_each,
    brokers,
    call,
    call_broker,
    identifies,
)
from penstock.cli.tube.offsets import ENTRY
from penstock.errors import ConfigError, RefusedError

__all__ = ["app"]

_OPEN, _CLOSED, _DELETED = range(3)
_EVERY = -1
_REMOVED_S = 5.0
"""Brokers remove a topic with their next heartbeats; those of penstock within a second."""
_LOOK_S = 0.1

_SPAN = re.compile(r"(\d{1,6})([smhd])", re.ASCII)
Retention = Annotated[
    str | None,
    typer.Option(help="How long records are kept, as in 12h or 3d; 7d at most.", metavar="TEXT"),
]
Brokers = Annotated[
    str | None, typer.Option("--broker", help="On these brokers alone, as in 2 or 2,3.", metavar="LIST")
]
MaxMessage = Annotated[int | None, typer.Option(help="Largest record in MiB; at first 1.", min=1, max=20, metavar="N")]

app = command_group("List topics (the default), describe, create, change or delete one.", alone=False)


@app.callback()
@administers
@identifies
def topics_default(ctx: typer.Context, broker: Brokers = None, http: Web = WEB, as_json: Json = False) -> None:
    """List topics (the default), describe, create, change or delete one."""
    if ctx.invoked_subcommand is None:
        _list_topics(http, broker, as_json=as_json)


@app.command("list")
@administers
@identifies
def topics_list(broker: Brokers = None, http: Web = WEB, as_json: Json = False) -> None:
    """List the topics of a tube."""
    _list_topics(http, broker, as_json=as_json)


@app.command("create")
@administers
@identifies
def topics_create(
    topic: Topic,
    partitions: Annotated[int, typer.Option(help="Partitions in each store.", min=1, max=9999, metavar="N")] = 3,
    stores: Annotated[int, typer.Option(help="Stores, each with files of its own.", min=1, max=100, metavar="N")] = 1,
    retention: Retention = None,
    max_message: MaxMessage = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Exit status 0 where it exists; it stays as it is.")
    ] = False,
    http: Web = WEB,
    as_json: Json = False,
) -> None:
    """Create TOPIC on every broker."""
    kept = _kept(retention, max_message)
    if if_not_exists and _known(http, topic) is not None:
        note(f"topic {topic} exists")
        return
    wanted = {
        **kept,
        "topicName": topic,
        "numPartitions": str(partitions),
        "numTopicStores": str(stores),
        "createUser": "penstock",
    }
    try:
        rows = call(http, "admin_add_new_topic_record", wanted)
    except RefusedError as error:
        if "brokerId" not in error.text:
            raise
        # Apache's master wants the brokers by number; ours takes all that there are and will be.
        numbers = ",".join(str(broker.id) for broker in brokers(http, None))
        if not numbers:
            raise
        rows = call(http, "admin_add_new_topic_record", {**wanted, "brokerId": numbers})
    row: dict[str, Cell] = {"topic": topic, "partitions": partitions, "stores": stores, "brokers": len(rows)}
    print_table([row], ["topic", "partitions", "stores", "brokers"], as_json=as_json)


@app.command("alter")
@administers
@identifies
def topics_alter(
    topic: Topic,
    partitions: Annotated[
        int | None, typer.Option(help="Partitions in each store; they can only become more.", min=1, metavar="N")
    ] = None,
    retention: Retention = None,
    max_message: MaxMessage = None,
    publish: Annotated[bool | None, typer.Option(help="Whether it takes records.")] = None,
    subscribe: Annotated[bool | None, typer.Option(help="Whether it can be consumed.")] = None,
    broker: Brokers = None,
    http: Web = WEB,
) -> None:
    """Change what is given of TOPIC, on every broker or on some. With more partitions, keys may go to others."""
    wanted = _kept(retention, max_message)
    if partitions is not None:
        wanted["numPartitions"] = str(partitions)
    wanted |= {
        name: str(value).lower()
        for name, value in (("acceptPublish", publish), ("acceptSubscribe", subscribe))
        if value is not None
    }
    if not wanted:
        raise ConfigError(
            "nothing to change is given",
            do="give --partitions, --retention, --max-message, --publish or --subscribe, or --no- before one of these",
        )
    states = _states(http, topic, broker)
    there = {"brokerId": ",".join(map(str, states))} if _EVERY not in states else {}
    common = {"topicName": topic, "modifyUser": "penstock"}
    call(http, "admin_modify_topic_info", {**common, **wanted, **there})
    note(f"topic {topic} is changed")


@app.command("describe")
@administers
@identifies
def topics_describe(
    topic: Topic,
    broker: Brokers = None,
    http: Web = WEB,
    broker_http: BrokerHttp = None,
    as_json: Json = False,
) -> None:
    """Show where TOPIC is: brokers, partitions, what each partition holds."""
    wanted = _numbers(broker)
    rows: list[dict[str, Cell]] = []
    named = {"topicName": topic}
    for place, entries in ask_each(http, broker_http, lambda b: call_broker(b.web, "admin_query_pubinfo", named)):
        for entry in entries:
            rows += [
                {
                    "broker": place.id,
                    "address": f"{place.host}:{place.port}",
                    "partition": part["partitionId"],
                    "first_offset": part["offsetMin"],
                    "end_offset": part["offsetMax"],
                    "store_messages": (part["offsetMax"] - part["offsetMin"]) // ENTRY,
                    "store_bytes": part["dataMax"] - part["dataMin"],
                }
                for part in entry["offsetInfo"]
                if entry["topicName"] == topic and (not wanted or place.id in wanted)
            ]
    if not rows:
        known = _known(http, topic) is not None
        raise RefusedError(
            f"no broker tells of topic {topic!r}" if known else f"no broker has topic {topic!r}",
            peer=http,
            why="the master has it; Apache's brokers tell of it after its first record" if known else None,
            do=None if known else "look at the names (penstock tube topics), or create it",
        )
    columns = ["broker", "address", "partition", "first_offset", "end_offset", "store_messages", "store_bytes"]
    print_table(rows, columns, as_json=as_json)


@app.command("delete")
@administers
@identifies
def topics_delete(
    topic: Topic,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    broker: Brokers = None,
    http: Web = WEB,
    as_json: Json = False,
) -> None:
    """Delete TOPIC and its records, on every broker or on some."""
    states = _states(http, topic, broker)
    if not (yes or agreed(f"Delete topic {topic} and all its records on {len(states)} broker(s)?")):
        note(f"topic {topic} is not deleted")
        raise typer.Exit(1)
    common = {"topicName": topic, "modifyUser": "penstock"}
    closed = {"acceptPublish": "false", "acceptSubscribe": "false"}
    # The reference's order: closed to clients, marked as deleted, removed with its data. Each step goes to the brokers
    # that are not further yet, so that a deletion which was interrupted is finished by the same command.
    for method, parameters, before in (
        ("admin_modify_topic_info", closed, _OPEN),
        ("admin_delete_topic_info", {}, _CLOSED),
        ("admin_remove_topic_info", {}, _DELETED),
    ):
        ids = [number for number, state in states.items() if state <= before]
        if ids:
            there = {"brokerId": ",".join(map(str, ids))} if ids != [_EVERY] else {}
            call(http, method, {**common, **parameters, **there})
    until = time.monotonic() + _REMOVED_S
    while not (gone := _gone(http, topic, states if broker is not None else None)) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    if as_json:
        print_json({"topic": topic, "brokers": len(states), "removed": gone})
        return
    where = f" on {_listed(states)}" if broker is not None else ""
    note(f"topic {topic} is deleted{where}" + ("" if gone else "; its brokers remove the records"))


def _gone(http: str, topic: str, brokers: Iterable[int] | None) -> bool:
    """Whether these brokers have ``topic`` no more; None: whether the master has it no more."""
    known = _known(http, topic) or {}
    return not known if brokers is None else known.keys().isdisjoint(brokers)


def _numbers(broker: str | None) -> list[int]:
    """The brokers that ``--broker`` names; none: all. Raises ConfigError."""
    texts = [] if broker is None else [text.strip() for text in broker.split(",")]
    if not all(text.isdecimal() and text.isascii() for text in texts):
        raise ConfigError(f"--broker: got {broker!r}", option="--broker", do="name brokers by number: 2, or 2,3")
    return [int(text) for text in texts]


def _listed(brokers: Iterable[int]) -> str:
    return "broker " + ", ".join(map(str, brokers))


def _kept(retention: str | None, max_message: int | None) -> dict[str, str]:
    """The administration's parameters for what is given. Raises ConfigError."""
    kept = {}
    if retention is not None:
        match = _SPAN.fullmatch(retention)
        if match is None:
            raise ConfigError(
                f"--retention: got {retention!r}", option="--retention", do="write a number and a unit: 30m, 12h or 3d"
            )
        number, unit = match.groups()
        kept["deletePolicy"] = f"delete,{int(number) * 24}h" if unit == "d" else f"delete,{number}{unit}"
    if max_message is not None:
        kept["maxMsgSizeInMB"] = str(max_message)
    return kept


def _states(http: str, topic: str, broker: str | None) -> dict[int, int]:
    """How far the deletion of ``topic`` is on each broker, or on those of ``--broker``.

    Raises:
        ConfigError: ``--broker`` is no list of numbers.
        RefusedError: the master has no such topic, or it is not on one of them.
    """
    wanted = _numbers(broker)
    states = _known(http, topic)
    if states is None:
        raise RefusedError(
            f"the master has no topic {topic!r}", peer=http, do="look at the names (penstock tube topics)"
        )
    if lacking := [number for number in wanted if number not in states]:
        raise RefusedError(
            f"topic {topic!r} is not on {_listed(lacking)}", peer=http, why=f"it is on {_listed(states)}"
        )
    return {number: state for number, state in states.items() if not wanted or number in wanted}


def _known(http: str, topic: str) -> dict[int, int] | None:
    """How far the deletion of ``topic`` is on each broker; None: the master has no such topic."""
    found = [row for row in call(http, "admin_query_topic_info", {"topicName": topic}) if row["topicName"] == topic]
    if not found:
        return None
    # A master that just started knows the topic, and no broker yet.
    rows = [row for entry in found for row in entry["topicInfo"]] or [{**found[0], "brokerId": _EVERY}]
    states = {}
    for row in rows:
        opened = row.get("acceptPublish", True) or row.get("acceptSubscribe", True)
        # topicStatusId: 0 in use, 1 deleted, 2 and more being removed.
        state = _CLOSED + int(row.get("topicStatusId", 0))
        states[int(row["brokerId"])] = _OPEN if state == _CLOSED and opened else state
    return dict(sorted(states.items()))


def _list_topics(http: str, broker: str | None, *, as_json: bool) -> None:
    wanted = _numbers(broker)
    rows: list[dict[str, Cell]] = []
    for entry in sorted(call(http, "admin_query_topic_info", {}), key=lambda entry: str(entry["topicName"])):
        places: list[dict[str, Any]] = entry["topicInfo"]
        brokers = [place for place in places if not wanted or int(place["brokerId"]) in wanted]
        if wanted and not brokers:
            continue
        rows.append(
            {
                "topic": entry["topicName"],
                "partitions": max((broker["numPartitions"] for broker in brokers), default=0),
                "stores": max((broker["numTopicStores"] for broker in brokers), default=0),
                "brokers": len(brokers),
                "publish": entry["isSrvAcceptPublish"],
                "subscribe": entry["isSrvAcceptSubscribe"],
            }
        )
    print_table(rows, ["topic", "partitions", "stores", "brokers", "publish", "subscribe"], as_json=as_json)
