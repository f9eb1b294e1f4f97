"""kill -9 of a node with a rule: what was acknowledged is in the tube, and subscribers get QoS 2 once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from penstock.runtime.io.network import parse_address
from tests.end_to_end.nodes import RunningNode
from tests.faults.mqtt_peers import Reader, Writer
from tests.faults.test_mqtt_crash import until
from tests.histories.mqtt import MqttRecorder, check

CONFIG = """
rules:
  - filter: plant/#
    topic: water
"""
ROUNDS = 2


async def test_two_logs_and_a_death_between_them(tmp_path: Path) -> None:
    history = MqttRecorder(tmp_path / "history.jsonl")
    writer, reader = Writer(history, "w0", topic="plant/flow"), Reader(history, "reader", "plant/#")
    with RunningNode(tmp_path, CONFIG) as node:
        port = parse_address(node.ready["mqtt"]).port
        for _ in range(ROUNDS):
            tasks = [asyncio.create_task(reader.run(port))]
            await until(reader.subscribed.is_set)
            before = len(writer.acknowledged)
            tasks.append(asyncio.create_task(writer.run(port)))
            await until(lambda: len(writer.acknowledged) >= before + 150)
            await asyncio.to_thread(node.kill)
            await asyncio.gather(*tasks)
            await asyncio.to_thread(node.start)
        writer.last = writer.number
        tasks = [asyncio.create_task(peer.run(port)) for peer in (writer, reader)]
        await until(lambda: not writer.open and writer.acknowledged <= set(reader.received) and not reader.unreleased)
        for peer in (writer, reader):
            peer.close()
        await asyncio.gather(*tasks)
        check(history.path)
        rows = await asyncio.to_thread(node.rows, "tube", "consume", "water")
    logged = Counter(row["value"] for row in rows)
    assert writer.acknowledged <= logged.keys()
    # What comes twice was under way when the node died, no more than the window each time.
    assert sum(logged.values()) - len(logged) <= ROUNDS * writer.window
