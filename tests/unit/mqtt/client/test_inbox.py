"""Delivery of messages to listeners, the callback and the iteration; the limits at which reading pauses."""

from __future__ import annotations

from penstock.mqtt.client.inbox import FIRST_IDENTIFIER, MAX_UNREAD, Inbox, StreamIdentifiers
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties


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


async def test_reading_pauses_at_the_limit_and_resumes_at_half_of_it() -> None:
    reading = Reading()
    inbox = Inbox(None, reading, lambda _: None)
    for n in range(MAX_UNREAD):
        assert reading.calls == []
        inbox.put(Publish(str(n)))
    inbox.put(Publish("more"))
    assert (reading.calls, inbox.paused) == ([True], True)
    inbox.close(None)
    read = 0
    async for _ in inbox.unread:
        read += 1
        assert inbox.paused is (read <= MAX_UNREAD // 2)
    assert read == MAX_UNREAD + 1
    assert reading.calls == [True, False]


async def test_a_message_of_several_streams_is_done_when_all_of_them_are() -> None:
    done: list[Publish] = []
    inbox = Inbox(None, Reading(), done.append)
    first, close_first = inbox.open_stream([("a/+", None)])
    second, close_second = inbox.open_stream([("#", None)])
    message, other = Publish("a/b", b"", 1, packet_id=1), Publish("z", b"", 2, packet_id=2)
    inbox.put(message)
    inbox.put(other)
    assert await anext(first) is message
    assert await anext(second) is message
    assert await anext(second) is other
    assert done == []
    first.acknowledge_current()
    first.acknowledge_current()
    assert done == [message]
    close_first()
    close_second()
    assert done == [message, other]


async def test_streams_by_identifier_get_what_the_server_says() -> None:
    inbox = Inbox(None, Reading(), lambda _: None)
    exact, close = inbox.open_stream([("$share/g/a", 7)])
    inbox.put(Publish("a", b"mine", properties=Properties(subscription_identifiers=[7, 7])))
    inbox.put(Publish("a", b"not mine", properties=Properties(subscription_identifiers=[8])))
    assert (len(exact), len(inbox.unread)) == (1, 1)
    close()
    inbox.put(Publish("a", b"late", properties=Properties(subscription_identifiers=[7])))
    assert len(inbox.unread) == 2


async def test_qos_0_is_dropped_beyond_the_hard_limit_and_counted() -> None:
    inbox = Inbox(None, Reading(), lambda _: None, high_water=2)
    for n in range(25):
        inbox.put(Publish(str(n)))
    assert (len(inbox.unread), inbox.dropped, inbox.unread.dropped) == (20, 5, 5)
    inbox.put(Publish("kept", b"", 1, packet_id=1))
    assert len(inbox.unread) == 21, "QoS 1 is bounded by Receive Maximum, not here"


def test_one_for_all_streams_of_a_filter() -> None:
    streams = StreamIdentifiers()
    assert [streams.acquire(topic_filter) for topic_filter in ("a", "b", "a")] == [
        FIRST_IDENTIFIER,
        FIRST_IDENTIFIER + 1,
        FIRST_IDENTIFIER,
    ]
    assert [streams.release("a"), streams.release("b"), streams.release("a")] == [False, True, True]
    assert streams.acquire("a") == FIRST_IDENTIFIER + 2, "a late message of the old stream is not the new one's"
