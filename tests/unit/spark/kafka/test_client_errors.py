"""Errors of the Kafka client while a batch is written, by what they mean for the run. Without a broker."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.runtime.kafka.client import KafkaConnection, KafkaTopic
from penstock.runtime.kafka.config import KafkaSasl, KafkaTls
from penstock.spark.kafka.writes import TIMEOUT_S, AppendedRecord, _commit, _CommittedBatch, _Session, append_records
from tests.fatal_errors import raise_fatal

TARGET = KafkaTopic(KafkaConnection(["h:9092"]), "out")


def poll(_: float) -> int:
    return 0


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        # Whether a call or a callback has it first is a matter of time.
        (KafkaError.INVALID_TRANSACTION_TIMEOUT, RefusedError, "transaction.max.timeout.ms"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, RefusedError, "Write of transactional ids"),
        (KafkaError._FENCED, UnavailableError, "the pipeline repeats the batch"),
        (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, UnavailableError, "the pipeline repeats the batch"),
    ],
)
@pytest.mark.parametrize("in_callback", [True, False])
def test_fatal_errors_by_cause(code: int, kind: type[PenstockError], words: str, *, in_callback: bool) -> None:
    def fail(_: float) -> int:
        if in_callback:
            raise_fatal(code, "the cause")
        raise KafkaException(KafkaError(code, "the cause", fatal=True))

    with pytest.raises(kind) as raised:
        _Session(TARGET).call(fail if in_callback else poll, fail, "write to")
    assert "the cause" in str(raised.value.why)
    assert words in str(raised.value.hint)
    # As a task of Spark does.
    assert "the cause" in "".join(traceback.format_exception(raised.value))


def test_a_transaction_that_must_be_aborted_is_not_continued() -> None:
    calls: list[float] = []

    def request(wait_s: float) -> str:
        calls.append(wait_s)
        code = KafkaError.NOT_COORDINATOR
        if len(calls) < 3:
            raise KafkaException(KafkaError(code, "moved", txn_requires_abort=len(calls) == 2))
        return "done"

    session = _Session(TARGET)
    with pytest.raises(UnavailableError, match="could not commit a batch to topic 'out'"):
        session.call(poll, request, "commit a batch to")
    assert len(calls) == 2  # the first error is temporary, so the call is repeated
    assert session.call(poll, request, "commit a batch to") == "done"


def test_the_number_of_a_batch_is_not_stored_in_slices() -> None:
    """The client fails a transaction whose group coordinator does not answer within the time of the call."""
    waits: list[float] = []

    class Client:
        poll = staticmethod(poll)
        commit_transaction = staticmethod(waits.append)

        def consumer_group_metadata(self) -> None:
            return None

        def send_offsets_to_transaction(self, _offsets: object, _group: object, wait_s: float) -> None:
            waits.append(wait_s)

    client: Any = Client()
    _commit(_Session(TARGET), client, client, _CommittedBatch(3, 1, 1, 3, "1:0:n"))
    assert waits == [TIMEOUT_S, 1.0]


def test_an_offset_that_kafka_does_not_report_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt without an answer has stored the message, and its repetition is acknowledged without the offset."""
    reports: list[Any] = []
    offsets: list[int | None] = [0, None, 7]

    class Client:
        def produce(self, topic: str, *, on_delivery: Any, partition: int, **_message: object) -> None:
            assert (topic, partition) == ("out", 2)
            reports.append(on_delivery)

        def flush(self, _wait_s: float) -> int:
            while reports:
                found = offsets.pop(0)
                reports.pop(0)(None, SimpleNamespace(offset=lambda found=found: found))
            return 0

    monkeypatch.setattr(_Session, "appender", lambda _: nullcontext(Client()))
    assert append_records(TARGET, [AppendedRecord(2, b"k", b"v", [], 5)] * 3) == [0, -1, 7]


def test_files_are_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver and executors read them, which have no directory of the pipeline file in common."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "password").write_text("secret\n")
    sasl = KafkaSasl.model_validate({"mechanism": "PLAIN", "user": "u", "password_file": "password"})
    settings = KafkaConnection(["h:9092"], KafkaTls(ca=Path("ca.pem")), sasl).settings()
    assert (settings["ssl.ca.location"], settings["sasl.password"]) == ("ca.pem", "secret")
