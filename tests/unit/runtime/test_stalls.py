"""An event loop that did not run: it is noticed, and what waited in sockets is read before silence is judged."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import weakref
from collections.abc import Callable

import pytest

from penstock.runtime.io.loop import BEAT_S, MAX_GRACE_S, STALL_S, StallWatch, after_reading, loop_factory, watch_stalls


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_stall_gives_a_grace_of_its_length_and_of_a_minute_at_most() -> None:
    clock = Time()
    watch = StallWatch(asyncio.get_running_loop(), clock)
    graces: list[int] = []
    watch.add(graces.append)
    for step, found in ((BEAT_S, []), (STALL_S - 0.1 - BEAT_S, []), (3.0, [4400]), (0.0, [])):
        clock.now += step
        watch.look()
        assert graces == found
        graces.clear()
    clock.now += 3600
    watch.look()
    watch.look()
    assert graces == [MAX_GRACE_S * 1000]
    assert watch.stalls == 2
    watch.remove(graces.append)
    watch.remove(graces.append)
    clock.now += 3600
    watch.look()
    assert watch.stalls == 2, "nobody wants to know"


async def test_the_servers_of_a_loop_share_a_watch() -> None:
    one: list[int] = []
    two: list[int] = []
    watch = watch_stalls(one.append)
    assert watch_stalls(two.append) is watch
    watch.remove(one.append)
    watch.remove(two.append)


def test_a_watch_does_not_keep_a_closed_loop() -> None:
    stalls: list[int] = []

    async def main() -> tuple[weakref.ref[object], StallWatch]:
        return weakref.ref(asyncio.get_running_loop()), watch_stalls(stalls.append)

    loop, watch = asyncio.run(main())
    del watch
    gc.collect()
    assert loop() is None


@pytest.mark.parametrize(
    "factory", [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(loop_factory(), id="usual")]
)
def test_pending_input_is_read_before_an_expired_deadline(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        order: list[str] = []
        done = asyncio.Event()

        class Reader(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                order.append(f"read {data!r}")

        transport, _ = await loop.create_connection(Reader, sock=ours)

        def judge() -> None:
            order.append("judge")
            done.set()

        loop.call_later(0.005, after_reading, loop, judge)
        theirs.send(b"ping")
        time.sleep(0.02)  # noqa: ASYNC251 - the loop does not run
        async with asyncio.timeout(60):
            await done.wait()
        transport.close()
        theirs.close()
        return order

    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(main()) == ["read b'ping'", "judge"]
