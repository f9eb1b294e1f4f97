"""Targets of the state store: requests on the wire against the engine, answers, hybrid logical clocks."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.statestore.binding import (
    StoreRequest,
    answer_payload,
    answer_properties,
    notification,
    read_request,
    response,
)
from penstock.statestore.codec import resp3
from penstock.statestore.codec.commands import Extension, parse_payload
from penstock.statestore.codec.dialects import DIALECTS
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.engine.record import Change, decode_change, decode_record, encode_change, encode_record
from penstock.statestore.engine.requests import Answer, AnswerKind
from penstock.statestore.engine.store import Engine
from penstock.statestore.hlc import Hlc, StoreClock, parse, parse_position, parse_wire
from tests.fuzz.data_provider import head, records

START = 1_700_000_000_000
MAX_KEYS = 8
FORMS = list(DIALECTS.values())


def fuzz_requests(data: bytes) -> object:
    """Extensions (1 byte), then records: payloads of requests, or the user property of the next one, or time.

    Every request has an answer that can be encoded and read; versions rise, quotas hold, changes can be stored.
    """
    (kind,), rest = head(data, 1)
    extensions = ~Extension.NONE if kind & 1 else Extension.SCAN
    engine = Engine(extensions=extensions, max_keys=MAX_KEYS, max_bytes=4096, secret=b"s")
    now = START
    stamp, token, prefix = "", None, None
    outcomes: list[object] = []
    greatest = engine.clock
    for number, content in records(rest):
        if number & 0xC0 == 0x40:
            now += int.from_bytes(content[:2], "big")
            engine.tick(now, now)
            continue
        if number & 0xC0:
            text = content[:300].decode("utf-8", "replace").replace("\0", "")
            if number & 3 == 0:
                stamp = text
            elif number & 3 == 1:
                token = text
            else:
                prefix = text
            continue
        dialect = FORMS[number & 1]
        user = [("__protVer", "1.0")] if dialect.status else []
        user.append((dialect.timestamp_property, stamp or f"{now}:0:c"))
        user += [(dialect.fence_property, token)] if token is not None else []
        user += [("__fencePrefix", prefix)] if prefix is not None else []
        properties = Properties(response_topic="r", correlation_data=b"1", user_properties=user)
        request = Publish("s", content, 1, packet_id=1, properties=properties)
        (publish,) = Decoder().feed(encode(request))
        assert isinstance(publish, Publish)
        ask = read_request(publish, "c", now, now)
        token = prefix = None
        if not isinstance(ask, StoreRequest):
            outcomes.append("rejected")
            continue
        command = parse_payload(publish.payload, extensions)
        if isinstance(command, StoreError):
            answer = Answer(AnswerKind.ERROR, error=command)
            changes: list[Change] = []
        else:
            answer, found = engine.execute(command, ask, now, now)
            changes = list(found)
        payload = answer_payload(answer, ask.dialect)
        message = response(ask.response_topic, payload, answer_properties(ask, answer, 0))
        message.packet_id = 1  # the session chooses it
        assert Decoder().feed(encode(message))
        for change in changes:
            assert greatest < change.version
            greatest = change.version
            told = notification(change, "c", dialect)
            resp3.decode_notification(told.payload)
            again = decode_change(encode_change(change), engine.clock.node)
            assert again is not None
            assert (again.key, again.version) == (change.key, change.version)
        assert engine.keys <= MAX_KEYS
        assert engine.size <= 4096
        outcomes.append((message.payload, message.properties))
    return outcomes


READERS: tuple[Callable[[bytes], object], ...] = (
    resp3.decode_array,
    resp3.decode_reply,
    resp3.decode_replies,
    resp3.decode_notification,
    resp3.decode_page,
    resp3.decode_values,
)


def fuzz_replies(data: bytes) -> object:
    """A payload: read as each kind of answer, and as records that were stored."""
    outcomes: list[object] = []
    for read in READERS:
        try:
            found = read(data)
        except RemoteProtocolError as error:
            outcomes.append(str(error))
            continue
        outcomes.append(found)
        if read is resp3.decode_array and isinstance(found, list):
            assert resp3.decode_array(resp3.encode_array(found)) == found
    record = decode_record(data)
    if record is not None:
        assert decode_record(encode_record(record)) is not None
    decode_change(data, "n")
    return outcomes


def fuzz_hlc(data: bytes) -> object:
    """Text of one or more clocks, separated by line ends: both readers agree, and printing is the inverse."""
    clock = StoreClock(Hlc(0, 0, "n"))
    found: list[str | None] = []
    for raw in data.split(b"\n")[:8]:
        read = parse_wire(raw)
        wall, counter = parse_position(raw)
        if read is None:
            found.append(None)
            continue
        assert (wall, counter) == (read.wall_ms, read.counter)
        assert parse(raw.decode()) == read
        assert parse(str(read)) == read
        assert parse_wire(read.padded_wire()) == read
        assert parse(read.padded()) == read
        before = clock.value
        if not read.is_too_far_ahead(START):
            clock.next(START, read.wall_ms, read.counter)
            assert before < clock.value
            assert read.wall_ms <= clock.value.wall_ms
        found.append(str(read))
    return found
