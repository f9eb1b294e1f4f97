"""A tube (master and broker) and an MQTT broker with the state store, in one process, in a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PenstockError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.server import MqttServer
from penstock.node.capture import CAPTURE_PARTITION, ChangeCapture
from penstock.runtime.io.files import Durability
from penstock.spark.tube.offsets import Slice
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.tube_client import TubeClient
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.codec.commands import Extension
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.service import StateStoreService
from penstock.tube.broker.broker import AppendResult, TubeBroker
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.broker.request_checks import Refusal
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.transactions.handler import _ErrorResponse
from penstock.tube.master.master import TubeMaster
from penstock.tube.record import Record

T = TypeVar("T")

SEGMENT_RECORDS = 200
CAPTURE_TOPIC = "statestore_changes"
"""The tube topic that gets the changes of the state store."""
_WEEKS_MS = 30 * 24 * 3_600_000


class Node:
    """Started by ``with``; the methods block."""

    def __init__(self, directory: Path, *, extensions: Extension = Extension.NONE) -> None:
        self._directory = directory
        self._extensions = extensions | Extension.SCAN | Extension.TTL | Extension.PREFIX_FENCE | Extension.BATCH
        self._others: dict[int, TubeBroker] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node", daemon=True)

    def __enter__(self) -> Node:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def create_topic(self, name: str, partitions: int = 2, stores: int = 1) -> None:
        async def create() -> None:
            await self._master.create_topic(name, partitions, stores)
            self._broker.heartbeat_now()
            await self._master.wait_topic(name, 10)

        self._run(create())

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its records."""
        closed = {"acceptPublish": "false", "acceptSubscribe": "false"}

        async def delete() -> None:
            for step, change in (("modify", closed), ("delete", {}), ("remove", {})):
                told = {"modifyUser": "me", "confModAuthToken": "token", "topicName": name, **change}
                answer = await self._master.webapi({"method": f"admin_{step}_topic_info", **told})
                assert answer["result"], answer
            while name in self._master.engine.cluster.topics:
                self._broker.heartbeat_now()
                await asyncio.sleep(0.02)

        self._run(delete())

    def add_broker(self, broker_id: int) -> None:
        """Another broker joins the tube, with the topics that exist."""

        async def add() -> None:
            self._others[broker_id] = await self._started(broker_id)

        self._run(add())

    def append(self, topic: str, messages: Iterable[tuple[int, bytes | Record]], broker_id: int = 1) -> list[int]:
        """Append (partition, message) in order; the positions they got."""
        broker = self._broker if broker_id == 1 else self._others[broker_id]

        async def append() -> list[int]:
            results: list[asyncio.Future[int]] = []
            for partition, message in messages:
                data, flag, msg_type = (message, 0, None) if isinstance(message, bytes) else message.encode()
                future: asyncio.Future[int] = self._loop.create_future()
                results.append(future)

                def done(result: AppendResult | PenstockError, future: asyncio.Future[int] = future) -> None:
                    if isinstance(result, PenstockError):
                        future.set_exception(result)
                    else:
                        future.set_result(result.append_offset)

                broker.append(topic, partition, data, flag, msg_type, done)
            return list(await asyncio.gather(*results))

        return self._run(append())

    def values(self, topic: str) -> list[bytes]:
        """The values of all records of ``topic``."""
        options = SourceOptions.parse({"tubemq.master": self.master, "subscribe": topic})
        with TubeClient.from_options(options) as tube:
            return [
                Record.decode(data, int(flag)).value
                for partition, bounds in tube.bounds(tube.partitions([topic])).items()
                for batch in tube.read(Slice(partition, bounds.oldest, bounds.end))
                for flag, data in zip(batch.flags, batch.payloads, strict=True)
            ]

    def expire_closed_segments(self) -> None:
        """As if a month had passed: only the newest segment of each store stays."""

        async def expire() -> None:
            self._broker.retain(self._broker.clock() + _WEEKS_MS)

        self._run(expire())

    @contextmanager
    def refusing_commits(self) -> Iterator[None]:
        """The broker refuses to commit what tasks staged."""
        transactions = self._broker.engine.transactions
        refused = _ErrorResponse(pb.TransactionResult.OTHER, Refusal(400, "the disk is on fire"))
        whole = dict(transactions._steps)
        transactions._steps[pb.Transaction.COMMIT] = lambda *_: refused
        try:
            yield
        finally:
            transactions._steps.update(whole)

    @property
    def staged(self) -> int:
        """Attempts whose rows are staged."""
        return self._broker.stats["staged_attempts"]

    def position(self, group: str, topic: str, partition: int) -> int | None:
        """Where ``group`` stands; None: nowhere."""

        async def position() -> int | None:
            assert self._broker.engine is not None
            return self._broker.engine.offsets.committed((group, topic, partition))

        return self._run(position())

    def set_keys(self, values: dict[str, bytes], *, ttl_ms: int | None = None, writer: str | None = None) -> None:
        async def set_all() -> None:
            async with StateStoreClient.connect(self.mqtt, client_id=writer) as store:
                for key, value in values.items():
                    await store.set(key, value, ttl_ms=ttl_ms)

        self._run(set_all())

    def wait_captured(self, count: int) -> None:
        """Until so many changes of the state store are in their topic."""

        async def wait() -> None:
            async with asyncio.timeout(60):
                while self.capture.stats.captured < count:
                    await asyncio.sleep(0.01)

        self._run(wait())

    def get(self, key: str) -> bytes | None:
        async def get() -> bytes | None:
            async with StateStoreClient.connect(self.mqtt) as store:
                entry = await store.get(key)
                return None if entry is None else entry.value

        return self._run(get())

    def retained(self, topic_filter: str, count: int) -> list[Publish]:
        """``count`` retained messages of the broker, by topic."""

        async def collect() -> list[Publish]:
            async with MqttClient(self.mqtt) as client:
                await client.subscribe(topic_filter)
                found: list[Publish] = []
                async with asyncio.timeout(60):
                    async for message in client.messages():
                        found.append(message)
                        if len(found) == count:
                            break
                return sorted(found, key=lambda message: message.topic)

        return self._run(collect())

    def delete(self, key: str) -> None:
        async def delete() -> None:
            async with StateStoreClient.connect(self.mqtt) as store:
                await store.delete(key)

        self._run(delete())

    async def _start(self) -> None:
        self._master = TubeMaster(self._directory, admin_token="token")
        host, port = await self._master.start("127.0.0.1", 0)
        self.master = f"{host}:{port}"
        self._broker = await self._started(1)
        await self._master.create_topic(CAPTURE_TOPIC, 1, 1)
        self._broker.heartbeat_now()
        await self._master.wait_topic(CAPTURE_TOPIC, 10)
        self.capture = ChangeCapture(
            CAPTURE_TOPIC, CAPTURE_PARTITION, self._broker.append_run, self._loop.call_later, last=None
        )
        self._store = StateStoreService(
            self._directory / "statestore",
            Durability.FLUSHED,
            options=StoreOptions(extensions=self._extensions),
            capture=self.capture,
        )
        self._mqtt = MqttServer(services=[self._store])
        await self._store.start(self._mqtt.outlet)
        host, port = await self._mqtt.start("127.0.0.1", 0)
        self.mqtt = f"mqtt://{host}:{port}"

    async def _started(self, broker_id: int) -> TubeBroker:
        limits = TubeLimits(segment_messages=SEGMENT_RECORDS)
        broker = TubeBroker(self._directory, Durability.FLUSHED, broker_id, masters=[self.master], limits=limits)
        await broker.start("127.0.0.1", 0)
        assert broker.registered is not None
        await asyncio.wait_for(broker.registered.wait(), 60)
        return broker

    async def _close(self) -> None:
        await self._mqtt.close()
        await self._store.close()
        for broker in self._others.values():
            await broker.close()
        await self._broker.close()
        await self._master.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(60)
