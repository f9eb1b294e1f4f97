"""Responses to a read leave at its end if they do not wait for a commit."""

from __future__ import annotations

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Disconnect, PingReq, Publish, Subscribe, Subscription
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.connections.output import OutputTransport

PINGRESP = b"\xd0\x00"


class _Sink(OutputTransport):
    """The transport of a connection."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.flushed: list[bytes] = []

    def send_now(self, data: bytes) -> None:
        self.sent.append(data)

    def send_output(self, data: bytes) -> None:
        self.flushed.append(data)


def _connected() -> tuple[Broker, BrokerConnection, _Sink, list[str]]:
    wakes: list[str] = []
    broker = Broker(new_client_id=lambda: "", wake=lambda: wakes.append("wake"))
    connection = broker.open("c", 0)
    assert connection is not None
    connection.receive(encode(Connect("c")), 0, 0)
    broker.flush(0)
    wakes.clear()
    sink = _Sink()
    connection.sink = sink
    return broker, connection, sink, wakes


def _read(broker: Broker, connection: BrokerConnection, data: bytes) -> None:
    broker.outbound.begin_read(connection)
    connection.receive(data, 0, 0)
    broker.outbound.end_read()
    assert broker.outbound.reading is None


def test_all_that_a_read_brought_is_one_write_without_a_flush() -> None:
    broker, connection, sink, wakes = _connected()
    _read(broker, connection, encode(PingReq()) + encode(Publish("t", b"", 1, packet_id=7)))
    assert len(sink.sent) == 1
    assert sink.sent[0].startswith(PINGRESP + b"\x40")
    assert wakes == []
    assert broker.flush(0) == []
    assert broker.stats.bytes_sent >= len(sink.sent[0])


def test_earlier_packets_leave_before_the_response_to_a_read() -> None:
    broker, connection, sink, _ = _connected()
    connection.puback(3, 0)
    _read(broker, connection, encode(PingReq()))
    assert sink.sent == [b"\x40\x02\x00\x03" + PINGRESP]
    assert broker.flush(0) == []
    assert sink.flushed == [b""]


def test_messages_of_an_unfinished_read_leave_before_their_acknowledgement() -> None:
    broker, connection, sink, wakes = _connected()
    receiver = broker.open("r", 0)
    assert receiver is not None
    receiver.receive(encode(Connect("r")) + encode(Subscribe(1, [Subscription("t")])), 0, 0)
    broker.flush(0)
    wakes.clear()
    broker.outbound.begin_read(connection)
    connection.receive(encode(Publish("t", b"x", 1, packet_id=7)), 0, 0)
    broker.outbound.end_read(unread=True)
    assert sink.sent == []
    assert len(wakes) == 1
    receiver.sink = connection.sink  # the order of both
    assert broker.flush(0) == []
    assert [data[:1] for data in sink.flushed] == [b"\x32", b"\x40"]


def test_output_of_others_does_not_hold_that_of_a_read_without_messages() -> None:
    broker, connection, sink, _ = _connected()
    other = broker.open("o", 0)
    assert other is not None
    other.receive(encode(Connect("o")), 0, 0)
    _read(broker, connection, encode(PingReq()))
    assert sink.sent == [PINGRESP]


def test_the_end_of_a_connection_is_left_to_the_flush() -> None:
    broker, connection, sink, wakes = _connected()
    _read(broker, connection, encode(PingReq()) + encode(Disconnect()))
    assert sink.sent == []
    assert wakes == ["wake"]
    assert broker.flush(0) == [(connection, PINGRESP, True)]


def test_packets_that_wait_for_a_commit_are_left_to_the_flush() -> None:
    broker, connection, sink, _ = _connected()
    connection.gate = broker.journal.committed + 1
    _read(broker, connection, encode(PingReq()))
    assert sink.sent == []
    assert broker.flush(0) == []
    assert connection.uncommitted is not None
    # Later output must not overtake that of the commit.
    broker.journal.committed += 1
    connection.gate = 0
    connection.puback(7, 0)
    assert broker.flush(0) == []
    assert sink.sent + sink.flushed == [PINGRESP, b"\x40\x02\x00\x07"]


def test_output_of_others_is_flushed() -> None:
    broker, connection, sink, wakes = _connected()
    other = broker.open("d", 0)
    assert other is not None
    other.receive(encode(Connect("d")), 0, 0)
    broker.flush(0)
    wakes.clear()
    broker.outbound.begin_read(connection)
    other.puback(1, 0)
    broker.outbound.end_read()
    assert wakes == ["wake"]
    assert [(c, data) for c, data, _ in broker.flush(0)] == [(other, b"\x40\x02\x00\x01")]
    assert sink.sent == []
