"""The lane to one partition, whose retries never reorder."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.tube.codec.strings import BrokerInfo, Partition
from penstock.tube.engine.client.producer_state import PartitionQueue

TARGET = Partition(BrokerInfo(1, "h", 1), "demo", 0)


class Item:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.sequence = -1
        self.abandoned = False

    def __repr__(self) -> str:
        return self.data.decode()


def lane_of(text: str, **options: Any) -> tuple[PartitionQueue[Item], list[Item]]:
    lane: PartitionQueue[Item] = PartitionQueue(TARGET, **{"requests": 9, **options})
    items = [Item(letter.encode()) for letter in text]
    for item in items:
        lane.push(item)
    return lane, items


def ready(lane: PartitionQueue[Item]) -> tuple[int, str] | None:
    """The next request: its number and its messages as one text."""
    found = lane.ready()
    return None if found is None else (found[0], "".join(map(repr, found[1])))


def texts(outcome: tuple[list[Item], list[Item]] | None) -> tuple[str, str] | None:
    return None if outcome is None else ("".join(map(repr, outcome[0])), "".join(map(repr, outcome[1])))


def test_lane_sends_in_order_within_its_window() -> None:
    lane, _ = lane_of("abc", requests=2)
    assert ready(lane) == (1, "a")
    assert ready(lane) == (2, "b")
    assert ready(lane) is None
    assert [item.data for item in lane.succeeded(1)] == [b"a"]
    assert ready(lane) == (3, "c")
    assert len(lane) == 2
    assert repr(lane.messages()) == "[b, c]"


def test_batches_hold_so_many_messages_and_bytes() -> None:
    lane, _ = lane_of("abcdefg", batch=(3, 100))
    assert ready(lane) == (1, "abc")
    lane.batch = (9, 2)
    assert ready(lane) == (2, "de")
    lane.batch = (9, 0)
    assert ready(lane) == (3, "f"), "one always goes"


def test_lane_holds_back_after_a_failure_and_sends_again_in_order() -> None:
    lane, _ = lane_of("abcd")
    for _ in range(3):
        lane.ready()
    lane.succeeded(1)
    lane.failed(3)
    assert ready(lane) is None
    assert lane.retries() is None, "b is in flight"
    lane.failed(2)
    assert texts(lane.retries()) == ("bc", "")
    assert [item[1] for item in iter(lambda: ready(lane), None)] == ["b", "c", "d"]


def test_lane_gives_up_what_was_overtaken_unless_order_does_not_matter() -> None:
    for reorder, expected in ((False, ("c", "a")), (True, ("ac", ""))):
        lane, _ = lane_of("abc", reorder=reorder)
        for _ in range(3):
            lane.ready()
        lane.failed(1)
        lane.succeeded(2)
        lane.failed(3)
        assert texts(lane.retries()) == expected


def test_waiting_messages_can_leave() -> None:
    lane, items = lane_of("abc")
    items[1].abandoned = True
    assert ready(lane) == (1, "a")
    assert ready(lane) == (2, "c")
    assert lane.abandoned == [items[1]]
    lane, items = lane_of("abc")
    assert lane.remove_waiting(lambda item: item.data != b"b") == [items[0], items[2]]
    assert lane.refused(1) == lane.failed(1) == lane.succeeded(1) == []
    assert len(lane) == 1


def test_numbered_messages_keep_their_numbers_and_stay() -> None:
    lane, items = lane_of("abcd", batch=(2, 100), new_producer_id=lambda: 7)
    assert ready(lane) == (1, "ab")
    assert ready(lane) == (2, "cd")
    assert (lane.producer_id, lane.oldest_sequence) == (7, 0)
    lane.succeeded(2)
    lane.failed(1)
    assert texts(lane.retries()) == ("ab", ""), "the broker puts them where they belong"
    items[0].abandoned = True
    assert lane.remove_waiting(lambda _: True) == [], "they may be stored already"
    assert lane.numbered() == items[:2]
    assert ready(lane) == (3, "ab")
    assert [item.sequence for item in items] == [0, 1, 2, 3]
    assert lane.oldest_sequence == 0


def test_after_a_refusal_numbers_begin_anew() -> None:
    ids = itertools.count(7)
    lane, items = lane_of("abc", new_producer_id=lambda: next(ids))
    for _ in range(3):
        lane.ready()
    lane.refused(1)
    assert ready(lane) is None
    lane.failed(2)
    lane.failed(3)
    assert texts(lane.retries()) == ("bc", "")
    lane.push(Item(b"d"))
    assert [item[1] for item in iter(lambda: ready(lane), None)] == ["b", "c", "d"]
    assert lane.producer_id == 8
    assert [item.sequence for item in items[1:]] == [0, 1]


@given(st.data(), st.integers(1, 12), st.integers(1, 5), st.integers(1, 3))
def test_retries_never_change_the_order_in_the_log(data: st.DataObject, count: int, requests: int, batch: int) -> None:
    """Outcomes come in any order and fail at random, also after the message was stored (the answer was lost)."""
    lane: PartitionQueue[Item] = PartitionQueue(TARGET, requests=requests, batch=(batch, 1000))
    log: list[int] = []
    given_up: set[int] = set()
    for message in range(count):
        lane.push(Item(b"%d" % message))
    flight: dict[int, list[int]] = {}
    for _ in range(count * 20):
        while (item := lane.ready()) is not None:
            flight[item[0]] = [int(message.data) for message in item[1]]
        if not flight:
            break
        number = min(flight)  # a connection's requests are carried out in order
        messages = flight.pop(number)
        outcome = data.draw(st.sampled_from(["stored", "refused", "lost before", "lost after"]))
        if outcome in {"stored", "lost after"}:
            log += messages
        if outcome == "stored":
            lane.succeeded(number)
        else:
            lane.failed(number)
        if (again := lane.retries()) is not None:
            given_up |= {int(message.data) for message in again[1]}
    last = {message: place for place, message in enumerate(log)}
    stored = [message for message in sorted(last) if message not in given_up]
    assert stored == sorted(stored, key=lambda message: last[message])


class Log:
    """A broker's side of one partition: stores each number of a producer once, and in order."""

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.next: dict[int, int] = {}

    def store(self, producer: int, first: int, oldest: int, messages: list[int]) -> bool:
        expected = self.next.get(producer, oldest)
        if first > expected:
            return False
        self.messages += messages[expected - first :]
        self.next[producer] = max(expected, first + len(messages))
        return True


@given(st.data(), st.integers(1, 12), st.integers(1, 5), st.integers(1, 3))
def test_numbered_messages_are_stored_once_and_in_order(
    data: st.DataObject, count: int, requests: int, batch: int
) -> None:
    lane: PartitionQueue[Item] = PartitionQueue(
        TARGET, requests=requests, batch=(batch, 1000), new_producer_id=lambda: 5
    )
    log = Log()
    for message in range(count):
        lane.push(Item(b"%d" % message))
    flight: dict[int, tuple[int, int, list[Item]]] = {}
    for _ in range(count * 40):
        while (item := lane.ready()) is not None:
            flight[item[0]] = (item[1][0].sequence, lane.oldest_sequence, item[1])
        if not flight:
            break
        number = min(flight)
        first, oldest, messages = flight.pop(number)
        outcome = data.draw(st.sampled_from(["stored", "lost before", "lost after"]))
        stored = outcome != "lost before" and log.store(
            lane.producer_id, first, oldest, [int(message.data) for message in messages]
        )
        if stored and outcome == "stored":
            lane.succeeded(number)
        else:
            lane.failed(number)
        lane.retries()
    assert log.messages == list(range(len(log.messages)))
    assert len(log.messages) == count or not lane.empty
