"""Reads that list both masters of a cluster while the active node changes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.tube.producer import Producer
from tests.interop.cluster_nodes import NodeProcess, until_pair
from tests.interop.etcd import EtcdCluster
from tests.interop.test_cluster_tube import PARTITIONS, masters, start, until_partitions


@pytest.mark.nightly  # 28 s, and the session
async def test_a_stream_continues_when_the_active_master_is_killed_between_batches(
    spark: SparkSession, tmp_path: Path, three: EtcdCluster
) -> None:
    nodes = [NodeProcess(tmp_path, name, "spark", three, number) for number, name in enumerate(("one", "other"), 1)]
    options = {"tubemq.master": masters(nodes), "subscribe": "demo", "startingOffsets": "earliest"}
    found: list[tuple[int, int]] = []

    def collect(rows: DataFrame, _: int) -> None:
        found.extend((row.broker, int(row.value)) for row in rows.select("broker", "value").collect())

    def numbers() -> list[int]:
        return sorted(number for _, number in found)

    async def send(more: Iterable[int]) -> None:
        async with Producer(masters(nodes), idempotent=True) as producer:
            for number in more:
                await producer.send("demo", b"%d" % number)

    try:
        active, standby = await start(nodes)
        await send(range(100))
        stream = spark.readStream.format("tubemq").options(**options).load().writeStream.foreachBatch(collect)
        query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            await asyncio.to_thread(query.processAllAvailable)
            assert numbers() == list(range(100))
            assert {broker for broker, _ in found} == {1, 2}
            active.signal(signal.SIGKILL)
            active.wait()
            await standby.until_active()
            await until_partitions(nodes, PARTITIONS)
            await send(range(100, 200))  # to the broker that is left
            active.start()
            await until_pair(nodes)
            await until_partitions(nodes, 2 * PARTITIONS)
            await send(range(200, 300))
            await asyncio.to_thread(query.processAllAvailable)
            assert numbers() == list(range(300))
            assert {broker for broker, number in found if number >= 200} == {1, 2}
        finally:
            query.stop()
        rows = await asyncio.to_thread(spark.read.format("tubemq").options(**options).load().collect)
        assert sorted(int(row.value) for row in rows) == list(range(300))
    finally:
        for node in nodes:
            node.end()
