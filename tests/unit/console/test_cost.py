"""A console that nobody looks at costs nothing: requests of clients call none of its code."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import penstock.console
from penstock.mqtt.client import MqttClient
from penstock.node.config.node import RuleSection
from penstock.node.node import Node, ReadyNode
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.consumer import Consumer
from tests.unit.node.test_api import Api
from tests.unit.node.test_node import config

FOLDER = str(Path(penstock.console.__file__).parent)


class Calls:
    """Calls of functions of the console, by module and name, inside the block."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        sys.setprofile(self._called)
        return self.counts

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code: CodeType = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDER):
            self.counts[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1


async def traffic(ready: ReadyNode) -> None:
    host, port = parse_address(ready.mqtt)
    async with StateStoreClient.connect(f"mqtt://{host}:{port}") as store:
        for number in range(20):
            await store.set(f"key/{number}", "value")
            assert await store.get(f"key/{number}") is not None
    async with MqttClient(host, port, client_id="meter") as client:
        await client.subscribe("plant/#", qos=1)
        for _ in range(20):
            await client.publish("plant/a", b"1", qos=1)
    async with Consumer(ready.tube_master, "lake", ["water"]) as consumer:
        seen = 0
        async for _ in consumer:
            seen += 1
            if seen == 20:
                break


async def test_requests_of_clients_call_no_code_of_the_console(tmp_path: Path) -> None:
    node = Node(config(tmp_path, rules=[RuleSection(filter="plant/#", topic="water")]))
    try:
        ready = await node.start()
        assert node.console._timer is not None
        node.console._timer.cancel()  # samples are taken once a second, whatever the traffic
        with Calls() as calls:
            await traffic(ready)
        assert {name: count for name, count in calls.items() if not name.startswith("events.")} == {}
        with Calls() as calls:
            await Api(ready).get("/topics/water/records")  # the count sees what it is to see
        assert calls["records.records"] > 0
    finally:
        await node.close()
