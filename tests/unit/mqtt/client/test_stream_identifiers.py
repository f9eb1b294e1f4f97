"""All streams of a filter have one identifier, which goes with the last of them."""

from __future__ import annotations

from penstock.mqtt.client.stream_identifiers import FIRST_IDENTIFIER, StreamIdentifiers


def test_one_for_all_streams_of_a_filter() -> None:
    streams = StreamIdentifiers()
    assert [streams.take(topic_filter) for topic_filter in ("a", "b", "a")] == [
        FIRST_IDENTIFIER,
        FIRST_IDENTIFIER + 1,
        FIRST_IDENTIFIER,
    ]
    assert [streams.drop("a"), streams.drop("b"), streams.drop("a")] == [False, True, True]
    assert streams.take("a") == FIRST_IDENTIFIER + 2, "a late message of the old stream is not the new one's"
