"""Producer and consumer without ``await``, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from penstock.errors import LocalProtocolError, RefusedError, UnavailableError
from penstock.tube.blocking import Consumer, Producer
from tests.unit.tube.servers import tube


def produce_and_consume(masters: str) -> None:
    with Producer(masters) as producer:
        assert producer.send("demo", b"000", partition=0).append_offset == 0
        assert len(producer.send_all("demo", [b"%03d" % n for n in range(1, 200)], partition=0)) == 199
        assert producer.queue("demo", b"200", partition=0).result().partition == 0
        producer.flush()
        producer.publish("demo")
        producer.unpublish("demo")
    with Consumer(masters, "lake", ["demo"], with_offsets=True) as consumer:
        seen = [next(consumer) for _ in range(50)]
        assert [message.data for message in seen] == [b"%03d" % n for n in range(50)]
        consumer.confirm()
        assert next(consumer).data == b"050"
        [place] = [partition for partition in consumer.assignment if partition.id == 0]
        consumer.seek({place: seen[10].offset or 0})
        assert next(consumer).data == b"010"
        consumer.seek_to_time(0)
        assert [next(consumer).data for _ in range(201)][-1] == b"200"
        assert consumer.poll(0.05) is None
        assert consumer.positions[place].end == 201 * 28
    with Consumer(masters, "lake", ["demo"]) as consumer:
        assert consumer.poll(0.3) is None, "all of it is confirmed"


def fail_in_the_block(masters: str) -> None:
    with contextlib.suppress(ZeroDivisionError), Consumer(masters, "other", ["demo"]) as consumer:
        next(consumer)
        raise ZeroDivisionError
    with Consumer(masters, "other", ["demo"]) as consumer:
        assert next(consumer).data == b"000", "what was in hand comes again"


async def test_scripts(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        before = threading.active_count()
        await asyncio.to_thread(produce_and_consume, running.masters)
        await asyncio.to_thread(fail_in_the_block, running.masters)
        with pytest.raises(RefusedError):
            await asyncio.to_thread(Consumer(running.masters, "lake", ["none"]).start)
        assert threading.active_count() <= before + 1, "every thread has ended (the executor's own may stay)"


def test_what_is_not_running() -> None:
    producer, consumer = Producer("127.0.0.1:1"), Consumer("127.0.0.1:1", "lake", ["demo"])
    with pytest.raises(LocalProtocolError, match="not running"):
        producer.send("demo", b"x")
    with pytest.raises(LocalProtocolError, match="not running"):
        next(consumer)
    producer.close()
    consumer.close()
    with pytest.raises(UnavailableError):
        producer.start()
    with pytest.raises(UnavailableError):
        consumer.start()
