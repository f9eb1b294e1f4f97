"""Batches of a pipeline in a topic of a real Kafka broker: once, also with repeated, replaced and killed writers."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.errors import ConfigError, RefusedError, StorageError, UnavailableError
from penstock.runtime.kafka.client import KafkaConnection, KafkaTopic
from penstock.runtime.kafka.config import KafkaSasl, KafkaTls
from penstock.spark.kafka.writes import check_topic, write_batch, written_batches
from penstock.spark.written_batches import WrittenBatches
from tests.interop.kafka import PASSWORD, USER, KafkaBroker, committed
from tests.interop.kafka_writing_process import ROWS, batch_of, rows

LAST = 1_000_000


def topic(kafka: KafkaBroker, name: str) -> KafkaTopic:
    """A new topic of three partitions."""
    admin = AdminClient({"bootstrap.servers": kafka.address})
    admin.create_topics([NewTopic(name, 3, 1)])[name].result(60)
    return KafkaTopic(KafkaConnection([kafka.address]), name, max_bytes=90_000)


def values(kafka: KafkaBroker, target: KafkaTopic) -> list[int]:
    return sorted(int((message.value() or b"").rstrip(b".")) for message in committed(kafka.address, target.topic))


def test_a_batch_is_written_once_and_replaced_writers_are_refused(kafka_broker: KafkaBroker) -> None:
    target = topic(kafka_broker, "once")
    assert written_batches(target, "plant", "out", "q") is None
    for _ in range(2):  # the second time as after a crash before the checkpoint's commit
        assert write_batch(batch_of(target, 0), [rows(0, 5), rows(5, 5)]) == 10
    # Two attempts at the same time: the first one is replaced in the middle.
    started: list[int] = []

    def replaced() -> Iterator[pa.RecordBatch]:
        yield rows(10, 2)
        if not started:
            started.append(write_batch(batch_of(target, 1, run=2), [rows(10, 3)]))
        yield rows(12, 1)

    threads = _threads()
    with pytest.raises(UnavailableError, match="ended the transaction of a batch") as ended:
        write_batch(batch_of(target, 1), replaced())
    assert started == [3]
    # As a worker of Spark reports it, to a driver that repeats the batch then.
    assert "UnavailableError" in "".join(traceback.format_exception(ended.value))
    del ended
    gc.collect()
    assert _threads() == threads
    # The replaced run repeats its batch, or continues with the next one: a later run has written.
    for batch in (1, 2):
        with pytest.raises(RefusedError, match="a later run has written under 2:0:n"):
            write_batch(batch_of(target, batch), [rows(13, 1)])
    # An attempt that ends without a commit leaves nothing.
    with pytest.raises(ZeroDivisionError):
        write_batch(batch_of(target, 2, run=2), (rows(13, 1) if n else rows(1 // n, 1) for n in (1, 0)))
    assert write_batch(batch_of(target, 2, run=2), [rows(13, 1)]) == 1
    with pytest.raises(StorageError, match="cannot repeat batch 0"):
        write_batch(batch_of(target, 0, run=3), [rows(0, 5)])
    found = committed(kafka_broker.address, target.topic)
    assert sorted(int(message.value() or b"") for message in found) == list(range(14))
    assert {(message.key(), tuple(message.headers() or ())) for message in found} == {
        (b"%d" % n, (("id", b"r%d" % n),)) for n in range(14)
    }
    assert written_batches(target, "plant", "out", "q") == WrittenBatches(2, 1, 14)
    assert written_batches(target, "plant", "out", "another") is None
    # Kafka removes offsets of a group after some days: the counts begin again.
    admin = AdminClient({"bootstrap.servers": kafka_broker.address})
    group = batch_of(target, 0).writer
    admin.delete_consumer_groups([group])[group].result(60)
    assert write_batch(batch_of(target, 3, run=3), [rows(14, 2)]) == 2
    assert written_batches(target, "plant", "out", "q") == WrittenBatches(3, 2, 2, first=3)
    # It removes them with the topic, also if that is created again.
    admin.delete_topics([target.topic])[target.topic].result(60)
    admin.create_topics([NewTopic(target.topic, 1, 1)])[target.topic].result(60)
    end = time.monotonic() + 30
    while written_batches(target, "plant", "out", "q") is not None:
        assert time.monotonic() < end, "the offset of the deleted topic remained"
        time.sleep(0.1)
    for _ in range(2):
        assert write_batch(batch_of(target, 4, run=3), [rows(16, 2)]) == 2
    assert values(kafka_broker, target) == [16, 17]
    assert written_batches(target, "plant", "out", "q") == WrittenBatches(4, 2, 2, first=4)


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_refusals_name_the_cause_and_write_nothing(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    target = topic(kafka_broker, "refused")
    check_topic(target, 30)
    with pytest.raises(RefusedError, match="has no topic 'nowhere'") as missing:
        check_topic(target._replace(topic="nowhere"), 30)
    assert "kafka-topics.sh --create --topic nowhere" in str(missing.value.hint)
    with pytest.raises(RefusedError, match="refused the message 'r4'") as large:
        write_batch(batch_of(target, 0), [rows(0, 4), rows(4, 1, size=200_000), rows(5, 1)])
    assert "set max_bytes of the sink below max.message.bytes" in str(large.value.hint)
    with pytest.raises(RefusedError) as slow:
        write_batch(batch_of(target._replace(transaction_s=10_000.0), 0), [rows(0, 1)])
    assert "transaction.max.timeout.ms" in str(slow.value.hint)
    with pytest.raises(ConfigError, match="a client of Kafka at h:1 cannot be created"):
        check_topic(target._replace(connection=KafkaConnection(["h:1"], KafkaTls(ca=Path("missing.pem")))), 30)
    bearer = KafkaSasl.model_validate({"mechanism": "OAUTHBEARER", "token_file": "missing"})
    with pytest.raises(ConfigError, match="token_file: 'missing' cannot be read"):
        check_topic(target._replace(connection=KafkaConnection(["h:1"], None, bearer)), 30)
    password = tmp_path / "password"
    sasl = KafkaSasl.model_validate({"mechanism": "SCRAM-SHA-256", "user": USER, "password_file": password})
    tls = KafkaTls(ca=kafka_broker.ca)
    secure = target._replace(connection=KafkaConnection([kafka_broker.secure], tls, sasl))
    password.write_text("wrong")
    for refused in (lambda: check_topic(secure, 30), lambda: write_batch(batch_of(secure, 0), [rows(0, 1)])):
        with pytest.raises(RefusedError, match="cannot be written") as denied:
            refused()
        assert "invalid credentials" in str(denied.value.why)
    with pytest.raises(RefusedError) as untrusted:
        check_topic(target._replace(connection=KafkaConnection([kafka_broker.secure], KafkaTls())), 30)
    assert "certificate verify failed" in str(untrusted.value.why)
    password.write_text(PASSWORD)
    assert values(kafka_broker, target) == []
    # Many messages are not one that is too large.
    assert write_batch(batch_of(secure, 0), [rows(0, 3_000, size=100)]) == 3_000
    assert values(kafka_broker, target) == list(range(3_000))


def test_a_broker_that_does_not_answer_is_unavailable(
    kafka_broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = KafkaTopic(KafkaConnection(["127.0.0.1:1"]), "out")
    monkeypatch.setattr("penstock.spark.kafka.writes.TIMEOUT_S", 0.5)
    for call in (lambda: check_topic(target, 0.5), lambda: write_batch(batch_of(target, 0), [])):
        with pytest.raises(UnavailableError) as failed:
            call()
        assert "Connection refused" in str(failed.value.why)
    # An identity provider that does not answer is an outage, too.
    secret = tmp_path / "secret"
    secret.write_text("secret")
    oidc = {"token_url": "http://127.0.0.1:1/token", "client_id": "c", "client_secret_file": secret}
    sasl = KafkaSasl.model_validate({"mechanism": "OAUTHBEARER", "oidc": oidc})
    connection = KafkaConnection([kafka_broker.secure], KafkaTls(ca=kafka_broker.ca), sasl)
    with pytest.raises(UnavailableError) as failed:
        check_topic(target._replace(connection=connection), 5)
    assert "OAUTHBEARER token" in str(failed.value.why)


@pytest.mark.nightly
def test_a_batch_that_takes_longer_than_its_transaction_is_repeated(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.spark.kafka.writes.MESSAGE_TIMEOUT_S", 1.0)
    target = topic(kafka_broker, "slow")._replace(transaction_s=1.0)

    def slow() -> Iterator[pa.RecordBatch]:
        yield rows(0, 2)
        time.sleep(15)  # the broker looks for such transactions every ten seconds
        yield rows(2, 2)

    with pytest.raises(UnavailableError, match="ended the transaction of a batch") as ended:
        write_batch(batch_of(target, 0), slow())
    assert "increase transaction_timeout" in str(ended.value.hint)
    assert values(kafka_broker, target) == []
    assert write_batch(batch_of(target, 0), [rows(0, 4)]) == 4
    assert values(kafka_broker, target) == list(range(4))


def write(kafka: KafkaBroker, target: KafkaTopic, run: int, first: int, last: int) -> subprocess.Popen[str]:
    numbers = map(str, (run, first, last))
    argv = [sys.executable, "-m", "tests.interop.kafka_writing_process", kafka.address, target.topic, *numbers]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(2400)])])
def test_killed_writers_and_brokers(kafka_broker: KafkaBroker, rounds: int) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    dice, pause = random.Random(seed), threading.Event()
    target = topic(kafka_broker, f"killed_{rounds}")
    done = -1
    for number in range(rounds):
        with write(kafka_broker, target, number + 1, done + 1, LAST) as writer:
            assert writer.stdout is not None
            assert writer.stderr is not None
            # Its first batch, so that the kill hits a batch and not the start of the interpreter.
            first = writer.stdout.readline()
            assert first, writer.stderr.read()
            pause.wait(dice.uniform(0.0, 0.5))
            if number % 10 == 2:  # in the long series only, as Kafka takes seconds to start
                kafka_broker.stop()
                kafka_broker.start()
                pause.wait(dice.uniform(0.0, 0.5))
            writer.kill()
            done = [int(line) for line in (first, *writer.stdout)][-1]
    # A ledger that lacks the last batches, and a run that ends.
    last = done + 3
    with write(kafka_broker, target, rounds + 1, done + 1, last) as writer:
        out, errors = writer.communicate(timeout=240)
    assert writer.returncode == 0, errors
    assert [int(line) for line in out.splitlines()] == list(range(done + 1, last + 1))
    assert values(kafka_broker, target) == list(range((last + 1) * ROWS))
    assert written_batches(target, "plant", "out", "q") == WrittenBatches(last, ROWS, (last + 1) * ROWS)
