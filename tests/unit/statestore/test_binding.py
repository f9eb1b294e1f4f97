"""Requests, answers and notifications as MQTT 5 messages: topics, properties, dialects, and who breaks the rules."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.property_blocks import encode_properties
from penstock.mqtt.codec.reasons import PacketType, ReasonCode
from penstock.statestore.binding import (
    INVOKE,
    OLDER_INVOKE,
    RejectedRequest,
    StoreRequest,
    answer_payload,
    answer_properties,
    client_response_topic,
    dialect_named,
    key_of_notification,
    notification,
    notify_filter,
    notify_topic,
    read_request,
    request,
    response,
    seconds_left,
    status_response,
    topic_fits,
)
from penstock.statestore.codec.dialects import DIALECTS, OLDER, PUBLISHED, SDK, Dialect
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import encode_array
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.engine.requests import Answer, AnswerKind
from penstock.statestore.hlc import Hlc
from tests.vectors.statestore import vectors

NOW = 1_700_000_000_000
VERSION = Hlc(NOW, 3, "StateStore")
OLD = Hlc(NOW - 9, 1, "StateStore")
TOPICS = vectors()["topics"]


def message(
    *,
    topic: str = INVOKE,
    qos: int = 1,
    response_topic: str | None = "clients/c/response",
    correlation: bytes | None = b"0123456789abcdef",
    expiry: int | None = None,
    user: list[tuple[str, str]] | None = None,
) -> Publish:
    properties = Properties(
        response_topic=response_topic,
        correlation_data=correlation,
        message_expiry_interval=expiry,
        user_properties=user or [],
    )
    return Publish(topic, encode_array([b"GET", b"k"]), qos, properties=properties)


def read(publish: Publish, *, received_ms: int = NOW, forced: Dialect | None = None) -> StoreRequest | RejectedRequest:
    return read_request(publish, "c", received_ms, NOW, forced)


def test_a_response_that_says_why_a_request_was_not_executed_expires_with_it() -> None:
    message = status_response("clients/c/response", b"id", SDK, NOW + 5000, NOW, 505, [])
    assert message is not None
    assert message.properties.message_expiry_interval == 5


def ask(dialect: Dialect = SDK, expires_at: int = 0) -> StoreRequest:
    return StoreRequest("clients/c/response", b"id", expires_at, "c", dialect)


def answered(ask: StoreRequest, answer: Answer, now_ms: int) -> Publish | None:
    """The response as its receiver decodes it; None where the request's expiry is used up."""
    expiry_s = seconds_left(ask, now_ms)
    if expiry_s < 0:
        return None
    return response(ask.response_topic, answer_payload(answer, ask.dialect), answer_properties(ask, answer, expiry_s))


def sent(answer: Answer, dialect: Dialect = SDK) -> tuple[bytes, list[tuple[str, str]]]:
    publish = answered(ask(dialect), answer, NOW)
    assert publish is not None
    return publish.payload, publish.properties.user_properties


# Topics


def test_topics_are_those_of_the_protocol() -> None:
    assert TOPICS["invoke"] == INVOKE
    assert TOPICS["legacy_invoke_doc_001"] == OLDER_INVOKE
    assert notify_topic("client-id1", b"SOMEKEY") == TOPICS["notify_for_client-id1_key_SOMEKEY"]
    assert client_response_topic("client-id1") == TOPICS["response_topic_by_client_for_client_id_client-id1"]["go"]
    assert notify_filter("client-id1") == TOPICS["notify_for_client-id1_key_SOMEKEY"].rpartition("/")[0] + "/+"


def test_hex_is_upper_case_in_both_places() -> None:
    topic = notify_topic("\u00ff/+#", b"\xab\xcd/+#\x00")
    assert topic.rpartition("/command/notify/")[2] == "ABCD2F2B2300"
    assert "/C3BF2F2B23/" in topic


def test_the_key_of_a_notification() -> None:
    assert key_of_notification(notify_topic("c", b"\x00\xffkey")) == b"\x00\xffkey"
    for topic in ("other", INVOKE, notify_topic("c", b"k") + "z", "clients/" + INVOKE):
        assert key_of_notification(topic) is None


def test_a_notification_topic_must_fit() -> None:
    fixed = len(notify_topic("", b""))
    assert topic_fits("c", b"k" * ((65_535 - fixed - 2) // 2))
    assert not topic_fits("c", b"k" * ((65_535 - fixed - 2) // 2 + 1))
    assert not topic_fits("\u00fc" * 20_000, b"k")


# Dialects


def test_a_request_chooses_its_dialect() -> None:
    cases = [
        (INVOKE, [("__protVer", "1.0"), ("__ts", "t"), ("__ft", "f")], SDK),
        (INVOKE, [("__ts", "t"), ("__ft", "f")], PUBLISHED),
        (OLDER_INVOKE, [("Timestamp", "t"), ("FencingToken", "f"), ("__ts", "not read")], OLDER),
        (OLDER_INVOKE, [("__protVer", "1.7"), ("__ts", "t"), ("__ft", "f")], SDK),
    ]
    for topic, user, dialect in cases:
        found = read(message(topic=topic, user=user))
        assert isinstance(found, StoreRequest)
        assert found.dialect is dialect
        assert (found.timestamp, found.fencing_token) == (b"t", b"f")


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_can_be_forced(name: str) -> None:
    found = read(message(user=[("__protVer", "1.0")]), forced=dialect_named(name))
    assert isinstance(found, StoreRequest)
    assert found.dialect is DIALECTS[name]


def test_auto_forces_none() -> None:
    assert dialect_named("auto") is None
    with pytest.raises(KeyError):
        dialect_named("english")


def test_a_repeated_timestamp_is_malformed() -> None:
    found = read(message(user=[("__ts", "1:0:a"), ("x", "1"), ("x", "2"), ("__ts", "1:0:a")]))
    assert isinstance(found, StoreRequest)
    assert found.timestamp == b""


ANSWERS = [
    (Answer(AnswerKind.OK, version=VERSION), b"+OK\r\n", b"+OK\r\n", VERSION, VERSION),
    (Answer(AnswerKind.NOT_MET, version=OLD), b":-1\r\n", b"-1\r\n", OLD, OLD),
    (Answer(AnswerKind.NOT_MET), b":-1\r\n", b"-1\r\n", None, None),
    (Answer(AnswerKind.VALUE, value=b"1234", version=OLD), b"$4\r\n1234\r\n", b"$4\r\n1234\r\n", OLD, OLD),
    (Answer(AnswerKind.MISSING), b"$-1\r\n", b"$-1\r\n", None, None),
    (Answer(AnswerKind.COUNT, count=1, version=VERSION, previous=OLD), b":1\r\n", b":1\r\n", VERSION, OLD),
    (Answer(AnswerKind.COUNT), b":0\r\n", b":0\r\n", None, None),
    (
        Answer(AnswerKind.ERROR, error=StoreError.FENCE_LOWER),
        b"-ERR the request fencing token is a lower version than the fencing token protecting the resource\r\n",
        b"-ERR the request fencing token is a lower version that the fencing token protecting the resource\r\n",
        None,
        None,
    ),
    *(
        (Answer(AnswerKind.ERROR, error=error), *(f"-ERR {error}\r\n".encode(),) * 2, None, None)
        for error in StoreError
        if error is not StoreError.FENCE_LOWER
    ),
]


@pytest.mark.parametrize(("answer", "sdk", "published", "sdk_version", "published_version"), ANSWERS, ids=str)
def test_answers_in_each_dialect(
    answer: Answer, sdk: bytes, published: bytes, sdk_version: Hlc | None, published_version: Hlc | None
) -> None:
    status = [("__stat", "200"), ("__protVer", "1.0")]
    expected = [] if sdk_version is None else [("__ts", sdk_version.padded())]
    assert sent(answer) == (sdk, status + expected)
    expected = [] if published_version is None else [("__ts", str(published_version))]
    assert sent(answer, PUBLISHED) == (published, expected)
    assert sent(answer, OLDER) == (published, [("Timestamp", value) for _, value in expected])


def test_printed_versions() -> None:
    version = Hlc(1_696_374_425_000, 1, "StateStore")
    assert sent(Answer(AnswerKind.OK, version=version))[1][-1] == ("__ts", "001696374425000:00001:StateStore")
    assert sent(Answer(AnswerKind.OK, version=version), PUBLISHED)[1] == [("__ts", "1696374425000:1:StateStore")]


def test_an_answer_is_a_message_of_its_own() -> None:
    publish = answered(ask(), Answer(AnswerKind.OK), NOW)
    assert publish is not None
    assert (publish.topic, publish.qos, publish.retain) == ("clients/c/response", 1, False)
    assert publish.properties.correlation_data == b"id"
    assert publish.properties.content_type == "application/octet-stream"
    assert publish.properties.response_topic is None
    assert publish.properties.message_expiry_interval is None


def test_notifications_in_each_dialect() -> None:
    was_set = Change(b"k", Record(b"k", b"abc", VERSION), VERSION)
    deleted = Change(b"k", None, VERSION)
    for dialect, event in ((SDK, b"DELETE"), (PUBLISHED, b"DEL"), (OLDER, b"DEL")):
        publish = notification(was_set, "c", dialect)
        assert (publish.topic, publish.qos, publish.retain) == (notify_topic("c", b"k"), 1, False)
        assert publish.payload == encode_array([b"NOTIFY", b"SET", b"VALUE", b"abc"])
        assert publish.properties.content_type == "application/octet-stream"
        text = VERSION.padded() if dialect is SDK else str(VERSION)
        assert publish.properties.user_property(dialect.timestamp_property) == text
        assert publish.properties.user_property("__protVer") == ("1.0" if dialect is SDK else None)
        assert notification(deleted, "c", dialect).payload == encode_array([b"NOTIFY", event])


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_the_answer_to_a_delete_and_its_notification_carry_one_version(dialect: Dialect) -> None:
    _, answered = sent(Answer(AnswerKind.COUNT, count=1, version=VERSION, previous=OLD), dialect)
    told = notification(Change(b"k", None, VERSION, previous=OLD), "c", dialect)
    name = dialect.timestamp_property
    assert told.properties.user_property(name) == dict(answered)[name]


# Requests that break the rules


def test_a_missing_response_topic_is_reported_in_the_puback() -> None:
    for publish in (message(response_topic=None), message(response_topic=""), Publish(INVOKE, b"x", 1)):
        refusal = read(publish)
        assert isinstance(refusal, RejectedRequest)
        assert refusal.reason_code == ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
        assert "response topic" in refusal.reason
        assert refusal.response is None
        assert not refusal.disconnect


@pytest.mark.parametrize(
    "topic",
    [
        INVOKE,
        OLDER_INVOKE,
        f"clients/{INVOKE}",
        notify_topic("c", b"k"),
        "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8x",
        "clients/+/response",
        "clients/#",
    ],
)
def test_forbidden_response_topics_end_the_connection(topic: str) -> None:
    for qos in (0, 1, 2):
        refusal = read(message(response_topic=topic, qos=qos, correlation=None))
        assert isinstance(refusal, RejectedRequest)
        assert refusal.disconnect
        assert refusal.reason_code == 0x90
        assert refusal.reason
        assert refusal.response is None


@pytest.mark.parametrize("topic", TOPICS["response_topic_by_client_for_client_id_client-id1"].values())
def test_response_topics_of_the_clients_are_allowed(topic: str) -> None:
    assert isinstance(read(message(response_topic=topic)), StoreRequest)


@pytest.mark.parametrize("qos", [0, 2])
def test_another_qos_is_answered_with_status_400(qos: int) -> None:
    refusal = read(message(qos=qos))
    assert isinstance(refusal, RejectedRequest)
    assert refusal.reason_code == ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
    assert refusal.response is not None
    assert refusal.response.payload == b""
    properties = refusal.response.properties
    assert properties.user_property("__stat") == "400"
    assert "QoS 1" in (properties.user_property("__stMsg") or "")
    assert properties.correlation_data == b"0123456789abcdef"
    without = read(message(qos=qos, correlation=None))
    assert isinstance(without, RejectedRequest)
    assert without.response is None


def test_without_correlation_data_the_answer_names_it() -> None:
    refusal = read(message(correlation=None))
    assert isinstance(refusal, RejectedRequest)
    assert refusal.reason_code == 0
    assert refusal.response is not None
    properties = refusal.response.properties
    assert properties.user_property("__stat") == "400"
    assert properties.user_property("__propName") == "Correlation Data"
    assert properties.correlation_data is None


@pytest.mark.parametrize("correlation", [b"", b"x" * 65_535])
def test_correlation_data_of_any_size_comes_back(correlation: bytes) -> None:
    found = read(message(correlation=correlation))
    assert isinstance(found, StoreRequest)
    publish = answered(found, Answer(AnswerKind.OK), NOW)
    assert publish is not None
    assert publish.properties.correlation_data == correlation


@pytest.mark.parametrize("version", ["2.0", "0.1", "10.0", "1", "1.", "1.x", "1.0.0", " 1.0", "1. 0", "", "1.-1"])
def test_another_protocol_version_is_answered_with_status_505(version: str) -> None:
    refusal = read(message(user=[("__protVer", version)]))
    assert isinstance(refusal, RejectedRequest)
    assert refusal.reason_code == 0
    assert refusal.response is not None
    assert refusal.response.payload == b""
    properties = refusal.response.properties
    assert properties.user_property("__stat") == "505"
    assert properties.user_property("__supProtMajVer") == "1"
    assert properties.user_property("__requestProtVer") == version
    assert properties.user_property("__protVer") == "1.0"


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.42", "1.00"])
def test_every_minor_version_is_taken(version: str) -> None:
    assert isinstance(read(message(user=[("__protVer", version)])), StoreRequest)


# Message expiry


@pytest.mark.parametrize(("expiry", "waited_ms", "executed"), [(10, 9_999, True), (10, 10_000, False), (0, 0, False)])
def test_a_request_whose_expiry_is_used_up_is_neither_executed_nor_answered(
    expiry: int, waited_ms: int, executed: bool
) -> None:
    found = read(message(expiry=expiry), received_ms=NOW - waited_ms)
    assert isinstance(found, StoreRequest) is executed
    if not executed:
        assert found == RejectedRequest()


@pytest.mark.parametrize(("passed_ms", "left"), [(0, 10), (1, 10), (1_000, 9), (9_001, 1), (9_999, 1), (10_000, None)])
def test_an_answer_has_the_remaining_expiry(passed_ms: int, left: int | None) -> None:
    publish = answered(ask(expires_at=NOW + 10_000), Answer(AnswerKind.OK), NOW + passed_ms)
    assert (None if publish is None else publish.properties.message_expiry_interval) == left


# What our client sends


def test_a_request_of_our_client_is_of_the_sdk_form() -> None:
    publish = request([b"GET", b"k"], "client-id1", b"x" * 16, VERSION, fencing_token=OLD, expiry_s=10)
    assert (publish.topic, publish.qos, publish.payload) == (INVOKE, 1, encode_array([b"GET", b"k"]))
    properties = publish.properties
    assert properties.content_type == "application/octet-stream"
    assert properties.user_properties == [
        ("__ts", VERSION.padded()),
        ("__srcId", "client-id1"),
        ("__protVer", "1.0"),
        ("$partition", "client-id1"),
        ("__ft", OLD.padded()),
    ]
    found = read_request(publish, "client-id1", NOW, NOW)
    assert isinstance(found, StoreRequest)
    assert found.response_topic == client_response_topic("client-id1")
    assert found.expires_at == NOW + 10_000


@pytest.mark.parametrize("expiry", [0, 5000])
@pytest.mark.parametrize("correlation", [b"", b"16 bytes of data", b"\xff" * 65_535])
@pytest.mark.parametrize("answer", [Answer(AnswerKind.OK, version=VERSION), Answer(AnswerKind.MISSING)], ids=repr)
@pytest.mark.parametrize("dialect", [SDK, PUBLISHED, OLDER], ids=lambda dialect: dialect.name)
def test_the_property_block_is_what_the_codec_writes(
    dialect: Dialect, answer: Answer, correlation: bytes, expiry: int
) -> None:
    ask = StoreRequest("clients/c/response", correlation, NOW + expiry if expiry else 0, "c", dialect)
    message = answered(ask, answer, NOW)
    assert message is not None
    assert message.properties_wire == encode_properties(message.properties, 1 << PacketType.PUBLISH)


def test_the_property_block_of_a_status_is_what_the_codec_writes() -> None:
    for correlation in (None, b"c"):
        message = status_response("t", correlation, SDK, 0, NOW, 505, [("__requestProtVer", "2.ä"), ("__stMsg", "")])
        assert message is not None
        assert message.properties_wire == encode_properties(message.properties, 1 << PacketType.PUBLISH)
