"""RESP3 subset: the golden payloads both ways, every malformed form, and that any bytes give a result or our error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.statestore.codec import resp3
from penstock.statestore.codec.resp3 import (
    MISSING,
    OK,
    Reply,
    ReplyKind,
    decode_array,
    decode_notification,
    decode_page,
    decode_replies,
    decode_reply,
    encode_array,
    encode_bulk,
    encode_error,
    encode_integer,
)
from tests.vectors.statestore import vectors


def as_bytes(argument: str | dict[str, str]) -> bytes:
    return argument.encode() if isinstance(argument, str) else bytes.fromhex(argument["hex"])


@pytest.mark.parametrize("case", vectors()["requests"], ids=lambda case: str(case["escaped"]))
def test_golden_requests_both_ways(case: dict[str, Any]) -> None:
    payload = bytes.fromhex(case["hex"])
    args = [as_bytes(argument) for argument in case["args"]]
    assert decode_array(payload) == args
    assert encode_array(args) == payload


@pytest.mark.parametrize("case", vectors()["requests"], ids=lambda case: str(case["escaped"]))
def test_requests_that_are_cut_or_continued_are_refused(case: dict[str, Any]) -> None:
    payload = bytes.fromhex(case["hex"])
    for size in range(len(payload)):
        with pytest.raises(RemoteProtocolError):
            decode_array(payload[:size])
    for tail in (b"\r\n", b"x", payload):
        with pytest.raises(RemoteProtocolError):
            decode_array(payload + tail)


REPLIES = {
    "+OK\\r\\n": (Reply(ReplyKind.OK), OK),
    ":-1\\r\\n": (Reply(ReplyKind.INTEGER, number=-1), encode_integer(-1)),
    "$-1\\r\\n": (Reply(ReplyKind.MISSING), MISSING),
    "$4\\r\\n1234\\r\\n": (Reply(ReplyKind.VALUE, data=b"1234"), encode_bulk(b"1234")),
    "$0\\r\\n\\r\\n": (Reply(ReplyKind.VALUE), encode_bulk(b"")),
    ":1\\r\\n": (Reply(ReplyKind.INTEGER, number=1), encode_integer(1)),
    ":0\\r\\n": (Reply(ReplyKind.INTEGER, number=0), encode_integer(0)),
    "-ERR syntax error\\r\\n": (Reply(ReplyKind.ERROR, text="syntax error"), encode_error("syntax error")),
    "-ERR \\r\\n": (Reply(ReplyKind.ERROR), encode_error("")),
}


@pytest.mark.parametrize("case", vectors()["responses"], ids=lambda case: str(case["escaped"]))
def test_golden_responses_both_ways(case: dict[str, Any]) -> None:
    payload = bytes.fromhex(case["hex"])
    reply, encoded = REPLIES[case["escaped"]]
    assert decode_reply(payload) == reply
    assert encoded == payload


@pytest.mark.parametrize(
    "case", vectors()["responses_that_a_client_refuses"], ids=lambda case: f"{case['why']}: {case['escaped']}"
)
def test_responses_that_a_client_refuses(case: dict[str, Any]) -> None:
    payload = bytes.fromhex(case["hex"])
    with pytest.raises(RemoteProtocolError):
        decode_reply(payload)


@pytest.mark.parametrize("case", vectors()["notifications"], ids=lambda case: str(case["escaped"]))
def test_golden_notifications_both_ways(case: dict[str, Any]) -> None:
    payload = bytes.fromhex(case["hex"])
    operation, value = decode_notification(payload)
    elements = [b"NOTIFY", b"SET", b"VALUE", value] if value is not None else [b"NOTIFY", b"DELETE"]
    assert encode_array(elements) == payload
    assert operation == ("DELETE" if value is None else "SET")


@pytest.mark.parametrize(
    "case", vectors()["notifications_that_a_client_refuses"], ids=lambda case: str(case["escaped"])
)
def test_notifications_that_a_client_refuses(case: dict[str, Any]) -> None:
    payload = bytes.fromhex(case["hex"])
    if payload == encode_array([b"NOTIFY", b"DEL"]):
        # The document's own word: the SDKs refuse it, ours reads it.
        assert decode_notification(payload).operation == "DELETE"
    else:
        with pytest.raises(RemoteProtocolError):
            decode_notification(payload)


MALFORMED = [
    b"",
    b"*",
    b"*\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*01\r\n$3\r\nGET\r\n",
    b"*1000000000\r\n",
    b"*99999999999999999999\r\n",
    b"*2\r\n$3\r\nGET\r\n$-1\r\n",
    b"*2\r\n$3\r\nGET\r\n$9999999999999999999\r\nk\r\n",
    b"*2\r\n$3\r\nGET\r\n$+1\r\nk\r\n",
    b"*2\r\n$3\r\nGET\r\n$ 1\r\nk\r\n",
    b"*2\r\n$3\r\nGET\r\n$1\r\nkx\r\n",
    b"*2\r\n$3\r\nGET\r\n$1\nk\n",
    b"*2\n$3\nGET\n$1\nk\n",
    b"*2\r\n$3\r\nGET\r\n$1\r\nk\r",
    b"*2\r\n$3\r\nGET\r\n$1\r\nk\n\r",
    b"*2\r\n$3\r\nGET\r\n*1\r\n$1\r\nk\r\n",
    b"*2\r\n$3\r\nGET\r\n+k\r\n",
    b"*2\r\n$3\r\nGET\r\n:1\r\n",
    b"*1\r\n*1\r\n$3\r\nGET\r\n",
    b"GET k\r\n",
    b"$3\r\nGET\r\n",
    b"+GET\r\n",
    b"_\r\n",
    b"#t\r\n",
    b"%1\r\n$3\r\nGET\r\n$1\r\nk\r\n",
    b"*2\r\n$3\r\nGET\r\n$\xd9\xa1\r\nk\r\n",
]


@pytest.mark.parametrize("payload", MALFORMED, ids=repr)
def test_malformed_requests_are_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_array(payload)


def test_a_huge_count_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(RemoteProtocolError, match="invalid number of elements"):
        decode_array(b"*1000000000\r\n" + b"$0\r\n\r\n" * 10)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_encoded_arrays_are_decoded(elements: list[bytes]) -> None:
    assert decode_array(encode_array(elements)) == elements


@given(st.binary(max_size=60) | st.text("*$+:-0123456789\r\nERKOD ", max_size=60).map(str.encode))
def test_any_bytes_give_a_result_or_our_error(payload: bytes) -> None:
    for decode in (decode_array, decode_reply, decode_replies, decode_notification):
        with suppress(RemoteProtocolError):
            decode(payload)


@pytest.mark.parametrize(
    ("payload", "keys", "token"),
    [
        (b"*1\r\n*0\r\n", [], None),
        (b"*1\r\n*2\r\n$1\r\na\r\n$2\r\n\r\n\r\n", [b"a", b"\r\n"], None),
        (b"*2\r\n*0\r\n$3\r\n\x00\xffx\r\n", [], b"\x00\xffx"),
        (b"*2\r\n*1\r\n$1\r\na\r\n$0\r\n\r\n", [b"a"], b""),
    ],
)
def test_pages_of_scan(payload: bytes, keys: list[bytes], token: bytes | None) -> None:
    assert decode_page(payload) == (keys, token)


def test_replies_of_a_batch() -> None:
    replies = decode_replies(b"*4\r\n+OK\r\n:1\r\n:-1\r\n-ERR not authorized\r\n")
    assert [(reply.kind, reply.number, reply.text) for reply in replies] == [
        (ReplyKind.OK, 0, ""),
        (ReplyKind.INTEGER, 1, ""),
        (ReplyKind.INTEGER, -1, ""),
        (ReplyKind.ERROR, 0, "not authorized"),
    ]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"+OK\r\n",
        b"*1\r\n",
        b"*2\r\n+OK\r\n",
        b"*1\r\n+OK\r\n+OK\r\n",
        b"*1\r\n+OK\n",
        b"*1\r\n+OK",
        b"*1\r\n$1\r\nv\r\n",
        b"*1\r\nOK\r\n",
        b"*1000000000\r\n+OK\r\n",
    ],
)
def test_invalid_replies_of_a_batch_are_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_replies(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"+OK\r\n",
        b"*0\r\n",
        b"*3\r\n*0\r\n$1\r\na\r\n$1\r\nb\r\n",
        b"*1\r\n*a\r\n",
        b"*1\r\n$0\r\n\r\n",
        b"*1\r\n*1\r\n$4\r\nkey\r\n",
        b"*2\r\n*0\r\n",
        b"*1\r\n*0\r\ntrailing",
        b"*1\r\n*-1\r\n",
        b"*1\r\n*1\r\n$-1\r\n",
        b"*1\r\n*1000000000\r\n",
    ],
)
def test_invalid_scan_pages_are_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_page(payload)


@given(st.binary(max_size=4), st.sampled_from([b"$", b"*"]), st.from_regex(rb"\A[0-9]{0,12}(\r\n)?[\r\n0-9x]{0,6}\Z"))
def test_both_forms_read_the_same_headers(before: bytes, kind: bytes, rest: bytes) -> None:
    """Interpreted, they are one; compiled, lines read at once are compared with bulk methods."""
    payload = before + b"$" + rest

    def read(form: Any) -> Any:
        try:
            return form(payload, len(before), kind[0])
        except RemoteProtocolError as error:
            return str(error)

    assert read(resp3._header) == read(resp3._header_in_bulk)


_ARRAYS = st.lists(st.binary(max_size=4) | st.sampled_from([b"", b"\r\n", b"a\r\nb", b"$1"]), min_size=1, max_size=4)


@given(_ARRAYS, st.integers(0, 40), st.sampled_from([b"", b"\r\n", b"$", b"0", b"\r"]))
def test_both_forms_read_the_same_arrays(elements: list[bytes], cut: int, more: bytes) -> None:
    """Whatever the bulk form reads, whole, cut or with something in between, the loop reads too."""
    whole = encode_array(elements)
    for payload in (whole, whole[:cut] + more + whole[cut:], whole[:cut] + more):
        found = resp3._array_in_bulk(payload)
        if found is not None:
            assert resp3._decode_elements(payload) == found
