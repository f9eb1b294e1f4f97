"""Concurrent clients over real sockets: what they saw could have happened one request at a time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random

import pytest

from penstock.runtime.durability import Durability
from penstock.statestore.hlc import parse
from tests.conformance.statestore.linearizability import Operation, explains
from tests.conformance.statestore.node import PlainClient, StoreNode

CHOICES: list[tuple[bytes, ...]] = [
    (b"GET",),
    (b"GET",),
    (b"SET", b"a"),
    (b"SET", b"b"),
    (b"SET", b"a", b"NX"),
    (b"SET", b"b", b"NEX"),
    (b"DEL",),
    (b"VDEL", b"a"),
]


def op(asked: float, answered: float, words: str, answer: str, version: int | None = None) -> Operation:
    return Operation(
        asked,
        answered,
        tuple(word.encode() for word in words.split()),
        answer.encode(),
        None if version is None else (version, 0),
    )


def test_the_checker_finds_an_order_where_there_is_one() -> None:
    # Both writes overlap; the read between them in time saw the one that was asked later.
    assert explains([op(0, 9, "SET a", "+OK", 2), op(1, 8, "SET b", "+OK", 1), op(2, 3, "GET", "$b", 1)])
    assert explains([op(0, 1, "SET a NX", "+OK", 1), op(2, 3, "VDEL a", ":1"), op(4, 5, "GET", "$-1")])
    assert explains([])


@pytest.mark.parametrize(
    "history",
    [
        # A read that began after the write had been answered misses it.
        [op(0, 1, "SET a", "+OK", 1), op(2, 3, "GET", "$-1")],
        # A value comes back after a newer one was read.
        [
            *(op(0, 9, "SET a", "+OK", 1), op(0, 9, "SET b", "+OK", 2)),
            *(op(1, 2, "GET", "$b", 2), op(3, 4, "GET", "$a", 1)),
        ],
        # Two clients get one lock.
        [op(0, 5, "SET a NX", "+OK", 1), op(1, 6, "SET b NX", "+OK", 2)],
        # A later write has a lower version.
        [op(0, 1, "SET a", "+OK", 2), op(2, 3, "SET b", "+OK", 1)],
        # Two deletes of one key.
        [op(0, 1, "SET a", "+OK", 1), op(2, 9, "DEL", ":1"), op(2, 9, "DEL", ":1")],
    ],
)
def test_the_checker_refuses_what_cannot_be(history: list[Operation]) -> None:
    assert not explains(history)


@pytest.mark.parametrize("durability", [Durability.FLUSHED, Durability.MEMORY])
@pytest.mark.parametrize("seed", [1, 2])
async def test_concurrent_histories_are_linearizable(tmp_path: Path, durability: Durability, seed: int) -> None:
    node = StoreNode(tmp_path / "store", durability)
    await node.start()
    histories: dict[bytes, list[Operation]] = {b"x": [], b"y": []}

    async def work(number: int) -> None:
        random = Random(f"{seed}-{number}")
        async with PlainClient(node, f"client-{number}") as client:
            for _ in range(40):
                key = random.choice([b"x", b"y"])
                verb, *rest = words = random.choice(CHOICES)
                asked = time.monotonic()
                answer = await client.ask([verb, key, *rest])
                answered = time.monotonic()
                line, _, body = answer.payload.partition(b"\r\n")
                if line.startswith(b"$") and line != b"$-1":
                    line = b"$" + body.removesuffix(b"\r\n")
                version = parse(answer.properties.user_property("__ts") or "")
                told = None if version is None else (version.wall_ms, version.counter)
                histories[key].append(Operation(asked, answered, tuple(words), line, told))

    await asyncio.gather(*(work(number) for number in range(6)))
    await node.close()
    assert sum(map(len, histories.values())) == 240
    for key, history in histories.items():
        assert explains(history), (key, sorted(history))
