"""Where messages go: listeners, the callback, the iteration; the marks at which reading pauses."""

from __future__ import annotations

from penstock.mqtt.client.inbox import MAX_UNREAD, Inbox
from penstock.mqtt.codec.packets import Publish


class Reading:
    def __init__(self) -> None:
        self.calls: list[bool] = []

    def __call__(self, *, paused: bool) -> None:
        self.calls.append(paused)


def test_listeners_come_before_the_callback() -> None:
    reading = Reading()
    rest: list[Publish] = []
    heard: list[Publish] = []
    done: list[Publish] = []
    inbox = Inbox(rest.append, reading, done.append)
    remove = inbox.listen("a/#", heard.append)
    inbox.put(Publish("a/b"))
    inbox.put(Publish("z"))
    remove()
    remove()
    inbox.put(Publish("a/c"))
    assert ([m.topic for m in heard], [m.topic for m in rest]) == (["a/b"], ["z", "a/c"])


async def test_reading_pauses_at_the_mark_and_goes_on_at_half_of_it() -> None:
    reading = Reading()
    inbox = Inbox(None, reading, lambda _: None)
    for n in range(MAX_UNREAD):
        assert reading.calls == []
        inbox.put(Publish(str(n)))
    inbox.put(Publish("more"))
    assert (reading.calls, inbox.paused) == ([True], True)
    inbox.close(None)
    read = 0
    async for _ in inbox.messages():
        read += 1
        assert inbox.paused is (read <= MAX_UNREAD // 2)
    assert read == MAX_UNREAD + 1
    assert reading.calls == [True, False]
