"""Every state of a connection combined with every packet: the answer is as specified, other clients are unaffected."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    Subscription,
    UnsubAck,
    Unsubscribe,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.version311 import encode_311
from tests.engine.mqtt.harness import Bench, Peer
from tests.engine.mqtt.test_access import Exchange, Gate

PACKETS: dict[str, Packet] = {
    "CONNECT": Connect("c"),
    "CONNACK": ConnAck(),
    "PUBLISH q0": Publish("a", b"x"),
    "PUBLISH q1": Publish("a", b"x", 1, packet_id=1),
    "PUBLISH q2": Publish("a", b"x", 2, packet_id=2),
    "PUBACK": PubAck(1),
    "PUBREC": PubRec(1),
    "PUBREL": PubRel(1),
    "PUBCOMP": PubComp(1),
    "SUBSCRIBE": Subscribe(1, [Subscription("a")]),
    "SUBACK": SubAck(1, [0]),
    "UNSUBSCRIBE": Unsubscribe(1, ["a"]),
    "UNSUBACK": UnsubAck(1, [0]),
    "PINGREQ": PingReq(),
    "PINGRESP": PingResp(),
    "DISCONNECT": Disconnect(),
    "AUTH": Auth(0x18, Properties(authentication_method="M", authentication_data=b"bad")),
}

CLOSE = "closed"
HELD = "held"
"""It waits for the decision about CONNECT."""


def refused(code: int) -> str:
    return f"CONNACK 0x{code:02X}, closed"


def ended(code: int) -> str:
    return f"DISCONNECT 0x{code:02X}, closed"


def opened(bench: Bench) -> Peer:
    return bench.open()


def deciding(bench: Bench) -> Peer:
    return bench.open().send(Connect("c"))


def challenged(bench: Bench) -> Peer:
    peer = bench.open().send(Connect("c", properties=Properties(authentication_method="M")))
    peer.take()
    return peer


def accepted(bench: Bench) -> Peer:
    return bench.connect("c")


def accepted_311(bench: Bench) -> Peer:
    return bench.connect("c", version=4)


def over(bench: Bench) -> Peer:
    return bench.connect("c").send(Disconnect())


STATES: dict[str, tuple[Callable[[], Bench], Callable[[Bench], Peer], dict[str, str], str]] = {
    # state: how to make the broker, how to get there, what happens, and what happens to all other packets
    "opened": (Bench, opened, {"CONNECT": "CONNACK"}, CLOSE),
    "deciding": (
        lambda: Bench(access=Gate(later=True)),
        deciding,
        {
            **dict.fromkeys(("CONNECT", "CONNACK", "SUBACK", "UNSUBACK", "PINGRESP", "AUTH"), refused(0x82)),
            "DISCONNECT": CLOSE,
        },
        HELD,
    ),
    "challenged": (
        lambda: Bench(access=Exchange(1)),
        challenged,
        {"AUTH": refused(0x87), "DISCONNECT": CLOSE},
        refused(0x82),
    ),
    "accepted": (
        Bench,
        accepted,
        {
            "PUBLISH q0": "",
            "PUBLISH q1": "PUBACK",
            "PUBLISH q2": "PUBREC",
            "PUBACK": "",
            "PUBREC": "PUBREL",
            "PUBREL": "PUBCOMP",
            "PUBCOMP": "",
            "SUBSCRIBE": "SUBACK",
            "UNSUBSCRIBE": "UNSUBACK",
            "PINGREQ": "PINGRESP",
            "DISCONNECT": CLOSE,
        },
        ended(0x82),
    ),
    "accepted 3.1.1": (
        Bench,
        accepted_311,
        {
            "PUBLISH q0": "",
            "PUBLISH q1": "PUBACK",
            "PUBLISH q2": "PUBREC",
            "PUBACK": "",
            "PUBREC": "PUBREL",
            "PUBREL": "PUBCOMP",
            "PUBCOMP": "",
            "SUBSCRIBE": "SUBACK",
            "UNSUBSCRIBE": "UNSUBACK",
            "PINGREQ": "PINGRESP",
        },
        CLOSE,
    ),
    "over": (Bench, over, {}, CLOSE),
}


def told(peer: Peer) -> str:
    """What came of it, in words."""
    words = []
    for packet in peer.take():
        name = type(packet).__name__.upper()
        if isinstance(packet, ConnAck | Disconnect) and packet.reason_code >= 0x80:
            name += f" 0x{packet.reason_code:02X}"
        words.append(name)
    if peer.closed:
        words.append(CLOSE)
    elif peer.connection.session is None and not words:
        words.append(HELD)
    return ", ".join(words)


@pytest.mark.parametrize("packet", PACKETS)
@pytest.mark.parametrize("state", STATES)
def test_every_state_and_every_packet(state: str, packet: str) -> None:
    make, reach, expected, otherwise = STATES[state]
    bench = make()
    given = PACKETS[packet]
    peer = reach(bench)
    if peer.version == 5:
        peer.send_bytes(encode(given))
    else:
        peer.send_bytes(b"\xf0\x00" if isinstance(given, Auth) else encode_311(given))
    assert told(peer) == expected.get(packet, otherwise)
    if peer.closed:
        assert bench.broker.sessions == {}
    other = bench.open()
    assert not other.closed, "nobody else is disturbed"


@pytest.mark.parametrize("packet", PACKETS)
@pytest.mark.parametrize("qos", [1, 2])
def test_every_packet_while_a_message_is_on_its_way(qos: int, packet: str) -> None:
    """A message to the client with identifier 1 is in flight: its answers are taken, wrong ones end the connection."""
    bench = Bench()
    peer = bench.connect("c")
    peer.subscribe(Subscription("way", qos))
    bench.connect("p").send(Publish("way", b"", qos, packet_id=9))
    assert [p.packet_id for p in peer.publishes()] == [1]
    peer.send(PACKETS[packet])
    right = "PUBACK" if qos == 1 else "PUBREC"
    if packet in ("PUBACK", "PUBREC", "PUBCOMP") and packet != right:
        assert told(peer) == ended(0x82)
    elif packet == "PUBREC":
        assert told(peer) == "PUBREL"
        assert bench.broker.measure().inflight == 1
        assert peer.send(PubRec(1)).only() == PubRel(1), "asked twice, answered twice"
        assert peer.send(PubComp(1)).take() == []
        assert bench.broker.measure().inflight == 0
    else:
        _, _, expected, otherwise = STATES["accepted"]
        assert told(peer) == expected.get(packet, otherwise)
        gone = peer.closed or packet == "PUBACK"
        assert bench.broker.measure().inflight == (0 if gone else 1)
