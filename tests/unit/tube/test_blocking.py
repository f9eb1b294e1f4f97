"""Producer and consumer without ``await``, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from pathlib import Path
from typing import get_type_hints

import pytest

from penstock.errors import ConfigError, LocalProtocolError, RefusedError, UnavailableError
from penstock.tube import consumer, producer
from penstock.tube.blocking import Consumer, ConsumerOptions, Producer, ProducerOptions
from tests.unit.tube.servers import tube


def produce_and_consume(masters: str) -> None:
    with Producer(masters) as sender:
        assert sender.send("demo", b"000", partition=0).append_offset == 0
        assert len(sender.send_all("demo", [b"%03d" % n for n in range(1, 200)], partition=0)) == 199
        assert sender.queue("demo", b"200", partition=0).result().partition == 0
        sender.flush()
        with pytest.raises(LocalProtocolError, match="the producer is running already"):
            sender.start()
        sender.publish("demo")
        sender.unpublish("demo")
        assert [partition.id for partition in sender.partitions("demo")] == [0, 1, 2]
    with Consumer(masters, "lake", ["demo"], with_offsets=True) as reader:
        seen = [next(reader) for _ in range(50)]
        assert [message.data for message in seen] == [b"%03d" % n for n in range(50)]
        reader.confirm()
        assert next(reader).data == b"050"
        [place] = [partition for partition in reader.assignment if partition.id == 0]
        reader.seek({place: seen[10].offset or 0})
        assert next(reader).data == b"010"
        reader.seek_to_time(0)
        assert [next(reader).data for _ in range(201)][-1] == b"200"
        reader.seek_to_start()
        assert [next(reader).data for _ in range(201)][-1] == b"200"
        reader.seek_to_end()
        assert reader.poll(0.05) is None
        assert reader.offsets[place].end == 201 * 28
    with Consumer(masters, "lake", ["demo"]) as reader:
        assert reader.poll(0.3) is None, "all of it is confirmed"


def fail_in_the_block(masters: str) -> None:
    with contextlib.suppress(ZeroDivisionError), Consumer(masters, "other", ["demo"]) as reader:
        next(reader)
        raise ZeroDivisionError
    with Consumer(masters, "other", ["demo"]) as reader:
        assert next(reader).data == b"000", "what was in hand comes again"


async def test_scripts(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        before = threading.active_count()
        await asyncio.to_thread(produce_and_consume, running.masters)
        await asyncio.to_thread(fail_in_the_block, running.masters)
        with pytest.raises(RefusedError):
            await asyncio.to_thread(Consumer(running.masters, "lake", ["none"]).start)
        assert threading.active_count() <= before + 1, "every thread has ended (the executor's own may stay)"


def poll_without_confirming(masters: str) -> None:
    with Consumer(masters, "other", ["demo"], auto_confirm=False) as reader:
        assert [reader.poll(10) is None for _ in range(20)] == [False] * 20
        with pytest.raises(LocalProtocolError, match=r"no more messages after 0.2 s") as caught:
            reader.poll(0.2)
        assert caught.value.hint is not None
        assert "confirm()" in caught.value.hint
        assert len(reader.blocked) == 1
        reader.confirm()
        assert not reader.blocked
        assert reader.poll(0.2) is None, "now it is drained"


async def test_poll_distinguishes_an_unconfirmed_batch_from_a_drained_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tube.engine.client.consumer_state.EXTENSIONS", None)  # served as Apache's brokers do
    async with tube(tmp_path, "demo", partitions=1) as running:
        async with producer.Producer(running.masters) as sender:
            await sender.send_all("demo", [b"%d" % number for number in range(20)])
        await asyncio.to_thread(poll_without_confirming, running.masters)


def test_clients_that_are_not_running_raise_errors() -> None:
    sender, reader = Producer("127.0.0.1:1"), Consumer("127.0.0.1:1", "lake", ["demo"])
    with pytest.raises(LocalProtocolError, match="not running"):
        sender.send("demo", b"x")
    with pytest.raises(LocalProtocolError, match="not running"):
        next(reader)
    sender.close()
    reader.close()
    with pytest.raises(UnavailableError):
        sender.start()
    with pytest.raises(UnavailableError):
        reader.start()


@pytest.mark.parametrize(
    ("options", "client"), [(ProducerOptions, producer.Producer), (ConsumerOptions, consumer.Consumer)]
)
def test_the_options_are_those_of_the_client(options: type, client: type) -> None:
    made = vars(client)["__init__"]
    hints = get_type_hints(made)
    keywords = {
        name: hints[name]
        for name, parameter in inspect.signature(made).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "connections"  # connections of another loop
    }
    assert get_type_hints(options) == keywords


def test_wrong_arguments_are_refused_where_they_are_given() -> None:
    with pytest.raises(ConfigError, match="heartbeat_s: got 0"):
        Producer("127.0.0.1:1", heartbeat_s=0)
    with pytest.raises(ConfigError, match="lists, not one text"):
        Consumer("127.0.0.1:1", "lake", "demo")
    with pytest.raises(TypeError, match="idempotence"):
        Producer("127.0.0.1:1", idempotence=True)  # type: ignore[call-arg]
