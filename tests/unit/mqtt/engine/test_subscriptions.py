"""The filter tree finds what ``topics.matches`` says, for any filters and topics."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.codec.topics import filter_problem, matches
from penstock.mqtt.engine.routing.filter_tree import FilterTree

level = st.sampled_from(["a", "b", "", "$x", "+", "#"])
filters = st.lists(level, min_size=1, max_size=4).map("/".join).filter(lambda f: filter_problem(f) is None)
topics = st.lists(st.sampled_from(["a", "b", "", "$x"]), min_size=1, max_size=4).map("/".join).filter(bool)


@given(st.lists(filters, max_size=12), st.lists(filters, max_size=6), topics)
def test_lookups_agree_with_matches(added: list[str], removed: list[str], topic: str) -> None:
    tree: FilterTree[str] = FilterTree()
    kept: set[str] = set()
    values: dict[str, str] = {}
    for topic_filter in added:
        value = values.setdefault(topic_filter, topic_filter)
        assert tree.set(topic_filter, "owner", value) is (topic_filter not in kept)
        kept.add(topic_filter)
    for topic_filter in removed:
        assert tree.remove(topic_filter, "owner", values.get(topic_filter, "")) is (topic_filter in kept)
        kept.discard(topic_filter)
    assert len(tree) == len(kept)
    assert sorted(tree.match(topic)) == sorted(f for f in kept if matches(f, topic))


def test_owners_are_apart_and_values_replaced() -> None:
    tree: FilterTree[int] = FilterTree()
    assert tree.set("a/#", "x", 1)
    assert tree.set("a/#", "y", 2)
    assert not tree.set("a/#", "x", 3)
    assert sorted(tree.match("a")) == [2, 3]
    assert not tree.remove("a/#", "x", 1)
    assert tree.remove("a/#", "x", 3)
    assert not tree.remove("a/#", "x", 3)
    assert not tree.remove("never/was", "x", 3)
    assert tree.match("a/b/c") == [2]


def test_empty_levels_are_taken_down() -> None:
    tree: FilterTree[int] = FilterTree()
    for topic_filter in ("a/b/c", "a/+/#", "x"):
        tree.set(topic_filter, "o", 1)
    for topic_filter in ("a/b/c", "a/+/#", "x"):
        tree.remove(topic_filter, "o", 1)
    assert tree._root.empty()
