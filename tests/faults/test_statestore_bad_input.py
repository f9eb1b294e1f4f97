"""Bad input over real sockets: each piece is answered where it can be, changes nothing and harms nobody."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.mqtt.codec.properties import Properties
from penstock.statestore.binding import INVOKE
from penstock.statestore.codec.resp3 import encode_array
from tests.conformance.statestore.node import PlainClient, StoreNode

FUTURE = str(2**64)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[StoreNode]:
    node = StoreNode(tmp_path / "store")
    await node.start()
    yield node
    await node.close()


async def send(
    client: PlainClient,
    payload: bytes,
    *,
    ts: list[str] | None = None,
    correlation: bytes | None = None,
    extra: list[tuple[str, str]] | None = None,
) -> bytes:
    """Publish ``payload`` as it is and give the answer's."""
    correlation = correlation or uuid.uuid4().bytes
    user = [*client.form, *(("__ts", text) for text in (["0:0:c"] if ts is None else ts)), *(extra or [])]
    properties = Properties(response_topic=client.response_topic, correlation_data=correlation, user_properties=user)
    await client.mqtt.publish(INVOKE, payload, qos=1, properties=properties)
    answer = await client.wait_for(lambda message: message.properties.correlation_data == correlation)
    assert answer.properties.user_property("__stat") == "200"
    return answer.payload


MALFORMED = {
    "empty": b"",
    "cut before the count": b"*",
    "null array": b"*-1\r\n",
    "empty array": b"*0\r\n",
    "count of a thousand million": b"*1000000000\r\n",
    "count beyond 64 bits": b"*99999999999999999999\r\n$3\r\nGET\r\n",
    "null verb": b"*2\r\n$-1\r\n$1\r\nk\r\n",
    "null key": b"*2\r\n$3\r\nGET\r\n$-1\r\n",
    "length beyond 64 bits": b"*2\r\n$3\r\nGET\r\n$9999999999999999999\r\nk\r\n",
    "length too great": b"*2\r\n$3\r\nGET\r\n$2\r\nk\r\n",
    "length too small": b"*2\r\n$3\r\nGET\r\n$1\r\nkk\r\n",
    "LF alone": b"*2\n$3\nGET\n$1\nk\n",
    "LF CR": b"*2\r\n$3\r\nGET\r\n$1\r\nk\n\r",
    "CR alone": b"*2\r\n$3\r\nGET\r\n$1\rk\r\n",
    "CR in the place of a value's end": b"*2\r\n$3\r\nGET\r\n$3\r\nk\r\r\n",
    "no line end": b"*2\r\n$3\r\nGET\r\n$1\r\nk",
    "trailing line end": b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n\r\n",
    "trailing bytes": b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\nx",
    "trailing request": b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n" * 2,
    "count too small": b"*1\r\n$3\r\nGET\r\n$1\r\nk\r\n",
    "count too great": b"*3\r\n$3\r\nGET\r\n$1\r\nk\r\n",
    "leading zero": b"*2\r\n$03\r\nGET\r\n$1\r\nk\r\n",
    "plus sign": b"*2\r\n$+3\r\nGET\r\n$1\r\nk\r\n",
    "blank": b"*2\r\n$ 3\r\nGET\r\n$1\r\nk\r\n",
    "digits that are not ASCII": "*2\r\n$٣\r\nGET\r\n$1\r\nk\r\n".encode(),
    "inline command": b"GET k\r\n",
    "inline ping": b"PING\r\n",
    "nested array": b"*1\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n",
    "array for a key": b"*2\r\n$3\r\nGET\r\n*1\r\n$1\r\nk\r\n",
    "number for a key": b"*2\r\n$3\r\nGET\r\n:1\r\n",
    "simple strings": b"*2\r\n+GET\r\n+k\r\n",
    "map": b"%1\r\n$3\r\nGET\r\n$1\r\nk\r\n",
    "set": b"~2\r\n$3\r\nGET\r\n$1\r\nk\r\n",
    "push": b">2\r\n$3\r\nGET\r\n$1\r\nk\r\n",
    "null": b"_\r\n",
    "boolean": b"#t\r\n",
    "double": b",1.5\r\n",
    "big number": b"(12345678901234567890\r\n",
    "verbatim string": b"=7\r\ntxt:GET\r\n",
    "attribute": b"|1\r\n$3\r\nGET\r\n$1\r\nk\r\n",
    "bulk string": b"$3\r\nGET\r\n",
    "simple string": b"+OK\r\n",
    "error": b"-ERR\r\n",
    "noise": b"\xff" * 1000,
    "ten thousand arrays": b"*2\r\n" * 10_000,
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED)
async def test_every_malformed_payload_is_a_syntax_error(node: StoreNode, payload: bytes) -> None:
    async with PlainClient(node) as client, PlainClient(node, "neighbour") as neighbour:
        await neighbour.ask("SET k untouched")
        assert await send(client, payload) == b"-ERR syntax error\r\n"
        assert (await neighbour.ask("GET k")).payload == b"$9\r\nuntouched\r\n"
        assert (await client.ask("GET k")).payload == b"$9\r\nuntouched\r\n"
        assert node.service.keys == 1


async def test_line_ends_inside_keys_and_values_are_plain_bytes(node: StoreNode) -> None:
    async with PlainClient(node) as client:
        for value in (b"\r", b"\n", b"\r\n", b"a\r\n$1\r\nb", b"*1\r\n"):
            assert (await client.ask([b"SET", value, value])).payload == b"+OK\r\n"
            assert (await client.ask([b"GET", value])).payload == b"$%d\r\n%b\r\n" % (len(value), value)


@pytest.mark.parametrize(
    "ttl",
    ["0", "-1", "31536000000001", str(2**63 - 1), str(2**63), "1e3", " 5", "5 ", "+5", "05", "", "0x5", "٣", "9" * 400],
)
async def test_an_invalid_expiry_is_a_syntax_error(node: StoreNode, ttl: str) -> None:
    async with PlainClient(node) as client:
        payload = encode_array([b"SET", b"k", b"v", b"PX", ttl.encode()])
        assert await send(client, payload) == b"-ERR syntax error\r\n"
        assert (await client.ask("GET k")).payload == b"$-1\r\n"


@pytest.mark.parametrize(
    ("stamps", "error"),
    [
        ([], "missing timestamp"),
        (["0:0:c", "0:0:c"], "malformed timestamp"),
        (["-1:0:c"], "malformed timestamp"),
        ([f"{FUTURE}:0:c"], "malformed timestamp"),
        ([f"{'0' * 30}1:{FUTURE}:c"], "malformed timestamp"),
        (["1:2:c:d"], "malformed timestamp"),
        (["1:2"], "malformed timestamp"),
        (["1:2:"], "malformed timestamp"),
        (["٣:0:c"], "malformed timestamp"),
        (["²:0:c"], "malformed timestamp"),
        ([" 1:0:c"], "malformed timestamp"),
        (["1_0:0:c"], "malformed timestamp"),
        ([""], "malformed timestamp"),
        ([f"{2**63}:0:c"], "the request timestamp is too far in the future"),
    ],
    ids=str,
)
async def test_invalid_timestamps_are_refused(node: StoreNode, stamps: list[str], error: str) -> None:
    async with PlainClient(node) as client:
        answer = await send(client, encode_array([b"SET", b"k", b"v"]), ts=stamps)
        assert answer.startswith(f"-ERR {error}".encode())
        if stamps:
            token = [("__ft", text) for text in stamps]
            refused = await send(client, encode_array([b"SET", b"k", b"v"]), extra=token)
            assert refused.startswith(b"-ERR malformed timestamp" if "malformed" in error else b"-ERR the request fenc")
        assert (await client.ask("GET k")).payload == b"$-1\r\n"


async def test_large_keys_long_names_and_much_correlation_data(node: StoreNode) -> None:
    async with PlainClient(node) as client, PlainClient(node, "x" * 20_000) as long_name:
        huge = b"k" * 1_000_000
        assert await send(client, encode_array([b"SET", huge, b"v"]), correlation=b"c" * 65_535) == b"+OK\r\n"
        assert await send(client, encode_array([b"GET", huge])) == b"$1\r\nv\r\n"
        assert (await send(client, encode_array([b"KEYNOTIFY", huge]))).startswith(b"-ERR the notification topic")
        # 20,000 letters are 40,000 hex digits: short keys fit, long ones do not.
        assert (await long_name.ask([b"KEYNOTIFY", b"k" * 100])).payload == b"+OK\r\n"
        assert (await long_name.ask([b"KEYNOTIFY", b"k" * 20_000])).payload.startswith(b"-ERR the notification topic")
        await client.ask([b"SET", b"k" * 100, b"v"])
        notice = await long_name.wait_for(lambda message: "/command/notify/" in message.topic)
        assert notice.payload.endswith(b"v\r\n")


async def test_bad_input_at_full_speed_leaves_the_neighbour_alone(node: StoreNode) -> None:
    async with PlainClient(node) as client, PlainClient(node, "neighbour") as neighbour:
        for _ in range(3):
            storm = [asyncio.create_task(send(client, payload)) for payload in MALFORMED.values()]
            for number in range(10):
                assert (await neighbour.ask(f"SET k {number}")).payload == b"+OK\r\n"
            assert set(await asyncio.gather(*storm)) == {b"-ERR syntax error\r\n"}
