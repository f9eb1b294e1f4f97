"""The ten traps that each break a real client, through the service; the same over sockets in ``test_over_sockets``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.mqtt.service import NO_ANSWER
from penstock.statestore.hlc import Hlc
from tests.engine.statestore import Delivery, FakeOutlet, ManualClock, Peer, open_service
from tests.vectors.statestore import vectors

NOTIFY_TOPIC = vectors()["topics"]["notify_for_client-id1_key_SOMEKEY"]


class Bench:
    """A service that answers at once, and two clients."""

    def __init__(self, outlet: FakeOutlet, clock: ManualClock, peer: Peer, other: Peer) -> None:
        self.outlet = outlet
        self.clock = clock
        self.peer = peer
        self.other = other

    def notifications(self) -> list[Delivery]:
        return [d for d in self.outlet.taken() if d.publish.topic.startswith("clients/statestore/")]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    yield Bench(outlet, clock, Peer(service, outlet, clock), Peer(service, outlet, clock, "other"))
    await service.close()


async def test_trap_1_notifications_go_straight_to_the_observer_and_once(bench: Bench) -> None:
    bench.peer.ask("KEYNOTIFY SOMEKEY")
    bench.other.ask("SET SOMEKEY 1")
    bench.other.ask("SET SOMEKEY 2")
    bench.other.ask("DEL SOMEKEY")
    told = bench.outlet.taken()
    # Delivered into the session, never published as well: a matching subscription would make it two.
    assert [(d.client_id, d.publish.topic, d.publish.qos) for d in told] == [("client-id1", NOTIFY_TOPIC, 1)] * 3


@pytest.mark.parametrize("words", ["SET k w NX", "SET k w NEX", "VDEL k w"])
async def test_trap_2_condition_not_met_is_colon_minus_one(bench: Bench, words: str) -> None:
    bench.peer.ask("SET k v")
    assert bench.peer.ask(words).payload == b":-1\r\n"


async def test_trap_3_deletes_and_expiries_are_called_delete(bench: Bench) -> None:
    bench.peer.ask("KEYNOTIFY SOMEKEY")
    bench.peer.ask("SET SOMEKEY v")
    bench.peer.ask("DEL SOMEKEY")
    bench.peer.ask("SET SOMEKEY v PX 10")
    bench.clock.now_ms += 11
    bench.peer.service.wake()
    delete = bytes.fromhex(vectors()["notifications"][1]["hex"])
    assert [d.payload for d in bench.notifications()][1::2] == [delete, delete]


async def test_trap_4_a_missing_key_has_no_version(bench: Bench) -> None:
    missing = bench.peer.ask("GET k")
    assert (missing.payload, missing.user("__ts")) == (b"$-1\r\n", None)
    bench.peer.ask([b"SET", b"k", b""])
    empty = bench.peer.ask("GET k")
    assert empty.payload == b"$0\r\n\r\n"
    assert empty.version is not None


async def test_trap_5_the_fencing_error_says_lower_version_than(bench: Bench) -> None:
    bench.peer.ask("SET k v", ft=Hlc(bench.clock.now_ms, 1, "StateStore"))
    answer = bench.peer.ask("SET k v", ft=Hlc(bench.clock.now_ms, 0, "StateStore"))
    text = vectors()["errors"]["texts_matched_exactly"][3]
    assert "lower version than" in text
    assert answer.payload == f"-ERR {text}\r\n".encode()


async def test_trap_6_every_answer_has_a_status(bench: Bench) -> None:
    requests = ["SET k v", "GET k", "SET k w NX", "GET none", "KEYNOTIFY k", "KEYNOTIFY k", "KEYNOTIFY x STOP"]
    for words in (*requests, "DEL k", "FOO", "SET k", "GET k k"):
        answer = bench.peer.ask(words)
        assert answer.user("__stat") == "200", words
        assert answer.user("__protVer") == "1.0"
        assert answer.publish.properties.content_type == "application/octet-stream"
    assert bench.peer.ask(b"not RESP3").user("__stat") == "200"


async def test_trap_7_both_answers_to_set_have_a_version(bench: Bench) -> None:
    first = bench.peer.ask("SET k v NEX")
    assert first.version is not None
    assert bench.peer.ask("SET k w NEX").version == first.version
    second = bench.peer.ask("SET k v NEX")
    assert second.version is not None
    assert second.version > first.version


async def test_trap_8_notifications_have_a_version(bench: Bench) -> None:
    bench.peer.ask("KEYNOTIFY SOMEKEY")
    written = bench.other.ask("SET SOMEKEY v")
    deleted = bench.other.ask("DEL SOMEKEY")
    assert [d.version for d in bench.notifications()] == [written.version, deleted.version]
    assert written.version is not None
    assert deleted.version is not None
    assert deleted.version > written.version


async def test_trap_9_hex_is_upper_case(bench: Bench) -> None:
    bench.peer.ask([b"KEYNOTIFY", b"\xab\xcd\xef/+"])
    bench.other.ask([b"SET", b"\xab\xcd\xef/+", b"v"])
    assert bench.notifications()[0].publish.topic.endswith("/636C69656E742D696431/command/notify/ABCDEF2F2B")


async def test_trap_10_the_answer_is_a_message_of_the_store(bench: Bench) -> None:
    answer = bench.peer.ask("SET k v")
    # Published by the node itself: No Local compares publishers and cannot apply.
    assert (answer.client_id, answer.publish.topic) == (None, "clients/client-id1/response")
    assert (answer.publish.qos, answer.publish.retain, answer.publish.dup) == (1, False, False)


async def test_replies_have_the_bytes_that_the_sdks_compare(bench: Bench) -> None:
    assert [bench.peer.ask("KEYNOTIFY k").payload for _ in range(2)] == [b"+OK\r\n"] * 2
    assert bench.peer.ask("KEYNOTIFY k STOP").payload == b"+OK\r\n"
    assert bench.peer.ask("KEYNOTIFY k STOP").payload == b":0\r\n"
    assert bench.peer.ask("DEL missing", ft=Hlc(bench.clock.now_ms, 0, "n")).payload == b":0\r\n"
    for words in ("FOO", "SET k"):
        payload = bench.peer.ask(words).payload
        assert payload.startswith(b"-ERR ")
        assert payload.endswith(b"\r\n")


async def test_a_writer_that_observes_its_own_key_is_notified(bench: Bench) -> None:
    bench.peer.ask("KEYNOTIFY SOMEKEY")
    bench.peer.ask("SET SOMEKEY v")
    assert len(bench.notifications()) == 1


async def test_the_published_form_is_answered_as_the_document_prints(bench: Bench) -> None:
    peer = Peer(bench.peer.service, bench.outlet, bench.clock, "doc", form=())
    first = peer.ask(b"*3\r\n$3\r\nset\r\n$7\r\nSETKEY2\r\n$6\r\nVALUE5\r\n")
    assert first.payload == b"+OK\r\n"
    assert first.publish.properties.user_properties == [("__ts", f"{bench.clock.now_ms}:1:StateStore")]
    assert peer.ask("SET SETKEY2 x NX").payload == b"-1\r\n"
    assert peer.ask(b"*3\r\n$4\r\nvdel\r\n$7\r\nSETKEY2\r\n$3\r\nABC\r\n", ts=None).payload == b"-1\r\n"
    assert peer.ask("KEYNOTIFY SETKEY2", ts=None).payload == b"+OK\r\n"
    bench.peer.ask("KEYNOTIFY SETKEY2")
    deleted = peer.ask(b"*2\r\n$3\r\ndel\r\n$7\r\nSETKEY2\r\n", ts=None)
    assert (deleted.payload, deleted.version) == (b":1\r\n", first.version)
    told = {d.client_id: d for d in bench.notifications()}
    # Each observer hears it in the dialect of its own KEYNOTIFY: of the document with the version of the deleted value.
    assert told["doc"].payload == b"*2\r\n$6\r\nNOTIFY\r\n$3\r\nDEL\r\n"
    assert told["client-id1"].payload == b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n"
    assert told["doc"].version == first.version
    sdk_version = told["client-id1"].version
    assert sdk_version is not None
    assert first.version is not None
    assert sdk_version > first.version
    peer.ask("SET k v", ft=f"{bench.clock.now_ms}:1:n")
    assert b"lower version that the" in peer.ask("SET k v", ft=f"{bench.clock.now_ms}:0:n").payload


async def test_the_older_topic_has_its_own_property_names(bench: Bench) -> None:
    peer = Peer(
        bench.peer.service,
        bench.outlet,
        bench.clock,
        "older",
        topic=vectors()["topics"]["legacy_invoke_doc_001"],
        form=(),
        timestamp_property="Timestamp",
    )
    first = peer.ask("SET k v", ft=f"{bench.clock.now_ms}:1:n")
    assert [name for name, _ in first.publish.properties.user_properties] == ["Timestamp"]
    assert b"fencing token is required" in peer.ask("DEL k").payload
    assert peer.ask("DEL k", ft=f"{bench.clock.now_ms}:1:n").version == first.version


@pytest.mark.parametrize(
    ("request_of", "settled", "status"),
    [
        ({"qos": 0}, 0x83, "400"),
        ({"qos": 2}, 0x83, "400"),
        ({"response_topic": None}, 0x83, None),
        ({"response_topic": None, "protocol_version": 4}, 0x83, None),
        ({"correlation": None}, 0, "400"),
        ({"expiry": 0}, 0, None),
        ({"extra": [("__protVer", "2.0")]}, 0, "505"),
    ],
    ids=str,
)
async def test_requests_that_break_the_rules_are_not_executed(
    bench: Bench, request_of: dict[str, Any], settled: int, status: str | None
) -> None:
    peer = bench.peer if "extra" not in request_of else Peer(bench.peer.service, bench.outlet, bench.clock, form=())
    far = f"{bench.clock.now_ms + 60_000}:0:c"
    peer.send("SET k v", ts=far, **request_of)
    answers = bench.outlet.taken()
    assert [d.user("__stat") for d in answers] == ([] if status is None else [status])
    assert [code for _, code, _ in bench.outlet.settled] == [settled]
    assert bench.peer.ask("GET k").payload == b"$-1\r\n"
    # Nor has its time stamp moved the clock.
    written = bench.peer.ask("SET k v").version
    assert written == Hlc(bench.clock.now_ms, 1, "StateStore")


async def test_a_forbidden_response_topic_ends_the_connection(bench: Bench) -> None:
    bench.peer.send("SET k v", response_topic=NOTIFY_TOPIC)
    ((code, reason),) = bench.outlet.disconnects
    assert code == 0x90
    assert reason
    assert [code for _, code, _ in bench.outlet.settled] == [NO_ANSWER]  # no PUBACK
    assert bench.outlet.taken() == []
    assert bench.peer.ask("GET k").payload == b"$-1\r\n"


async def test_a_will_with_a_forbidden_response_topic_disconnects_no_client(bench: Bench) -> None:
    """A will has no network connection; the client may be back on a new one, which did nothing wrong."""
    bench.peer.connection = None
    bench.peer.send("SET k v", response_topic=NOTIFY_TOPIC)
    assert bench.outlet.disconnects == []
    assert bench.peer.ask("GET k").payload == b"$-1\r\n"


async def test_an_answer_that_cannot_be_published_is_counted_and_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.peer.send("SET k v", response_topic="clients/\0/response")
    assert bench.outlet.taken() == []
    assert [code for _, code, _ in bench.outlet.settled] == [0]
    assert (bench.peer.service.stats.unanswered, bench.peer.service.stats.responses) == (1, 0)
    assert "U+0000" in caplog.text
    assert bench.peer.ask("GET k").payload == b"$1\r\nv\r\n"


async def test_a_key_whose_notification_topic_cannot_exist_is_refused(bench: Bench) -> None:
    huge = b"k" * 1_000_000
    assert b"topic" in bench.peer.ask([b"KEYNOTIFY", huge]).payload
    assert bench.peer.ask([b"SET", huge, b"v"]).payload == b"+OK\r\n"
    assert bench.peer.ask([b"GET", huge]).payload == b"$1\r\nv\r\n"


@pytest.mark.parametrize("case", vectors()["requests"], ids=lambda case: str(case["escaped"]))
async def test_golden_requests_are_answered_with_golden_responses(bench: Bench, case: dict[str, str]) -> None:
    golden = {bytes.fromhex(response["hex"]) for response in vectors()["responses"]}
    answer = bench.peer.ask(bytes.fromhex(case["hex"]))
    if "empty key" in case["meaning"]:
        assert answer.payload == b"-ERR the key length is zero\r\n"
    elif case["args"][0] == "SCAN":
        assert answer.payload.startswith(b"*1\r\n*0\r\n" if len(case["args"]) == 2 else b"-ERR the continuation token")
    else:
        assert answer.payload in golden


async def test_statistics(bench: Bench) -> None:
    bench.peer.ask("KEYNOTIFY k")
    bench.other.ask("SET k v")
    bench.outlet.gone.add("client-id1")
    bench.other.ask("SET k v")
    bench.peer.send("GET k", response_topic=None)
    stats = bench.peer.service.stats
    assert (stats.requests, stats.responses, stats.notifications) == (4, 3, 2)
    assert (stats.refused, stats.unanswered, stats.undelivered) == (1, 0, 1)
    assert (bench.peer.service.keys, bench.peer.service.observations) == (1, 1)


async def test_a_stopped_store_refuses(bench: Bench) -> None:
    await bench.peer.service.close()
    await bench.peer.service.close()
    bench.peer.send("GET k")
    assert bench.outlet.settled[-1][1] == 0x83
