"""A whole node with extensions and change capture: what the configuration says is what clients meet."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.node.config.statestore import StateStoreSection
from penstock.node.node import Node
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.reader import RangeReader, partitions
from penstock.tube.record import Record
from tests.unit.node.test_node import config

SECTION = StateStoreSection(capture_topic="changes", extensions=["mget", "prefix-fence"])


def captured_records(master: str) -> list[Record]:
    """Every record of the topic, read as a consumer would."""
    (part,) = partitions(master, "changes")
    with RangeReader(part.host, part.port) as reader:
        return [
            Record.decode(data, flag)
            for batch in reader.read("changes", part.partition, *reader.bounds("changes", part.partition))
            for data, flag in zip(batch.payloads, batch.flags, strict=True)
        ]


def captured(master: str) -> list[tuple[bytes | None, str | None, bytes]]:
    """Key, operation and value of every record of the topic."""
    return [(record.key, record.msg_type, record.value) for record in captured_records(master)]


async def test_changes_are_captured_over_a_restart_of_the_node(tmp_path: Path) -> None:
    for run in (1, 2):
        node = Node(config(tmp_path, statestore=SECTION))
        ready = await node.start()
        try:
            async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
                await store.set("k", f"run {run}")
                snapshot = await store.get_many(["k", "nothing"])
                entry = snapshot.entries[b"k"]
                assert entry is not None
                assert (entry.value, snapshot.entries[b"nothing"]) == (f"run {run}".encode(), None)
                await store.delete("k")
            async with asyncio.timeout(60):
                while b'penstock_capture_captured_changes_total{topic="changes"} 2.0' not in node.metrics.render():
                    await asyncio.sleep(0.01)
            found = await asyncio.to_thread(captured, ready.tube_master)
        finally:
            await node.close()
        expected = [(b"k", "SET", b"run 1"), (b"k", "DELETE", b""), (b"k", "SET", b"run 2"), (b"k", "DELETE", b"")]
        assert found == expected[: 2 * run]
