"""`penstock tube topic`: list, describe, create, change and delete topics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from penstock.cli.options import Commands, Json, Yes, confirmed, duration_option, size_option
from penstock.cli.output import Cell, note, print_json, print_table
from penstock.cli.tube.access import Topic, TubeConnectionOptions, check_topic, connects, no_topic
from penstock.cli.tube.offset_spec import ENTRY
from penstock.cli.tube.search import search
from penstock.errors import ConfigError, RefusedError

__all__ = ["app", "create_topic", "delete_topic"]

_OPEN, _CLOSED, _DELETED = range(3)
_EVERY = -1
_EXISTS = 402
"""Error code of penstock's master: the topic exists."""
_MAX_RETENTION_S = 168 * 3600
_REMOVED_S = 5.0
"""Seconds to wait for brokers to remove a topic, which they do with their next heartbeats; penstock's brokers within a
second."""
_POLL_S = 0.1
_MIB = 1 << 20
_MAX_MESSAGE_MIB = 20

Retention = Annotated[float | None, duration_option(text="Keep records for this long, at most 7d.", at_least_s=1)]
BrokerIds = Annotated[
    str | None, typer.Option("--broker-id", help="Only the brokers with these ids, separated by commas.", metavar="ID")
]
MaxMessageSize = Annotated[
    int | None, size_option(text="Size of the largest record: 1MiB (the default of a new topic) to 20MiB.")
]

app = Commands("List, describe, search, create, change and delete topics.")
app.add(
    "penstock tube topic search telemetry --path 'temperature>80' --from 1h",
    "penstock tube topic search telemetry --key 'plant/a/*' --count 10 --json",
)(search)


@app.add("penstock tube topic list", "penstock tube topic list --broker-id 2 --json", name="list")
@connects
def topics_list(tube: TubeConnectionOptions, broker_id: BrokerIds = None, as_json: Json = False) -> None:
    """List the topics."""
    wanted = _numbers(broker_id)
    rows: list[dict[str, Cell]] = []
    for entry in sorted(tube.call("admin_query_topic_info", {}), key=lambda entry: str(entry["topicName"])):
        deployed: list[dict[str, Any]] = entry["topicInfo"]
        brokers = [row for row in deployed if not wanted or int(row["brokerId"]) in wanted]
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


@app.add(
    "penstock tube topic create telemetry --partitions 6 --retention 3d",
    "penstock tube topic create telemetry --broker-id 2 --if-not-exists",
    name="create",
)
@connects
def topics_create(
    topic: Topic,
    tube: TubeConnectionOptions,
    partitions: Annotated[int, typer.Option(help="Partitions of each store.", min=1, max=9999, metavar="N")] = 3,
    stores: Annotated[
        int, typer.Option(help="Message stores per broker, each with its own files.", min=1, max=100, metavar="N")
    ] = 1,
    retention: Retention = None,
    max_message_size: MaxMessageSize = None,
    broker_id: BrokerIds = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Exit with 0 if the topic exists; it is not changed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create TOPIC on every broker, including brokers that join later, or on the brokers of --broker-id."""
    check_topic(topic)
    settings = _settings(retention, max_message_size)
    if chosen := _numbers(broker_id):
        settings["brokerId"] = ",".join(map(str, sorted(chosen)))
    if if_not_exists and _known(tube, topic) is not None:
        note(f"topic {topic} exists already")
        return
    brokers = create_topic(tube, topic, {**settings, "numPartitions": str(partitions), "numTopicStores": str(stores)})
    row: dict[str, Cell] = {"topic": topic, "partitions": partitions, "stores": stores, "brokers": brokers}
    print_table([row], ["topic", "partitions", "stores", "brokers"], as_json=as_json)


def create_topic(tube: TubeConnectionOptions, topic: str, settings: Mapping[str, str]) -> int:
    """Create ``topic`` with these parameters of the administration; return the number of its brokers.

    Raises:
        RefusedError: it exists, or the master refused a parameter.
    """
    wanted = {**settings, "topicName": topic, "createUser": "penstock"}
    try:
        return len(tube.call("admin_add_new_topic_record", wanted))
    except RefusedError as error:
        if error.code == _EXISTS:
            hint = f"change it (penstock tube topic alter {topic}), or do not change it: --if-not-exists"
            raise RefusedError(error.what, code=error.code, text=error.text, peer=error.peer, hint=hint) from None
        if "brokerId" in settings or "brokerId" not in error.text:
            raise
        # Apache's master requires ids of brokers; penstock's master deploys the topic on all brokers, including later
        # ones.
        numbers = ",".join(str(broker.id) for broker in tube.brokers())
        if not numbers:
            raise
        return len(tube.call("admin_add_new_topic_record", {**wanted, "brokerId": numbers}))


@app.add(
    "penstock tube topic alter telemetry --partitions 12",
    "penstock tube topic alter telemetry --no-publish --broker-id 2",
    name="alter",
)
@connects
def topics_alter(
    topic: Topic,
    tube: TubeConnectionOptions,
    partitions: Annotated[
        int | None, typer.Option(help="Partitions of each store; the number cannot be reduced.", min=1, metavar="N")
    ] = None,
    retention: Retention = None,
    max_message_size: MaxMessageSize = None,
    publish: Annotated[bool | None, typer.Option(help="Accept records from producers.")] = None,
    subscribe: Annotated[bool | None, typer.Option(help="Offer the topic to consumers.")] = None,
    broker_id: BrokerIds = None,
) -> None:
    """Change settings of TOPIC, on every broker or on some.

    With more partitions, records of a key may be sent to another partition than before.
    """
    wanted = _settings(retention, max_message_size)
    if partitions is not None:
        wanted["numPartitions"] = str(partitions)
    wanted |= {
        name: str(value).lower()
        for name, value in (("acceptPublish", publish), ("acceptSubscribe", subscribe))
        if value is not None
    }
    if not wanted:
        raise ConfigError(
            "no setting to change",
            hint="set --partitions, --retention, --max-message-size, --[no-]publish or --[no-]subscribe",
        )
    states = _states(tube, topic, broker_id)
    there = {"brokerId": ",".join(map(str, states))} if _EVERY not in states else {}
    common = {"topicName": topic, "modifyUser": "penstock"}
    tube.call("admin_modify_topic_info", {**common, **wanted, **there})
    note(f"topic {topic} was changed")


@app.add("penstock tube topic describe telemetry", name="describe")
@connects
def topics_describe(
    topic: Topic,
    tube: TubeConnectionOptions,
    broker_id: BrokerIds = None,
    as_json: Json = False,
) -> None:
    """Show the brokers and partitions of TOPIC, and the offsets and sizes of each partition."""
    wanted = _numbers(broker_id)
    rows: list[dict[str, Cell]] = []
    named = {"topicName": topic}
    for place, entries in tube.ask_each(lambda b: tube.call_broker(b.web, "admin_query_pubinfo", named)):
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
        states = _known(tube, topic)
        if states is None:
            raise no_topic(tube.http, topic, known=tube.topics())
        if lacking := [number for number in wanted if number not in states]:
            raise _not_on(tube, topic, lacking, states)
        raise RefusedError(
            f"no broker reports topic {topic!r}",
            peer=tube.http,
            why="the master has it; Apache's brokers report it after its first record",
            hint="check that its brokers run: penstock tube broker list",
        )
    columns = ["broker", "address", "partition", "first_offset", "end_offset", "store_messages", "store_bytes"]
    print_table(rows, columns, as_json=as_json)


@app.add(
    "penstock tube topic delete telemetry", "penstock tube topic delete telemetry --broker-id 2 --yes", name="delete"
)
@connects
def topics_delete(
    topic: Topic,
    tube: TubeConnectionOptions,
    yes: Yes = False,
    broker_id: BrokerIds = None,
    as_json: Json = False,
) -> None:
    """Delete TOPIC and its records, on every broker or on some."""
    states = _states(tube, topic, broker_id)
    if not (yes or confirmed(f"Delete topic {topic} and all its records (brokers: {len(states)})?")):
        note(f"topic {topic} was not deleted")
        raise typer.Exit(1)
    gone = delete_topic(tube, topic, states, everywhere=broker_id is None)
    if as_json:
        print_json({"topic": topic, "brokers": len(states), "removed": gone})
        return
    where = f" on {_listed(states)}" if broker_id is not None else ""
    note(f"topic {topic} was deleted{where}" + ("" if gone else "; its brokers are still removing the records"))


def delete_topic(
    tube: TubeConnectionOptions, topic: str, states: Mapping[int, int] | None = None, *, everywhere: bool = True
) -> bool:
    """Delete ``topic`` on the brokers of ``states``; default: on all. Return True if they have removed it already.

    ``everywhere``: these are all brokers, so that the master no longer has it, either.

    Raises:
        RefusedError: the topic does not exist.
    """
    states = _states(tube, topic, None) if states is None else states
    common = {"topicName": topic, "modifyUser": "penstock"}
    closed = {"acceptPublish": "false", "acceptSubscribe": "false"}
    # Apache's order: close to clients, mark as deleted, remove with its data. Each step is sent to the brokers that
    # have not done it yet, so that the same command completes an interrupted deletion.
    for method, parameters, before in (
        ("admin_modify_topic_info", closed, _OPEN),
        ("admin_delete_topic_info", {}, _CLOSED),
        ("admin_remove_topic_info", {}, _DELETED),
    ):
        ids = [number for number, state in states.items() if state <= before]
        if ids:
            there = {"brokerId": ",".join(map(str, ids))} if ids != [_EVERY] else {}
            tube.call(method, {**common, **parameters, **there})
    until = time.monotonic() + _REMOVED_S
    while not (gone := _is_deleted(tube, topic, None if everywhere else states)) and time.monotonic() < until:
        time.sleep(_POLL_S)
    return gone


def _is_deleted(tube: TubeConnectionOptions, topic: str, brokers: Iterable[int] | None) -> bool:
    """Return True if these brokers no longer have ``topic``; ``brokers`` None: if the master no longer has it."""
    known = _known(tube, topic) or {}
    return not known if brokers is None else known.keys().isdisjoint(brokers)


def _numbers(broker_id: str | None) -> list[int]:
    """Return the ids in ``--broker-id``; empty: all brokers. Raises ConfigError."""
    texts = [] if broker_id is None else [text.strip() for text in broker_id.split(",")]
    if not all(text.isdecimal() and text.isascii() for text in texts):
        raise ConfigError(
            f"--broker-id: got {broker_id!r}", option="--broker-id", hint="write ids of brokers: 2, or 2,3"
        )
    return [int(text) for text in texts]


def _listed(brokers: Iterable[int]) -> str:
    return "broker " + ", ".join(map(str, brokers))


def _settings(retention_s: float | None, max_message_size: int | None) -> dict[str, str]:
    """Return the parameters of the administration for the given options.

    Raises:
        ConfigError: the retention is longer than a week, or the size is not a number of MiB from 1 to 20.
    """
    settings = {}
    if retention_s is not None:
        if retention_s > _MAX_RETENTION_S:
            got = "forever" if math.isinf(retention_s) else f"{round(retention_s)} s"
            raise ConfigError(f"--retention: got {got}", option="--retention", hint="set at most 7d")
        whole = round(retention_s)
        per_unit, unit = next(pair for pair in ((3600, "h"), (60, "m"), (1, "s")) if not whole % pair[0])
        settings["deletePolicy"] = f"delete,{whole // per_unit}{unit}"
    if max_message_size is not None:
        mib, rest = divmod(max_message_size, _MIB)
        if rest or not 1 <= mib <= _MAX_MESSAGE_MIB:
            raise ConfigError(
                f"--max-message-size: got {max_message_size} bytes",
                option="--max-message-size",
                hint=f"write whole MiB, from 1MiB to {_MAX_MESSAGE_MIB}MiB",
            )
        settings["maxMsgSizeInMB"] = str(mib)
    return settings


def _states(tube: TubeConnectionOptions, topic: str, broker_id: str | None) -> dict[int, int]:
    """Return the state of ``topic`` by broker id, for all brokers or those in ``--broker-id``: open, closed, or deleted
    (and later states of a removal).

    Raises:
        ConfigError: ``--broker-id`` is not a list of numbers.
        RefusedError: the topic does not exist, or not on one of these brokers.
    """
    wanted = _numbers(broker_id)
    states = _known(tube, topic)
    if states is None:
        raise no_topic(tube.http, topic, known=tube.topics())
    if lacking := [number for number in wanted if number not in states]:
        raise _not_on(tube, topic, lacking, states)
    return {number: state for number, state in states.items() if not wanted or number in wanted}


def _not_on(tube: TubeConnectionOptions, topic: str, lacking: Iterable[int], has: Iterable[int]) -> RefusedError:
    return RefusedError(
        f"topic {topic!r} is not on {_listed(lacking)}",
        peer=tube.http,
        why=f"it is on {_listed(has)}",
        hint="choose brokers that have it, or omit --broker-id for all",
    )


def _known(tube: TubeConnectionOptions, topic: str) -> dict[int, int] | None:
    """Return the state of ``topic`` by broker id; None if the master has no such topic."""
    found = [row for row in tube.call("admin_query_topic_info", {"topicName": topic}) if row["topicName"] == topic]
    if not found:
        return None
    # After its start a master has the topic before any broker has registered.
    rows = [row for entry in found for row in entry["topicInfo"]] or [{**found[0], "brokerId": _EVERY}]
    states = {}
    for row in rows:
        opened = row.get("acceptPublish", True) or row.get("acceptSubscribe", True)
        # Values of topicStatusId: 0 in use, 1 deleted, 2 and above being removed.
        state = _CLOSED + int(row.get("topicStatusId", 0))
        states[int(row["brokerId"])] = _OPEN if state == _CLOSED and opened else state
    return dict(sorted(states.items()))
