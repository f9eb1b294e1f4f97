"""A rule to a TubeMQ cluster of two broker processes, one of which is killed while messages arrive."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from penstock.mqtt.client.client import MqttClient
from penstock.mqtt.codec.properties import Properties
from penstock.node.config.node import load_config
from penstock.node.node import Node
from penstock.tube.consumer import Consumer
from tests.faults.test_tube_clients_kill import Program
from tests.unit.tube.servers import Tube, until

_BROKER = """
import asyncio, sys
from pathlib import Path
from penstock.tube.broker.broker import TubeBroker

async def main():
    broker = TubeBroker(Path(sys.argv[1]), broker_id=int(sys.argv[2]), masters=[sys.argv[3]])
    await broker.start("127.0.0.1", 0)
    print("started", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_broker_delays_messages_and_loses_none(tmp_path: Path) -> None:
    running = Tube(tmp_path)
    master = await running.start_master()
    brokers = {n: Program(_BROKER, str(tmp_path / f"broker {n}"), str(n), running.masters) for n in (1, 2)}
    file = tmp_path / "penstock.yaml"
    listeners = dict.fromkeys(("mqtt", "http", "tube_master", "tube_broker", "tube_broker_http"), "127.0.0.1:0")
    rule = {"filter": "line/#", "to": {"tube": {"masters": [running.masters], "topic": "telemetry"}}}
    file.write_text(json.dumps(listeners | {"rules": [rule]}))
    node = Node(load_config(file, {"data-dir": str(tmp_path / "data")}, {}))
    acknowledged: set[str] = set()
    try:
        for broker in brokers.values():
            await broker.start()
        await until(lambda: sum(b.online for b in master.engine.cluster.brokers.values()) == 2)
        await master.create_topic("telemetry", ready_s=60)
        assert await master.wait_taken_up(["telemetry"])
        ready = await node.start()
        async with MqttClient(f"mqtt://{ready.mqtt}", client_id="device") as client:

            async def publish(number: int) -> None:
                properties = Properties(user_properties=[("id", f"m-{number}")])
                await client.publish(f"line/{number % 20}", b"%d" % number, qos=1, properties=properties)
                acknowledged.add(f"m-{number}")

            await asyncio.gather(*map(publish, range(200)))
            sending = [asyncio.create_task(publish(number)) for number in range(200, 400)]
            await brokers[2].kill()
            sending += [asyncio.create_task(publish(number)) for number in range(400, 600)]
            async with asyncio.timeout(60):
                await asyncio.gather(*sending)
        assert len(acknowledged) == 600, "the other broker has what the killed one did not acknowledge"
        await brokers[2].start()
        found: set[str] = set()
        written: set[int] = set()
        async with Consumer(running.masters, "readers", ["telemetry"]) as consumer, asyncio.timeout(60):
            async for message in consumer:
                assert message.record.id is not None
                found.add(message.record.id)
                written.add(message.broker_id)
                if found >= acknowledged:
                    break
        assert written == {1, 2}
    finally:
        await node.close()
        for broker in brokers.values():
            await broker.kill()
        await running.close()
