from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.demo.run import chaos


class Meter:
    """Sends one message whenever it is looked at, unless it holds."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.acknowledged: list[str] = []
        self.holding = False

    def hold(self) -> None:
        self.holding = True

    def release(self) -> None:
        self.holding = False

    def tick(self) -> None:
        if not self.holding:
            self.sent.append("x")
            self.acknowledged.append("x")


async def test_both_are_killed_once_while_messages_flow() -> None:
    meter: Any = Meter()
    story, batches = list[tuple[str, int]](), [0]

    async def reached(condition: Callable[[], bool], _text: str) -> None:
        for _ in range(1000):
            if condition():
                return
            meter.tick()
            if meter.holding and story[-1:] != [("kill driver", 40)]:
                batches[0] += 1
            await asyncio.sleep(0)
        raise AssertionError

    def act(name: str) -> Callable[[], asyncio.Future[None]]:
        async def done() -> None:
            story.append((name, len(meter.sent)))

        return lambda: asyncio.ensure_future(done())

    async def restart_driver() -> None:
        await asyncio.sleep(0)
        story.append(("restart driver", len(meter.sent)))
        batches[0] += 1

    await chaos(
        meter,
        100,
        reached=reached,
        batches=lambda: batches[0],
        kill_driver=act("kill driver"),
        restart_driver=restart_driver,
        kill_node=act("kill node"),
        restart_node=act("restart node"),
    )
    assert [name for name, _ in story] == ["kill driver", "restart driver", "kill node", "restart node"]
    assert story[0] == ("kill driver", 40)
    assert story[2][1] == 75
    assert not meter.holding
