"""Runs: what comes in a row is the same whether it is decoded together or packet by packet."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.decoder import Decoded, Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Packet, PingReq, PubAck, Publish, PubRel
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.runs import LONGEST_RUN, PubAckRun, PublishRun
from penstock.mqtt.codec.version311 import encode_311

CONSTANT = Properties(content_type="text/plain", user_properties=[("a", "b")])


def run_decoder(largest: int = 1 << 20, version: int = 5) -> Decoder:
    decoder = Decoder(largest, role=Role.SERVER, version=version)
    decoder.runs = True
    return decoder


def single(decoded: Iterable[Decoded]) -> list[Packet]:
    """The packets of the runs, one by one."""
    packets: list[Packet] = []
    for item in decoded:
        if isinstance(item, PublishRun):
            packets += item
        elif isinstance(item, PubAckRun):
            packets += [PubAck(packet_id) for packet_id in item.packet_ids]
        else:
            assert not isinstance(item, tuple), "nobody takes these"
            packets.append(item)
    return packets


def whole(packets: list[Packet]) -> list[object]:
    return [
        (p, p.topic_wire, p.properties_wire, p.retain, p.dup, p.packet_id) if isinstance(p, Publish) else p
        for p in packets
    ]


def publishes(
    count: int, sizes: tuple[int, ...] = (8,), qos: int = 1, properties: Properties | None = None
) -> list[Publish]:
    return [
        Publish("t/é", bytes(sizes[n % len(sizes)]), qos, packet_id=n + 1 if qos else 0, properties=properties)
        for n in range(count)
    ]


@pytest.mark.parametrize("sizes", [(8,), (8, 9), (500, 200, 9_000), (20_000, 1)], ids=str)
@pytest.mark.parametrize("properties", [None, CONSTANT], ids=["plain", "properties"])
@pytest.mark.parametrize("qos", [0, 1])
def test_messages_in_a_row_are_one_run(qos: int, properties: Properties | None, sizes: tuple[int, ...]) -> None:
    sent = publishes(7, sizes, qos, properties)
    data = b"".join(map(encode, sent))
    found = run_decoder().decode(data)
    runs = [item for item in found if isinstance(item, PublishRun)]
    assert single(found) == sent
    if len(sizes) == 1 or 20_000 not in sizes:
        (run,) = runs
        assert (len(run), run.packet_ids, run.wire) == (7, list(range(1, 8)) if qos else [], data)
        assert (run.stride > 0) is (len(sizes) == 1)
        if qos:
            places = run.places or [run.offset + n * run.stride for n in range(7)]
            assert [data[place] << 8 | data[place + 1] for place in places] == run.packet_ids


def test_a_run_of_mqtt_311() -> None:
    sent = publishes(5)
    (run,) = run_decoder(version=4).decode(b"".join(map(encode_311, sent)))
    assert isinstance(run, PublishRun)
    assert single([run]) == sent


def test_a_run_is_bounded() -> None:
    found = run_decoder().decode(b"".join(map(encode, publishes(LONGEST_RUN + 3))))
    assert [len(run) for run in found if isinstance(run, PublishRun)] == [LONGEST_RUN, 3]
    found = run_decoder().decode(b"".join(map(encode, publishes(LONGEST_RUN + 3, (1, 2)))))
    assert [len(run) for run in found if isinstance(run, PublishRun)] == [LONGEST_RUN, 3]


@pytest.mark.parametrize(
    "other",
    [
        Publish("t/é", bytes(8), 1, packet_id=9, dup=True),
        Publish("t/é", bytes(8), 1, packet_id=9, retain=True),
        Publish("t/é", bytes(8), 2, packet_id=9),
        Publish("t/é", bytes(10)),
        Publish("t/ü", bytes(8), 1, packet_id=9),
        Publish("t/é", bytes(1), 1, packet_id=9, properties=CONSTANT),
        PubAck(9),
        PingReq(),
    ],
    ids=repr,
)
def test_a_run_ends_before_another_packet(other: Packet) -> None:
    sent: list[Packet] = [*publishes(3), other, *publishes(2)]
    found = run_decoder().decode(b"".join(map(encode, sent)))
    assert [len(item) if isinstance(item, PublishRun) else 1 for item in found] == [3, 1, 2]
    assert single(found) == sent


def test_acknowledgements_in_a_row_are_one_run() -> None:
    ids = [*range(1, 20), 65_535]
    data = b"".join(encode(PubAck(n)) for n in ids) + encode(PubRel(7)) + encode(PubAck(3))
    run, released, alone = run_decoder().decode(data)
    assert isinstance(run, PubAckRun)
    assert (run.packet_ids, len(run), released, alone) == (ids, 20, PubRel(7), PubAck(3))


@pytest.mark.parametrize("position", [0, 1, 7, 8, 9])
def test_an_acknowledgement_with_a_reason_or_without_identifier_stands_alone(position: int) -> None:
    before, after = [PubAck(n + 1) for n in range(position)], [PubAck(n + 100) for n in range(9)]
    failed: list[Packet] = [*before, PubAck(50, 0x80), *after]
    assert single(run_decoder().decode(b"".join(map(encode, failed)))) == failed
    decoder = run_decoder()
    data = b"".join(map(encode, before)) + b"\x40\x02\x00\x00" + b"".join(map(encode, after))
    with nullcontext() if before else pytest.raises(RemoteProtocolError):
        assert single(decoder.decode(data)) == before
    assert decoder.error is not None
    assert decoder.error.reason_code == 0x82


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(8,), (8, 9)], ids=str)
def test_a_bad_message_in_a_row_is_refused_after_those_before_it(count: int, sizes: tuple[int, ...]) -> None:
    sent = publishes(count, sizes)
    decoder = run_decoder()
    no_identifier = bytearray(encode(publishes(1)[0]))
    no_identifier[9] = 0
    assert single(decoder.decode(b"".join(map(encode, sent)) + no_identifier + encode(sent[0]))) == sent
    assert decoder.error is not None
    assert decoder.error.reason_code == 0x82


def test_a_message_above_the_limit_is_refused_within_a_row_too() -> None:
    sent = publishes(3, (8, 9, 300))
    decoder = run_decoder(largest=200)
    assert single(decoder.decode(b"".join(map(encode, sent)))) == sent[:2]
    assert decoder.error is not None
    assert decoder.error.reason_code == 0x95


_messages = st.builds(
    lambda topic, size, qos, flags, packet_id, given_properties: Publish(
        topic,
        bytes(size),
        qos,
        retain=flags == 1,
        dup=flags == 2 and qos > 0,
        packet_id=packet_id if qos else 0,
        properties=given_properties,
    ),
    st.sampled_from(["a", "b/c"]),
    st.sampled_from([0, 4, 4, 4, 130]),
    st.sampled_from([0, 1, 1, 1, 2]),
    st.sampled_from([0, 0, 0, 0, 1, 2]),
    st.integers(1, 65_535),
    st.sampled_from([None, None, CONSTANT]),
)
_packets = st.one_of(_messages, st.builds(PubAck, st.integers(1, 65_535)), st.just(PingReq()))
_pieces = st.lists(st.tuples(_packets, st.integers(1, 12)), max_size=8)


@given(pieces=_pieces, cuts=st.lists(st.integers(0, 4_000), max_size=4), broken=st.binary(max_size=6))
def test_together_or_one_by_one_is_the_same(pieces: list[tuple[Packet, int]], cuts: list[int], broken: bytes) -> None:
    data = b"".join(encode(packet) * times for packet, times in pieces) + broken
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    plain, together = Decoder(role=Role.SERVER), run_decoder()
    one_by_one: list[Packet] = []
    in_runs: list[Packet] = []
    for begin, end in pairwise(edges):
        for decoder, found in ((plain, one_by_one), (together, in_runs)):
            if decoder.error is None:
                with suppress(RemoteProtocolError):
                    found += single(decoder.decode(data[begin:end]))  # noqa: PLW2901 - the same list, longer
    assert whole(in_runs) == whole(one_by_one)
    assert getattr(plain.error, "reason_code", 0) == getattr(together.error, "reason_code", 0)
