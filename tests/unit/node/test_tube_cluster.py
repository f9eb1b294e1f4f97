"""Rules to a TubeMQ cluster: configuration, key and message type, waiting for masters, brokers and topics."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, LocalProtocolError, RefusedError, UnavailableError
from penstock.node.config.node import load_config
from penstock.node.config.tube_cluster import TubeClusterSection
from penstock.node.rules import PORTION
from penstock.node.tube_cluster import TubeClusterTarget
from penstock.tube.codec.codes import ErrCode
from penstock.tube.consumer import Consumer
from penstock.tube.producer import SendResult
from penstock.tube.record import Record
from tests.certificates import Authority
from tests.histories.proxy import Proxy
from tests.ports import free_port
from tests.unit.tube.servers import Tube, tube, until

TUBE: dict[str, Any] = {"masters": ["h:8715", "i:8715"], "topic": "telemetry"}


def section(running: Tube, **more: Any) -> TubeClusterSection:
    return TubeClusterSection.model_validate({"masters": [running.masters], "topic": "telemetry", **more})


def record(number: int, key: bytes | None = None) -> Record:
    return Record(b"%d" % number, key=key, id=f"m-{number}", msg_type="reading", headers=[("unit", "bar")])


async def read(masters: str, topic: str, end: int | bytes, group: str = "readers") -> list[Record]:
    """Return the first records: ``end`` ones, or those up to one with the value ``end``."""
    found: list[Record] = []
    async with Consumer(masters, group, [topic]) as consumer, asyncio.timeout(30):
        async for message in consumer:
            assert message.record.msg_type == "reading"
            found.append(message.record)
            if end in {len(found), message.record.value}:
                break
    return found


def reason(target: TubeClusterTarget) -> str:
    warning = target.warning()
    return "" if warning is None else warning.why or ""


def load(folder: Path, rule: dict[str, Any], **more: Any) -> None:
    file = folder / "penstock.yaml"
    file.write_text(json.dumps({"rules": [{"filter": "a/#", **rule}], **more}))
    config = load_config(file, {}, {})
    assert [entry.target for entry in config.rules] == ["telemetry"]
    assert "telemetry" not in config.topics(), "the cluster has its own topics"


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ({"to": {}}, "set either `kafka` or `tube`"),
        ({"to": {"tube": TUBE, "kafka": {"bootstrap": ["h:1"], "topic": "t"}}}, "set either `kafka` or `tube`"),
        ({"topic": "telemetry", "to": {"tube": TUBE}}, "set either `topic`"),
        ({"to": {"tube": TUBE | {"masters": []}}}, "masters"),
        ({"to": {"tube": TUBE | {"masters": ["h"]}}}, "masters"),
        ({"to": {"tube": TUBE | {"topic": "a/b"}}}, "expected a TubeMQ topic"),
        ({"to": {"tube": TUBE | {"user": "u"}}}, "set `user` and `password_file` together"),
    ],
)
def test_configuration(tmp_path: Path, rule: dict[str, Any], error: str) -> None:
    load(tmp_path, {"to": {"tube": TUBE}, "partition": 7, "msg_type": "x"})
    load(tmp_path, {"to": {"tube": TUBE}}, cluster={"name": "c", "node": "n", "etcd": ["h:2379"]})
    with pytest.raises(ConfigError, match=error):
        load(tmp_path, rule)


def test_files_are_relative_to_the_configuration_and_checked_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    login = {"user": "u", "password_file": "p", "tls": {"ca": "ca.pem"}}
    file.write_text(json.dumps({"rules": [{"filter": "a/#", "to": {"tube": TUBE | login}}]}))
    target = load_config(file, {}, {}).rules[0].to
    assert target is not None
    assert target.tube is not None
    assert target.tube.tls is not None
    assert (target.tube.password_file, target.tube.tls.ca) == (tmp_path / "p", tmp_path / "ca.pem")
    missing = str(tmp_path / "none")
    for more, option in (
        ({"user": "u", "password_file": missing}, "password_file"),
        ({"tls": {"ca": missing}}, "tls.ca"),
    ):
        with pytest.raises(ConfigError) as failure:
            TubeClusterSection.model_validate(TUBE | more).check_files()
        assert failure.value.option == option


async def test_only_the_message_itself_is_refused() -> None:
    target = TubeClusterTarget(TubeClusterSection.model_validate(TUBE))
    assert target.retries(UnavailableError("lost"))
    assert target.retries(RefusedError("no topic", code=444))
    assert target.retries(RefusedError("full", code=ErrCode.SERVER_RECEIVE_OVERFLOW))
    assert not target.retries(RefusedError("bad", code=ErrCode.BAD_REQUEST))
    assert not target.retries(LocalProtocolError("too large"))


async def test_messages_wait_for_master_and_topic_and_keep_their_order(tmp_path: Path) -> None:
    running = Tube(tmp_path)
    target = TubeClusterTarget(section(running))
    results: list[object] = []
    target.start()
    for number in range(3):
        target.append(target.prepare(record(number, b"line 1")), results.append)
    await until(target.warning)
    warning = target.warning()
    assert warning is not None
    assert "messages for topic 'telemetry' wait" in warning.what
    assert not results
    try:
        master = await running.start_master()
        for number in (1, 2):
            await running.start_broker(number)
        await until(lambda: "the master has no such topic" in reason(target))
        assert not results, "they are sent again until the topic exists"
        await master.create_topic("telemetry", ready_s=60)
        await until(lambda: len(results) == 3)
        stored: list[Any] = []
        probes = 0
        while {result.broker_id for result in stored} != {1, 2}:  # until the producer knows both brokers
            probes += 1
            target.append(target.prepare(record(1000 + probes, b"key %d" % probes)), stored.append)
            await until(lambda: len(stored) == probes)
            await asyncio.sleep(0.05)
        stored.clear()
        for number in range(300):
            target.append(target.prepare(record(number, b"line 1")), stored.append)
        await until(lambda: len(stored) == 300)
        assert target.warning() is None
        assert len({(result.broker_id, result.partition) for result in stored}) == 1, "a key has one partition"
        large: list[object] = []
        target.append(target.prepare(Record(bytes(5 << 20))), large.append)
        await until(lambda: large)
        assert isinstance(large[0], LocalProtocolError)
        await running.stop_master()
        without: list[Any] = []
        for number in range(300, 320):
            target.append(target.prepare(record(number, b"line 1")), without.append)
        await until(lambda: len(without) == 20)
        assert {result.partition for result in without} == {stored[0].partition}, "the brokers are known"
        await running.start_master()
        found = await read(running.masters, "telemetry", 323 + probes)
        line = [item for item in found if item.key == b"line 1"]
        numbers = [*range(3), *range(320)]
        assert [int(item.value) for item in line] == numbers
        assert [(item.id, item.headers) for item in line] == [(f"m-{n}", [("unit", "bar")]) for n in numbers]
    finally:
        await target.close()
        await running.close()


async def test_records_of_a_key_stay_in_order_while_connections_break_and_the_broker_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its outages are short, none is stored twice; after a longer one, what it has not acknowledged may be."""
    running = Tube(tmp_path)
    master = await running.start_master()
    port = running.ports[1] = free_port()
    async with Proxy(("127.0.0.1", port)) as proxy:
        advertise = f"127.0.0.1:{proxy.port}"
        broker = await running.start_broker(advertise=advertise)
        await master.create_topic("telemetry", ready_s=60)
        target = TubeClusterTarget(section(running))
        target.start()
        stored: list[Any] = []
        numbers = itertools.count()

        def send(count: int) -> None:
            for number in itertools.islice(numbers, count):
                target.append(target.prepare(record(number, b"line 1")), stored.append)

        for cut in (1, 2, 3, 4, 5):
            send(300)
            await until(lambda: len(stored) == cut * 600 - 300)
            proxy.hold_responses()
            send(300)
            await until(lambda: broker.engine.produce.messages > cut * 600 - 300)
            proxy.cut()
            proxy.release()
            await until(lambda: len(stored) == cut * 600)
        assert broker.engine.produce.duplicates >= 5, "responses were lost"
        send(600)
        await running.stop_broker()
        send(400)
        await running.start_broker(advertise=advertise)
        await until(lambda: len(stored) == 4000)
        assert target.warning() is None
        found = await read(running.masters, "telemetry", 4000)
        assert [int(item.value) for item in found] == list(range(4000)), "in order, each once"
        await target.close()

        monkeypatch.setattr("penstock.node.tube_cluster.DELIVERY_S", 0.3)
        target = TubeClusterTarget(section(running))
        target.start()
        send(500)
        await until(lambda: len(stored) > 4200)
        proxy.hold()
        send(500)
        await until(lambda: "not acknowledged within 0.3 s" in reason(target))
        send(500)
        proxy.release()
        await until(lambda: len(stored) == 5500)
        await target.close()
        found = await read(running.masters, "telemetry", b"5499", "others")
        first = dict.fromkeys(int(item.value) for item in found)
        assert list(first) == list(range(5500)), "in order, apart from copies"
        assert all(isinstance(result, SendResult) for result in stored), "the rule notices nothing"
    await running.close()


async def test_a_backlog_is_sent_and_acknowledged_in_portions(tmp_path: Path) -> None:
    """Turns of the event loop are counted: the clients of the node are served in each."""
    running = Tube(tmp_path)
    target = TubeClusterTarget(section(running))
    stored: list[Any] = []

    def done(result: object) -> None:
        stored.append(result)
        if len(stored) == 100:
            raise ValueError("a defect in a service keeps no other message waiting")

    for number in range(3000):
        target.append(target.prepare(record(number, b"key %d" % (number % 50))), done)
    await running.start_master()
    await running.start_broker()
    assert running.master is not None
    await running.master.create_topic("telemetry", ready_s=60)
    target.start()
    producer = target._producer
    most = in_flight = 0
    async with asyncio.timeout(30):
        while len(stored) < 3000:
            sent, acknowledged = producer.sent, len(stored)
            await asyncio.sleep(0)
            most = max(most, producer.sent - sent, len(stored) - acknowledged)
            in_flight = max(in_flight, producer.sent - producer.acknowledged)
    assert most <= PORTION
    assert PORTION < in_flight <= 512, "the others wait in the rule"
    await target.close()
    await running.close()


async def test_a_node_that_stops_returns_messages_that_were_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TubeClusterTarget(section(Tube(tmp_path)))
    results: list[Any] = []
    target.start()
    target.append(target.prepare(record(1)), results.append)
    await asyncio.sleep(0)
    close = target._producer.close

    async def closed() -> None:
        await close()
        target.append(target.prepare(record(2)), results.append)  # as the rule does after a pause

    monkeypatch.setattr(target._producer, "close", closed)
    await target.close()
    assert [result.applied for result in results] == [False, False]


async def test_users_and_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server", "127.0.0.1"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.file)
    certificate, key = authority.issue("client", "client@example.org")
    (tmp_path / "password").write_text("secret\n")
    async with tube(tmp_path / "tube", "telemetry", tls=context, users={"rules": "secret"}) as running:
        entry = TubeClusterSection.model_validate(
            {
                "masters": [running.tls_masters],
                "topic": "telemetry",
                "user": "rules",
                "password_file": str(tmp_path / "password"),
                "tls": {"ca": str(authority.file), "certificate": str(certificate), "key": str(key)},
            }
        )
        entry.check_files()
        target = TubeClusterTarget(entry)
        target.start()
        results: list[Any] = []
        target.append(target.prepare(record(1)), results.append)
        await until(lambda: results)
        assert results[0].broker_id == 1
        await target.close()

        (tmp_path / "password").write_text("old\n")
        target = TubeClusterTarget(entry)
        target.start()
        results.clear()
        target.append(target.prepare(record(2)), results.append)
        await until(target.warning)
        warning = target.warning()
        assert warning is not None
        assert "rules" in (warning.why or "")
        assert not results, "an operator may change the user of the cluster"
        await target.close()
        assert [result.applied for result in results] == [False]
