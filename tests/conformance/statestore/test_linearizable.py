"""Concurrent clients over real sockets: what they saw could have happened one request at a time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from penstock.runtime.io.files import Durability
from penstock.statestore.codec.commands import Extension
from penstock.statestore.hlc import Hlc, parse
from penstock.statestore.options import StoreOptions
from tests.conformance.statestore.linearizability import Operation, explains
from tests.conformance.statestore.node import PlainClient, StoreNode


class Choice(NamedTuple):
    """A request that a client may make."""

    words: tuple[bytes, ...]
    token: int | None = None
    prefix: bytes | None = None


def of(key: bytes) -> list[Choice]:
    """What is done to one key."""
    return [
        *(Choice((b"GET", key)), Choice((b"GET", key))),
        *(Choice((b"SET", key, b"a")), Choice((b"SET", key, b"b"))),
        *(Choice((b"SET", key, b"a", b"NX")), Choice((b"SET", key, b"b", b"NEX"))),
        *(Choice((b"DEL", key)), Choice((b"VDEL", key, b"a"))),
    ]


KEYS = [b"x", b"y"]
READS_OF_ALL = [Choice((b"MGET", *KEYS, b"z/1")), Choice((b"SCAN", b"*"))]
WRITES_OF_ALL = [
    Choice((b"BATCH", b"3", b"SET", b"x", b"a", b"4", b"SET", b"y", b"b", b"NX", b"3", b"SET", b"z/1", b"c")),
    Choice((b"BATCH", b"3", b"VDEL", b"x", b"a", b"2", b"DEL", b"y", b"3", b"SET", b"x", b"b")),
]
PLAIN = [choice for key in KEYS for choice in of(key)] + READS_OF_ALL + WRITES_OF_ALL
# Under z/ stands a floor sooner or later; fences of single keys come and go with them.
FENCED = [
    *(Choice((b"SET", b"z/1", b"v"), token) for token in (1, 2, 3)),
    *(Choice((b"SET", b"z/2", b"v"), token) for token in (None, 1, 3)),
    *(Choice((b"DEL", b"z/1"), token) for token in (None, 2, 3)),
    *(Choice((b"SET", b"x", b"v"), token, b"z/") for token in (1, 2)),
    *(Choice((b"GET", key)) for key in (b"x", b"z/1", b"z/2")),
    *(Choice((b"DEL", b"x"), token) for token in (1, 2)),
    *(Choice((b"BATCH", b"3", b"SET", b"x", b"v", b"3", b"SET", b"z/1", b"w"), token) for token in (1, 2, 3)),
    *READS_OF_ALL,
]


BOTH = (b"BATCH", b"3", b"SET", b"k", b"a", b"3", b"SET", b"j", b"a")


def op(asked: float, answered: float, words: str, answer: str, version: int | None = None) -> Operation:
    """An operation on the key ``k``; ``answer`` without its line end, a value behind ``$``."""
    verb, *rest = words.split()
    payload = f"${len(answer) - 1}\r\n{answer[1:]}\r\n" if answer[0] == "$" and answer != "$-1" else f"{answer}\r\n"
    return Operation(
        asked,
        answered,
        tuple(word.encode() for word in (verb, "k", *rest)),
        payload.encode(),
        None if version is None else (version, 0),
    )


def test_the_checker_finds_an_order_where_there_is_one() -> None:
    # Both writes overlap; the read between them in time saw the one that was asked later.
    assert explains([op(0, 9, "SET a", "+OK", 2), op(1, 8, "SET b", "+OK", 1), op(2, 3, "GET", "$b", 1)])
    assert explains([op(0, 1, "SET a NX", "+OK", 1), op(2, 3, "VDEL a", ":1"), op(4, 5, "GET", "$-1")])
    assert explains([])
    both = Operation(0, 9, BOTH, b"*2\r\n+OK\r\n+OK\r\n", (2, 1))
    assert explains([both, Operation(1, 2, (b"GET", b"j"), b"$1\r\na\r\n", (2, 1))])


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
        # A page of names without one that was there all the time.
        [op(0, 1, "SET a", "+OK", 1), Operation(2, 3, (b"SCAN", b"*"), b"*1\r\n*0\r\n")],
        # Several keys that were never so at one time: k is read after its delete, j before its write.
        [
            *(op(0, 1, "SET a", "+OK", 1), op(2, 3, "DEL", ":1")),
            Operation(4, 5, (b"SET", b"j", b"a"), b"+OK\r\n", (3, 0)),
            Operation(
                2,
                9,
                (b"MGET", b"k", b"j"),
                b"*4\r\n$1\r\na\r\n$14\r\n1:0:StateStore\r\n$1\r\na\r\n$14\r\n3:0:StateStore\r\n",
                (3, 0),
            ),
        ],
        # Of two keys written by one request only one is seen.
        [
            Operation(0, 9, BOTH, b"*2\r\n+OK\r\n+OK\r\n", (2, 1)),
            Operation(1, 2, (b"GET", b"k"), b"$1\r\na\r\n", (1, 1)),
            Operation(3, 4, (b"GET", b"j"), b"$-1\r\n"),
        ],
        # A write under a lower token than the one before it.
        [
            Operation(0, 1, (b"SET", b"k", b"a"), b"+OK\r\n", (1, 0), token=2),
            Operation(2, 3, (b"SET", b"k", b"b"), b"+OK\r\n", (2, 0), token=1),
        ],
        # A zombie creates a key under a prefix that was fenced before it asked.
        [
            Operation(0, 1, (b"SET", b"lock", b"a"), b"+OK\r\n", (1, 0), token=2, prefix=b"out/"),
            Operation(2, 3, (b"SET", b"out/1", b"b"), b"+OK\r\n", (2, 0), token=1),
        ],
    ],
)
def test_the_checker_refuses_what_cannot_be(history: list[Operation]) -> None:
    assert not explains(history)


@pytest.mark.parametrize("durability", [Durability.FLUSHED, Durability.MEMORY])
@pytest.mark.parametrize(("choices", "seed"), [(PLAIN, 1), (PLAIN, 2), (FENCED, 3)], ids=["plain", "plain2", "fenced"])
async def test_concurrent_histories_are_linearizable(
    tmp_path: Path, durability: Durability, choices: list[Choice], seed: int
) -> None:
    options = StoreOptions(extensions=Extension.SCAN | Extension.MGET | Extension.PREFIX_FENCE | Extension.BATCH)
    node = StoreNode(tmp_path / "store", durability, options)
    await node.start()
    history: list[Operation] = []

    async def work(number: int) -> None:
        random = Random(f"{seed}-{number}")
        async with PlainClient(node, f"client-{number}") as client:
            for _ in range(40):
                choice = random.choice(choices)
                token = None if choice.token is None else Hlc(choice.token, 0, "n")
                extra = [] if choice.prefix is None else [("__fencePrefix", choice.prefix.decode())]
                asked = time.monotonic()
                answer = await client.ask(choice.words, ft=token, extra=extra)
                answered = time.monotonic()
                version = parse(answer.properties.user_property("__ts") or "")
                told = None if version is None else (version.wall_ms, version.counter)
                history.append(
                    Operation(asked, answered, choice.words, answer.payload, told, choice.token, choice.prefix)
                )

    await asyncio.gather(*(work(number) for number in range(6)))
    await node.close()
    assert len(history) == 240
    assert explains(history), sorted(history)
