"""`penstock mqtt` against a broker that runs in a thread: arguments, bytes, properties, exit status."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.cli import mqtt, record_reader
from penstock.cli.mqtt import _report_outages
from penstock.errors import UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.server import MqttServer
from penstock.mqtt.service import Inbound, Service
from tests.unit.cli.conftest import Command

DEADLINE_S = 60


class Broker(Service):
    """A broker with a service that answers ``ask`` and remembers what came to ``in/#``."""

    filters = ("ask", "in/#")
    exclusive = False
    reserved = ()

    def __init__(self) -> None:
        self.url = ""
        self.got: list[Publish] = []
        self.on_message: Callable[[], None] = lambda: None
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._server: MqttServer | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)

    async def _run(self) -> None:
        self._server = MqttServer(services=[self])
        self._stop = asyncio.Event()
        host, port = await self._server.start("127.0.0.1", 0)
        self.url = f"mqtt://{host}:{port}"
        self._ready.set()
        await self._stop.wait()
        await self._server.close()

    def receive(self, message: Inbound) -> None:
        publish = message.publish
        self.got.append(publish)
        self.on_message()
        if publish.topic == "ask":
            assert self._server is not None
            topic = publish.properties.response_topic
            assert topic is not None
            properties = Properties(correlation_data=publish.properties.correlation_data)
            self._server.outlet.publish(Publish(topic, publish.payload[::-1], 1, properties=properties))
        message.settle()

    def disconnected(self, client_id: str) -> None: ...

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_S)
        self._loop.close()


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    running = Broker()
    yield running
    running.close()


def test_pub(penstock: Command, broker: Broker, tmp_path: Path) -> None:
    broker.got.clear()
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x00\xff\n")
    options = ["--broker", broker.url]
    extras = ["-p", "a=1", "-p", "a=2=3", "--content-type", "t", "--expiry", "60", "--response-topic", "r"]
    assert penstock("mqtt", "pub", "in/1", "text", *extras, "--correlation", "c", *options) == (0, "", "")
    assert penstock("mqtt", "pub", "in/2", "--file", str(binary), "-q", "0", *options).status == 0
    assert penstock("mqtt", "pub", "in/3", "--file", "-", "-q", "1", *options, stdin=b"piped\n").status == 0
    assert penstock("mqtt", "pub", "in/4", "--lines", *options, stdin=b"one\r\ntwo\n").status == 0
    done = penstock("mqtt", "pub", "in/5", "", "--json", "--retain", "--expiry", "400ms", *options)
    assert json.loads(done.out) == {"topic": "in/5", "bytes": 0, "qos": 1, "reason_code": 0}
    first = broker.got[0].properties
    assert (first.user_properties, first.content_type, first.message_expiry_interval) == (
        [("a", "1"), ("a", "2=3")],
        "t",
        60,
    )
    assert (first.response_topic, first.correlation_data) == ("r", b"c")
    assert broker.got[-1].properties.message_expiry_interval == 1, "0 would be a message that has expired"
    assert sorted((m.topic, m.payload) for m in broker.got) == [
        ("in/1", b"text"),
        ("in/2", b"\x00\xff\n"),
        ("in/3", b"piped\n"),
        ("in/4", b"one"),
        ("in/4", b"two"),
        ("in/5", b""),
    ]


def test_a_line_is_published_when_it_comes(penstock: Command, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second line is written once the first has arrived; then the pipe is closed."""
    broker.got.clear()
    arrived = threading.Event()
    monkeypatch.setattr(broker, "on_message", arrived.set)
    ours, theirs = os.pipe()

    def write() -> None:
        os.write(theirs, b"one\ntw")
        assert arrived.wait(DEADLINE_S)
        os.write(theirs, b"o")
        os.close(theirs)

    with os.fdopen(ours, "rb") as pipe, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        monkeypatch.setattr(mqtt, "chunks", lambda _: record_reader.chunks(pipe))
        assert penstock("mqtt", "pub", "in/6", "--lines", "--broker", broker.url).status == 0
        writing.result()
    assert [message.payload for message in broker.got] == [b"one", b"two"]


def test_pub_reports_that_no_client_is_subscribed(penstock: Command, broker: Broker) -> None:
    done = penstock("mqtt", "pub", "nobody/here", "x", "--broker", broker.url)
    assert done == (0, "", "note: the broker accepted the message; no client is subscribed to 'nobody/here'\n")


def test_sub_shows_what_a_message_carries(penstock: Command, broker: Broker) -> None:
    options = ["--broker", broker.url]
    retained = ["--retain", "-p", "unit=bar", "--content-type", "text/plain", "--response-topic", "r"]
    penstock("mqtt", "pub", "kept/1", "1\n2", *retained, "--correlation", "7", *options)
    penstock("mqtt", "pub", "kept/2", "--retain", *options, stdin=b"\xff")
    done = penstock("mqtt", "sub", "kept/#", "--count", "2", "--timeout", "60", *options)
    assert done.status == 0
    assert sorted(done.out.splitlines()) == [
        r"kept/1  1\n2  [retained, content type text/plain, response topic r, correlation 7, unit=bar]",
        r"kept/2  \xff  [retained]",
    ]
    assert "subscribed to kept/#" in done.err
    done = penstock("mqtt", "sub", "kept/2", "--json", "--count", "1", "--timeout", "60", *options)
    row = json.loads(done.out)
    assert (row["payload"], row["payload_base64"], row["retain"], row["properties"]) == (None, "/w==", True, [])
    done = penstock("mqtt", "sub", "kept/1", "--raw", "--count", "1", "--timeout", "60", *options)
    assert done.out == "1\n2"
    done = penstock("mqtt", "sub", "kept/#", "--no-retained", "--count", "1", "--timeout", "0.2", *options)
    assert (done.status, done.out) == (1, "")
    assert "0 of 1 messages within 0.2 s" in done.err


def test_a_persistent_session_is_read_once(penstock: Command, broker: Broker) -> None:
    session = ["--client-id", "cli", "--session-expiry", "60", "--broker", broker.url]
    assert penstock("mqtt", "sub", "later", "--timeout", "0.1", *session).status == 0
    for text in ("one", "two"):
        penstock("mqtt", "pub", "later", text, "--broker", broker.url)
    for text in ("one", "two"):
        done = penstock("mqtt", "sub", "later", "--count", "1", "--timeout", "60", "--raw", *session)
        assert done.out == text


def test_sub_reports_a_lost_and_restored_connection(capsys: pytest.CaptureFixture[str]) -> None:
    client = MqttClient()
    _report_outages(client)
    (connected,), (disconnected,) = client._driver.connected_hooks, client._driver.disconnected_hooks
    connected(False)
    disconnected(UnavailableError("mqtt: the connection to edge was lost"))
    connected(True)
    disconnected(None)
    said = capsys.readouterr().err
    assert said == "penstock: mqtt: the connection to edge was lost; reconnecting\npenstock: reconnected\n"


def test_request(penstock: Command, broker: Broker) -> None:
    done = penstock("mqtt", "request", "ask", "abc", "--broker", broker.url)
    assert (done.status, done.out) == (0, "cba")
    done = penstock("mqtt", "request", "nobody/answers", "x", "--broker", broker.url)
    assert done.status == 1
    assert "has no receiver" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pub", "a"), "no payload"),
        (("pub", "a", "x", "--file", "y"), "exclude each other"),
        (("pub", "a", "x", "--lines"), "--lines reads standard input"),
        (("pub", "a", "x", "-p", "novalue"), "expected NAME=VALUE"),
        (("pub", "a", "x", "--broker", "http://h"), "cannot be used"),
        (("pub", "a", "x", "--ca-file", "/no/such/file", "--broker", "mqtts://h"), "ca_file"),
        (("pub", "a", "x", "--scram"), "needs a user name"),
        (("pub", "a", "x", "--username", "u", "--password-file", "/no/such"), "cannot be read"),
        (("sub", "a", "--raw", "--json"), "exclude each other"),
        (("sub", "a", "--session-expiry", "5"), "--client-id"),
    ],
)
def test_misuse(penstock: Command, arguments: tuple[str, ...], words: str) -> None:
    done = penstock("mqtt", *arguments)
    assert done.status == 2
    assert words in done.err


def test_environment_variables_are_those_of_penstock_kv(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, option in (("PASSWORD_FILE", "--password-file"), ("CA_FILE", "ca_file"), ("CERT_FILE", "cert_file")):
        with monkeypatch.context() as patch:
            patch.setenv("PENSTOCK_BROKER", "mqtts://h")
            patch.setenv(f"PENSTOCK_{name}", "/no/such/file")
            done = penstock("mqtt", "pub", "a", "x")
            assert (done.status, option in done.err) == (2, True), name


def test_both_names_of_the_timeout(penstock: Command, broker: Broker) -> None:
    for option in ("--timeout", "--timeout"):
        done = penstock("mqtt", "sub", "never", "--count", "2", option, "0.1", "--broker", broker.url)
        assert (done.status, "penstock: 0 of 2 messages within 0.1 s" in done.err) == (1, True)


def test_bad_topics_and_a_broker_that_is_not_there(penstock: Command, broker: Broker) -> None:
    assert penstock("mqtt", "pub", "a/#", "x", "--broker", broker.url).status == 2
    assert penstock("mqtt", "sub", "a/#/b", "--broker", broker.url).status == 2
    done = penstock("mqtt", "pub", "a", "x", "--broker", "mqtt://127.0.0.1:1")
    assert done.status == 1
    assert "start a node (penstock up), or set the address of its MQTT listener" in done.err
