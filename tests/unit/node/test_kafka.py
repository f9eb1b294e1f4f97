"""Rules to Kafka without a broker: settings of the configuration and of the client, tokens."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from penstock.errors import ConfigError, PenstockError, UnavailableError
from penstock.node.config.kafka import KafkaSection
from penstock.node.config.node import load_config
from penstock.node.kafka import KafkaTarget, _settings
from penstock.runtime.kafka.client import token_expiry
from penstock.tube.record import Record
from tests.fatal_errors import raise_fatal

KAFKA: dict[str, Any] = {"bootstrap": ["h:9092", "i:9092"], "topic": "telemetry"}
SASL = {"mechanism": "SCRAM-SHA-256", "user": "u", "password_file": "p"}

OIDC = {"token_url": "https://id.example/token", "client_id": "c", "client_secret_file": "s"}


def load(folder: Path, rule: dict[str, Any], **more: Any) -> None:
    file = folder / "penstock.yaml"
    file.write_text(json.dumps({"rules": [{"filter": "a/#", **rule}], **more}))
    config = load_config(file, {}, {})
    assert [entry.target for entry in config.rules] == ["telemetry"]
    assert "telemetry" not in config.topics()


def test_a_rule_to_kafka_needs_no_tubemq_in_a_cluster(tmp_path: Path) -> None:
    load(tmp_path, {"to": {"kafka": KAFKA}, "partition": 7})
    load(tmp_path, {"to": {"kafka": KAFKA}}, cluster={"name": "c", "node": "n", "etcd": ["h:2379"]})


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ({}, "set either `topic`"),
        ({"topic": "telemetry", "to": {"kafka": KAFKA}}, "set either `topic`"),
        ({"to": {"kafka": KAFKA}, "msg_type": "x"}, "`msg_type` is for TubeMQ"),
        ({"to": {"kafka": KAFKA | {"topic": "a/b"}}}, "topic"),
        ({"to": {"kafka": KAFKA | {"bootstrap": ["https://h:1"]}}}, "without a scheme"),
        ({"to": {"kafka": KAFKA | {"sasl": {"mechanism": "PLAIN", "user": "u"}}}}, "needs `user` and `password_file`"),
        ({"to": {"kafka": KAFKA | {"sasl": SASL | {"mechanism": "OAUTHBEARER"}}}}, "needs `token_file` or `oidc`"),
        ({"to": {"kafka": KAFKA | {"sasl": SASL | {"oidc": OIDC}}}}, "neither `token_file` nor `oidc`"),
        (
            {"to": {"kafka": KAFKA | {"sasl": {"mechanism": "OAUTHBEARER", "token_file": "t", "oidc": OIDC}}}},
            "either `token_file` or `oidc`",
        ),
        (
            {"to": {"kafka": KAFKA | {"sasl": {"mechanism": "OAUTHBEARER", "oidc": OIDC | {"token_url": "id/t"}}}}},
            "expected https://HOST/PATH",
        ),
        (
            {
                "to": {
                    "kafka": KAFKA
                    | {"sasl": {"mechanism": "OAUTHBEARER", "oidc": OIDC | {"token_url": "http://id/token"}}}
                }
            },
            "the client secret is sent to it",
        ),
        (
            {
                "to": {
                    "kafka": KAFKA
                    | {"sasl": {"mechanism": "OAUTHBEARER", "oidc": OIDC | {"token_url": "https://c:hush@id/token"}}}
                }
            },
            "without credentials",
        ),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, rule: dict[str, Any], error: str) -> None:
    with pytest.raises(PenstockError, match=error):
        load(tmp_path, rule)


def test_the_settings_of_the_client(tmp_path: Path) -> None:
    settings = _settings(KafkaSection.model_validate(KAFKA), 1 << 20)
    assert settings["bootstrap.servers"] == "h:9092,i:9092"
    assert (settings["acks"], settings["enable.idempotence"], settings["message.timeout.ms"]) == ("all", True, 0)
    assert settings["security.protocol"] == "plaintext"
    password = tmp_path / "password"
    password.write_text("secret\n")
    secure = KAFKA | {"tls": {"ca": "ca.pem"}, "sasl": SASL | {"password_file": str(password)}}
    settings = _settings(KafkaSection.model_validate(secure), 1 << 20)
    assert (settings["security.protocol"], settings["ssl.ca.location"]) == ("sasl_ssl", "ca.pem")
    assert (settings["sasl.username"], settings["sasl.password"]) == ("u", "secret")
    oidc = OIDC | {"client_secret_file": str(password), "scope": "a b", "ca": "issuer.pem"}
    bearer = KAFKA | {"sasl": {"mechanism": "OAUTHBEARER", "oidc": oidc}}
    settings = _settings(KafkaSection.model_validate(bearer), 1 << 20)
    assert settings["sasl.mechanism"] == "OAUTHBEARER"
    assert {name: value for name, value in settings.items() if "oauth" in name or "https" in name} == {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": "https://id.example/token",
        "sasl.oauthbearer.client.id": "c",
        "sasl.oauthbearer.client.secret": "secret",
        "sasl.oauthbearer.scope": "a b",
        "https.ca.location": "issuer.pem",
    }
    with pytest.raises(ConfigError, match="producer of Kafka topic 'telemetry' cannot be created"):
        KafkaTarget(KafkaSection.model_validate(KAFKA | {"tls": {"ca": "missing.pem"}}), max_bytes=1 << 20)


def test_files_are_relative_to_the_configuration(tmp_path: Path) -> None:
    tls = {"ca": "ca.pem", "certificate": "client.pem", "key": "client.key"}
    for sasl, names in [
        (SASL, {"password_file": "p"}),
        ({"mechanism": "OAUTHBEARER", "token_file": "t"}, {"token_file": "t"}),
        ({"mechanism": "OAUTHBEARER", "oidc": OIDC | {"ca": "i.pem"}}, {"client_secret_file": "s", "ca": "i.pem"}),
    ]:
        file = tmp_path / "penstock.yaml"
        rule = {"filter": "a/#", "to": {"kafka": KAFKA | {"tls": tls, "sasl": sasl}}}
        file.write_text(json.dumps({"rules": [rule]}))
        target = load_config(file, {}, {}).rules[0].to
        assert target is not None
        section = target.kafka
        assert section is not None
        assert section.tls is not None
        assert section.tls.model_dump() == {name: tmp_path / path for name, path in tls.items()}
        assert section.sasl is not None
        given = section.sasl.oidc or section.sasl
        assert {name: getattr(given, name) for name in names} == {name: tmp_path / path for name, path in names.items()}


class FakeProducer:
    """A producer that stores nothing; ``fails``: the next calls of callbacks raise a fatal error."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.values: list[bytes] = []
        self.results: deque[Callable[[KafkaError | None, None], None]] = deque()
        self.purged = self.closed = False

    def produce(
        self,
        _topic: str,
        value: bytes,
        *_: object,
        on_delivery: Callable[[KafkaError | None, None], None],
        **_named: object,
    ) -> None:
        self.values.append(value)
        self.results.append(on_delivery)

    def poll(self, _: float) -> None:
        time.sleep(0.001)
        if self.fails and self.values:
            self.fails -= 1
            raise_fatal(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)

    def purge(self) -> None:
        self.purged = True

    def flush(self, _: float) -> None:
        if self.fails:
            self.fails -= 1
            raise_fatal(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
        while self.results:
            self.results.popleft()(KafkaError(KafkaError._PURGE_QUEUE) if self.purged else None, None)

    def close(self) -> None:
        self.closed = True

    def __len__(self) -> int:
        return len(self.results)


async def test_a_producer_with_a_fatal_error_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FakeProducer(fails=2), FakeProducer()
    # Between them one that cannot be created.
    made: list[FakeProducer | None] = [first, None, second]

    def create(_: KafkaTarget) -> FakeProducer:
        if (producer := made.pop(0)) is None:
            raise ConfigError("the producer cannot be created", option="rules", why="ca.pem is missing")
        return producer

    monkeypatch.setattr(KafkaTarget, "_new_producer", create)
    monkeypatch.setattr("penstock.node.kafka.POLL_S", 0.001)
    target = KafkaTarget(KafkaSection.model_validate(KAFKA), max_bytes=1 << 20)
    target.start()
    results: asyncio.Queue[object] = asyncio.Queue()
    for value in (b"1", b"2"):
        target.append(target.prepare(Record(value, topic="a", id="i")), results.put_nowait)
    async with asyncio.timeout(60):
        failed = [await results.get() for _ in range(2)]
    assert all(isinstance(error, PenstockError) and target.retries(error) for error in failed)
    assert (first.values, first.purged, made) == ([b"1", b"2"], True, [])
    target.append(target.prepare(Record(b"1", topic="a", id="i")), results.put_nowait)
    await target.close()
    assert second.values == [b"1"]
    assert results.get_nowait() is None
    assert (first.closed, second.closed) == (True, False)


async def test_no_message_overtakes_those_of_a_replaced_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FakeProducer(), FakeProducer()
    made = [first, second]
    monkeypatch.setattr(KafkaTarget, "_new_producer", lambda _: made.pop(0))
    monkeypatch.setattr("penstock.node.kafka.POLL_S", 0.001)
    target = KafkaTarget(KafkaSection.model_validate(KAFKA), max_bytes=1 << 20)
    target.start()
    results: asyncio.Queue[object] = asyncio.Queue()

    def send(value: bytes, done: Callable[[object], None] = results.put_nowait) -> None:
        target.append(target.prepare(Record(value, topic="a", id="i")), done)

    def fails(result: object) -> None:
        results.put_nowait(result)
        raise ValueError("a defect in a service")

    send(b"1", fails)
    send(b"2")
    target._replaced.set()
    ends = time.monotonic() + 10
    while not first.closed:  # the event loop is busy, and does not get the results yet
        assert time.monotonic() < ends
        time.sleep(0.001)  # noqa: ASYNC251 - the loop must not run
    with pytest.raises(UnavailableError, match="messages for topic 'telemetry' wait"):
        send(b"3")
    async with asyncio.timeout(10):
        assert [type(await results.get()) for _ in range(2)] == [UnavailableError, UnavailableError]
    send(b"1")
    assert second.values == [b"1"]
    await target.close()


def test_a_record_becomes_a_message() -> None:
    target = KafkaTarget(KafkaSection.model_validate(KAFKA), max_bytes=1 << 20)
    record = Record(b"v", b"k", [("unit", "bar"), ("raw", b"\xff")], "a/b", 5, "id-1", content_type="text/plain")
    message = target.prepare(record)
    assert (message.key, message.value, message.timestamp) == (b"k", b"v", 5)
    assert message.headers == [
        ("unit", b"bar"),
        ("raw", b"\xff"),
        ("mqtt.topic", b"a/b"),
        ("id", b"id-1"),
        ("content-type", b"text/plain"),
    ]


def test_the_expiry_of_a_token() -> None:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": 1234.5}).encode()).decode().rstrip("=")
    assert token_expiry(f"e30.{claims}.signature") == 1234.5
    for token in ("opaque", "a.b.c", "e30.e30."):
        assert 200 < token_expiry(token) - time.time() <= 300
