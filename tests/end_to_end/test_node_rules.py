"""A rule of a real node, fed by a real device's client: from mosquitto_pub into the tube."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.end_to_end.nodes import RunningNode
from tests.tools import require_tool

CONFIG = """
tube:
  topics:
    water: {partitions: 2, stores: 2}
rules:
  - filter: plants/+/flow
    topic: water
  - filter: plants/#
    topic: everything
    key: "{level.2}"
    msg_type: "{user.kind}"
"""


def publish(node: RunningNode, topic: str, payload: str, *args: str) -> subprocess.CompletedProcess[str]:
    host, _, port = node.ready["mqtt"].rpartition(":")
    command = [require_tool("mosquitto_pub"), "-V", "5", "-h", host, "-p", port, "-q", "1", "-d"]
    return subprocess.run(
        [*command, "-t", topic, "-m", payload, *args],
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_mqtt_messages_become_records(tmp_path: Path) -> None:
    with RunningNode(tmp_path, CONFIG) as node:
        properties = [
            "-D",
            "publish",
            "user-property",
            "kind",
            "measured",
            "-D",
            "publish",
            "user-property",
            "id",
            "m-1",
        ]
        properties += ["-D", "publish", "content-type", "application/json"]
        done = publish(node, "plants/7/flow", '{"flow": 3}', *properties, "-i", "meter")
        assert "received PUBACK (Mid: 1, RC:0)" in done.stdout, done.stderr
        assert "RC:0" in publish(node, "plants/8/level", "1", "-i", "meter").stdout
        water = node.rows("tube", "consume", "water")
        assert len(water) == 1
        assert {**water[0], "partition": 0, "offset": 0, "append_time_ms": 0} == {
            "topic": "water",
            "broker_id": 1,
            "partition": 0,
            "offset": 0,
            "append_time_ms": 0,
            "key": "plants/7/flow",
            "value": '{"flow": 3}',
            "headers": [["kind", "measured"]],
            "mqtt_topic": "plants/7/flow",
            "content_type": "application/json",
            "event_time_ms": None,
            "id": "m-1",
            "msg_type": "flow",
        }
        everything = {row["mqtt_topic"]: row for row in node.rows("tube", "consume", "everything")}
        assert set(everything) == {"plants/7/flow", "plants/8/level"}
        assert (everything["plants/7/flow"]["key"], everything["plants/7/flow"]["msg_type"]) == ("7", "measured")
        assert everything["plants/8/level"]["id"].startswith("meter/")


def test_acknowledged_messages_survive_kill_9_and_ids_never_repeat(tmp_path: Path) -> None:
    with RunningNode(tmp_path, CONFIG) as node:
        for run in range(2):
            for n in range(3):
                assert "RC:0" in publish(node, f"plants/{n}/flow", f"{run}-{n}", "-i", "meter").stdout
            node.kill()
            node.start()
        rows = node.rows("tube", "consume", "water")
        assert sorted(row["value"] for row in rows) == sorted(f"{run}-{n}" for run in range(2) for n in range(3))
        assert len({row["id"] for row in rows}) == 6
        places: dict[str, set[int]] = {}
        for row in rows:
            places.setdefault(row["key"], set()).add(row["partition"])
        assert all(len(partitions) == 1 for partitions in places.values())
