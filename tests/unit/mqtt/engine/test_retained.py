"""Retained messages: found by filter, bounded, deleted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.topics import matches
from penstock.mqtt.engine.model.message import Message, message_of
from penstock.mqtt.engine.sessions.retained import Retained
from tests.unit.mqtt.engine.test_subscriptions import filters, topics


def message(topic: str, payload: bytes = b"x", expiry: int | None = None) -> Message:
    return message_of(Publish(topic, payload, properties=Properties(message_expiry_interval=expiry)), 0)


def match(retained: Retained, topic_filter: str, now: int) -> list[Message]:
    search = retained.search(topic_filter)
    found: list[Message] = []
    while not search.done:
        found += search.find(1, now)
    return found


@given(st.lists(topics, max_size=10, unique=True), st.lists(topics, max_size=5), filters)
def test_lookups_agree_with_matches(stored: list[str], deleted: list[str], topic_filter: str) -> None:
    retained = Retained(100, 100_000)
    for topic in stored:
        assert retained.store(topic, message(topic))
    for topic in deleted:
        assert retained.store(topic, message(topic, b""))
    kept = set(stored) - set(deleted)
    found = [m.topic for m in match(retained, topic_filter, 0)]
    assert sorted(found) == sorted(t for t in kept if matches(topic_filter, t))
    assert retained.count == len(kept)
    for topic in kept:
        retained.store(topic, message(topic, b""))
    assert (retained.count, retained.bytes, retained._root.children) == (0, 0, {})


def test_limits() -> None:
    retained = Retained(2, 600)
    assert retained.store("a", message("a"))
    assert retained.store("b", message("b"))
    assert not retained.store("c", message("c"))
    assert retained.store("a", message("a", b"y" * 50)), "replacing takes no new place"
    assert not retained.store("b", message("b", b"y" * 50)), "bytes: 2 x (4 + 50) + 2 levels"
    assert retained.get("b") is not None
    assert retained.get("b/c") is None


def test_expired_ones_make_room() -> None:
    retained = Retained(2, 10_000)
    retained.store("a", message("a", expiry=1))
    retained.store("b", message("b", expiry=60))
    late = [message_of(Publish(topic, b"x"), now) for topic, now in (("c", 1_000), ("d", 1_001), ("e", 2_001))]
    assert not retained.store("c", late[0])
    assert retained.store("d", late[1]), "nobody had asked for a"
    assert not retained.store("e", late[2]), "not before b expires"
    assert [m.topic for m in match(retained, "#", 2_001)] == ["b", "d"]


def test_messages_that_expire_one_by_one_do_not_cost_a_walk_each() -> None:
    retained = Retained(3, 10_000)
    for n, name in enumerate("abc"):
        retained.store(name, message_of(Publish(name, b"x", properties=Properties(message_expiry_interval=1)), n * 100))

    def keep(topic: str, now: int) -> bool:
        return retained.store(topic, message_of(Publish(topic, b"x"), now))

    assert keep("d", 1_001), "a is gone"
    assert not keep("e", 1_101), "b is, and nobody has looked since"
    assert not keep("e", 2_000)
    assert keep("e", 2_001)


def test_a_deep_topic_counts_with_its_levels() -> None:
    retained = Retained(10, 5_000)
    deep = "/".join("x" * 20)
    assert not retained.store(deep, message(deep))
    assert retained._root.children == {}
    assert retained.store("x", message("x"))


def test_expired_ones_go_when_met() -> None:
    retained = Retained(10, 10_000)
    retained.store("a", message("a", expiry=1))
    assert len(match(retained, "a", 1000)) == 1
    assert match(retained, "a", 1001) == []
    assert retained.count == 0


def test_a_search_visits_no_more_levels_than_allowed_at_a_time() -> None:
    retained = Retained(1_000, 1_000_000)
    for n in range(300):
        retained.store(f"plant/{n}/flow", message(f"plant/{n}/flow"))
    search = retained.search("#")
    steps = []
    while not search.done:
        steps.append(len(search.find(50, 0)))
    assert sum(steps) == 300
    assert max(steps) <= 50


def test_a_message_stored_during_a_search_is_not_found() -> None:
    retained = Retained(10, 10_000)
    for topic in "abc":
        retained.store(topic, message(topic))
    search = retained.search("+")
    assert [m.topic for m in search.find(2, 0)] == ["a"]
    retained.store("b", message("b", b"replaced"))
    retained.store("c", message("c", b""))
    retained.store("d", message("d"))
    assert search.find(10, 0) == []
    assert search.done
