"""Many writes over a store with BATCH and over one without: the same comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from penstock.errors import LocalProtocolError, RemoteProtocolError, UnavailableError
from penstock.statestore.client import writes as client_writes
from penstock.statestore.client.requests import RequestSender
from penstock.statestore.client.writes import BatchWriter, Write
from penstock.statestore.codec.commands import Command, Condition, Extension, parse
from penstock.statestore.codec.dialects import SDK
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import decode_array, encode_array
from penstock.statestore.engine.quotas import Quotas
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.requests import AnswerKind, Context
from penstock.statestore.engine.store import Engine
from penstock.statestore.errors import ClockSkewError, FencingError, QuotaExceededError, WritesRefusedError, refusal
from penstock.statestore.hlc import Hlc

NOW = 1_700_000_000_000
TOKEN = Hlc(NOW, 4, "run")
HIGHER = Hlc(NOW, 5, "run")


class Store:
    """A store's engine in place of the requests with one; ``away`` is a key that it does not answer for."""

    def __init__(self, extensions: Extension) -> None:
        self.engine = Engine(extensions=extensions)
        self.changes: list[Change] = []
        self.requests: list[list[bytes]] = []
        self.under_way = self.most = 0
        self.away = b""
        self.ahead_ms = 0
        self.extra: Mapping[str, str] = {}

    async def call(
        self,
        args: list[bytes],
        token: Hlc | None = None,
        *,
        timeout_s: float | None = None,
        extra: Mapping[str, str] | None = None,
        named: tuple[str, bytes] | None = None,
    ) -> tuple[bytes, Hlc | None]:
        assert timeout_s == 7
        self.requests.append(args)
        self.extra = extra or {}
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return await self._answer(decode_array(encode_array(args)), token, named or (args[0].decode(), args[1]))
        finally:
            self.under_way -= 1

    async def _answer(self, args: list[bytes], token: Hlc | None, named: tuple[str, bytes]) -> tuple[bytes, None]:
        await asyncio.sleep(0)
        if self.away and self.away in args:
            raise UnavailableError("gone")
        command = parse(args, self.engine.extensions)
        if not isinstance(command, Command):
            raise refusal(*named, command)
        stamp = f"{NOW + self.ahead_ms}:0:c"
        context = Context("c", SDK, stamp.encode(), None if token is None else str(token).encode())
        answer, changes = self.engine.execute(command, context, NOW, NOW)
        self.changes += changes
        if answer.error is not None:
            raise refusal(*named, answer.error, token=token)
        if answer.kind is AnswerKind.PAYLOAD:
            return answer.value, None
        return b"+OK\r\n" if answer.kind is AnswerKind.OK else b":%d\r\n" % (answer.count or -1), None

    def set(self, key: bytes, token: Hlc | None = None) -> None:
        command = parse([b"SET", key, b"x"])
        assert isinstance(command, Command)
        self.engine.execute(
            command, Context("c", SDK, b"%d:0:c" % NOW, None if token is None else str(token).encode()), NOW, NOW
        )

    def value(self, key: bytes) -> bytes | None:
        record = self.engine._records.get(key)
        return None if record is None else record.value


@pytest.fixture(params=[~Extension.NONE, Extension.SCAN], ids=["batch", "single"])
def store(request: Any) -> Store:
    return Store(request.param)


def has_batch(store: Store) -> bool:
    return bool(store.engine.extensions & Extension.BATCH)


def many(store: Store, packet_bytes: int | None = None) -> BatchWriter:
    return BatchWriter(cast("RequestSender", store), lambda: packet_bytes)


async def write(
    to: BatchWriter, writes: Sequence[Write], token: Hlc | None = None, *, stop: bool = False, **extra: str
) -> list[bool]:
    return await to.write(writes, token, extra=extra, stop=stop, timeout_s=7)


async def test_each_says_whether_it_was_applied(store: Store) -> None:
    store.set(b"there")
    writes = [
        Write.set("a", "1", ttl_ms=5),
        Write.set("there", "1", condition=Condition.NX),
        Write.delete("none"),
        Write.vdelete("there", "other"),
        Write.vdelete("there", "x"),
        Write.set(b"b", b"\r\n$1\r\n", condition=Condition.NEX),
    ]
    assert await write(many(store), writes, TOKEN, keep="yes") == [True, False, False, False, True, True]
    assert store.extra == {"keep": "yes"}
    assert (store.value(b"a"), store.value(b"b"), store.value(b"there")) == (b"1", b"\r\n$1\r\n", None)
    assert store.engine._records[b"a"].fence == TOKEN
    assert len(store.requests) == (1 if has_batch(store) else 7)


@pytest.mark.parametrize("count", [0, 1, 2, 2000])
async def test_any_number_of_writes(store: Store, count: int) -> None:
    to = many(store)
    for _ in range(2):
        store.requests.clear()
        assert await write(to, [Write.set(b"%d" % number, b"v") for number in range(count)]) == [True] * count
    assert store.engine.keys == count
    if has_batch(store):
        assert len(store.requests) == -(-count // client_writes.BATCH_WRITES)
        assert store.most == min(client_writes.CONCURRENT_BATCHES, len(store.requests))
    else:
        assert len(store.requests) == count, "it is asked once whether it has batches"
        assert store.most == min(client_writes.CONCURRENT_WRITES, count)


async def test_the_writes_of_a_key_keep_their_order(store: Store) -> None:
    writes = [Write.set(b"%d" % (number % 7), b"%d" % number) for number in range(1000)]
    await write(many(store), writes)
    seen: dict[bytes, list[int]] = {}
    for change in store.changes:
        assert change.record is not None
        seen.setdefault(change.key, []).append(int(change.record.value))
    assert seen == {b"%d" % key: list(range(key, 1000, 7)) for key in range(7)}


@pytest.mark.parametrize("packet_bytes", [None, 100_000, 100])
async def test_requests_stay_below_what_the_broker_takes(store: Store, packet_bytes: int | None) -> None:
    writes = [Write.set(b"%d" % number, bytes(9000)) for number in range(50)] + [Write.set(b"large", bytes(400_000))]
    assert all(await write(many(store, packet_bytes), writes))
    sizes = [len(encode_array(request)) for request in store.requests if request[0] == b"BATCH"]
    if has_batch(store):
        limit = client_writes.BATCH_BYTES if packet_bytes is None else packet_bytes
        assert all(size < limit for size in sizes)
        assert bool(sizes) == (packet_bytes != 100), "a write that is too large goes alone, and says so itself"


async def test_refused_writes_are_named_and_the_others_are_applied(store: Store) -> None:
    store.set(b"fenced", HIGHER)
    store.set(b"another", HIGHER)
    writes = [Write.set(key, b"1") for key in (b"a", b"fenced", b"b", b"another", b"c")]
    with pytest.raises(WritesRefusedError) as raised:
        await write(many(store), writes, TOKEN)
    error = raised.value
    assert error.applied == [True, False, True, False, True]
    assert error.refused == {b"fenced": StoreError.FENCE_LOWER, b"another": StoreError.FENCE_LOWER}
    assert isinstance(error.first, FencingError)
    assert error.__cause__ is error.first
    assert (error.first.key, error.first.token) == (b"fenced", TOKEN)
    assert error.what.startswith("state store refused SET 'fenced': the request fencing token is a lower version")
    assert error.what.endswith("(2 of 5 writes were refused)")


async def test_with_stop_no_more_is_begun_once_one_was_refused(store: Store) -> None:
    store.set(b"0", HIGHER)
    with pytest.raises(WritesRefusedError) as raised:
        await write(many(store), [Write.delete(b"%d" % n) for n in range(10_000)], TOKEN, stop=True)
    assert raised.value.refused == {b"0": StoreError.FENCE_LOWER}
    assert len(store.requests) <= 1 + max(client_writes.CONCURRENT_BATCHES, client_writes.CONCURRENT_WRITES) + 4
    assert store.under_way == 0


async def test_with_stop_a_key_that_was_refused_is_not_asked_for_again() -> None:
    store = Store(Extension.NONE)
    store.set(b"0", HIGHER)
    with pytest.raises(WritesRefusedError):
        await write(many(store), [Write.set("0", str(n)) for n in range(5)], TOKEN, stop=True)
    assert [request[0] for request in store.requests] == [b"BATCH", b"SET"]


async def test_a_quota_is_of_single_keys_too(store: Store) -> None:
    store.engine.quotas = Quotas(1)
    with pytest.raises(WritesRefusedError) as raised:
        await write(many(store), [Write.set("a", "1"), Write.set("b", "1"), Write.set("a", "2")])
    assert isinstance(raised.value.first, QuotaExceededError)
    assert raised.value.applied == [True, False, True]


async def test_an_error_of_all_writes_is_raised_unchanged(store: Store) -> None:
    store.ahead_ms = 60_001
    with pytest.raises(ClockSkewError):
        await write(many(store), [Write.set("a", "1"), Write.set("b", "1")])
    assert store.engine.keys == 0


async def test_without_an_answer_nothing_more_is_begun_and_nothing_is_under_way(store: Store) -> None:
    store.away = b"3"
    with pytest.raises(UnavailableError):
        await write(many(store), [Write.set(b"%d" % n, b"v") for n in range(10_000)])
    assert store.under_way == 0
    assert store.engine.keys < 5000


async def test_an_answer_of_another_length_is_no_answer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: object, **__: object) -> tuple[bytes, None]:
        return b"*1\r\n+OK\r\n" if has_batch(store) else b"$-1\r\n", None

    monkeypatch.setattr(store, "call", answer)
    to = many(store)
    to._has_batch = has_batch(store)
    with pytest.raises(RemoteProtocolError, match=r"BATCH of 2 writes from 'a'|answer to a write was missing"):
        await write(to, [Write.set("a", "1"), Write.set("b", "1")])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Write.set("", "v"), "the key is empty"),
        (lambda: Write.delete(b""), "the key is empty"),
        (lambda: Write.vdelete("", "v"), "the key is empty"),
        (lambda: Write.set("k", "v", ttl_ms=0), "SET 'k': ttl_ms is 0"),
        (lambda: Write.set("k", "v", ttl_ms="5"), "SET 'k': ttl_ms is '5'"),  # type: ignore[arg-type] # misuse
        (lambda: Write.set("k", 5), "value is 5, expected bytes or str, not int"),  # type: ignore[arg-type] # misuse
        (lambda: Write.delete(None), "key is None, expected bytes or str"),  # type: ignore[arg-type] # misuse
    ],
)
def test_invalid_writes_are_never_sent(make: Any, error: str) -> None:
    with pytest.raises(LocalProtocolError, match=error):
        make()
