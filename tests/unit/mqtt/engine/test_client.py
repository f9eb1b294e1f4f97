"""The client engine's own part: enhanced authentication, reading that is paused, what a server may not do."""

from __future__ import annotations

import pytest

from penstock.errors import LocalProtocolError, RemoteProtocolError, UnavailableError
from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Auth, ConnAck, Connect, Disconnect, Packet, Publish, PubRec
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.client.client import ClientEngine, ClientState
from penstock.mqtt.engine.client.events import Closed, Connected, OperationDone


class Method:
    """A method of two steps whose secret is that it counts."""

    method = "count"

    def __init__(self) -> None:
        self.finished: list[bytes | None] = []

    def start(self) -> bytes:
        return b"1"

    def answer(self, data: bytes | None) -> bytes:
        if data != b"2":
            raise RemoteProtocolError("it cannot count")
        return b"3"

    def finish(self, data: bytes | None) -> None:
        self.finished.append(data)
        if data != b"4":
            raise RemoteProtocolError("it cannot count to four")


def sent(engine: ClientEngine) -> list[Packet]:
    return Decoder().feed(engine.take_output())


def auth(code: int, data: bytes | None, method: str = "count") -> bytes:
    return encode(Auth(code, Properties(authentication_method=method, authentication_data=data)))


def accepted(data: bytes | None) -> bytes:
    return encode(ConnAck(properties=Properties(authentication_method="count", authentication_data=data)))


def begun() -> ClientEngine:
    engine = ClientEngine(Connect("c"), authentication=Method())
    engine.begin(0)
    return engine


def test_enhanced_authentication() -> None:
    engine = begun()
    (connect,) = sent(engine)
    assert isinstance(connect, Connect)
    assert (connect.properties.authentication_method, connect.properties.authentication_data) == ("count", b"1")
    assert engine.receive(auth(0x18, b"2"), 0) == []
    assert sent(engine) == [Auth(0x18, Properties(authentication_method="count", authentication_data=b"3"))]
    (connected,) = engine.receive(accepted(b"4"), 0)
    assert isinstance(connected, Connected)
    engine.authenticate_again("token", 0)
    with pytest.raises(LocalProtocolError):
        engine.authenticate_again("another", 0)
    assert sent(engine) == [Auth(0x19, Properties(authentication_method="count", authentication_data=b"1"))]
    engine.receive(auth(0x18, b"2"), 0)
    assert engine.receive(auth(0x00, b"4"), 0) == [OperationDone("token", (0,), "")]
    assert engine.state is ClientState.CONNECTED


def test_a_server_that_proves_nothing_is_left() -> None:
    for steps in ([auth(0x18, b"7")], [auth(0x18, b"2"), accepted(None)], [accepted(b"wrong")]):
        engine = begun()
        events = [event for step in steps for event in engine.receive(step, 0)]
        assert isinstance(events[-1], Closed)
        assert isinstance(events[-1].error, RemoteProtocolError)
        assert engine.state is ClientState.OFFLINE
    engine = begun()
    engine.receive(accepted(b"4"), 0)
    engine.authenticate_again("token", 0)
    sent(engine)
    failed, closed = engine.receive(auth(0x00, b"5"), 0)
    assert isinstance(failed, OperationDone)
    assert isinstance(closed, Closed)
    assert (failed.token, failed.error) == ("token", closed.error)
    assert sent(engine) == [Disconnect(0x80)]
    assert engine.abandon() == []


def test_a_reauthentication_ends_with_its_connection() -> None:
    engine = begun()
    engine.receive(accepted(b"4"), 0)
    engine.authenticate_again("token", 0)
    engine.lost()
    (failed,) = engine.take_events()
    assert isinstance(failed, OperationDone)
    assert failed.token == "token"
    assert isinstance(failed.error, UnavailableError)
    engine.begin(0)
    engine.receive(accepted(b"4"), 0)
    engine.authenticate_again("another", 0)
    assert engine.receive(auth(0x00, b"4"), 0) == [OperationDone("another", (0,), "")]


def test_a_reauthentication_without_credentials_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Method()
    engine = ClientEngine(Connect("c"), authentication=method)
    engine.begin(0)
    engine.receive(accepted(b"4"), 0)
    with monkeypatch.context() as patch:
        patch.setattr(method, "start", lambda: b"".join(None))  # type: ignore[arg-type] # raises
        with pytest.raises(TypeError):
            engine.authenticate_again("token", 0)
    engine.authenticate_again("token", 0)
    assert engine.receive(auth(0x00, b"4"), 0) == [OperationDone("token", (0,), "")]


def test_auth_out_of_place() -> None:
    plain = ClientEngine(Connect("c"))
    plain.begin(0)
    other = begun()
    unasked = begun()
    unasked.receive(accepted(b"4"), 0)
    for engine, data in ((plain, auth(0x18, b"2")), (other, auth(0x18, b"2", "other")), (unasked, auth(0x00, b"4"))):
        (closed,) = engine.receive(data, 0)
        assert isinstance(closed, Closed)
        assert closed.reason_code == 0x82


def test_silence_does_not_end_the_connection_while_reading_is_paused() -> None:
    engine = ClientEngine(Connect("c", keep_alive=10))
    engine.begin(0)
    engine.receive(encode(ConnAck()), 0)
    engine.reading = False
    sent(engine)
    for now in (10_000, 20_000, 30_000):
        assert engine.tick(now) == []
    assert engine.take_output() == b"\xc0\x00" * 3
    engine.reading = True
    (closed,) = engine.tick(40_000)
    assert isinstance(closed, Closed)


def test_a_message_is_acknowledged_by_its_owner() -> None:
    engine = ClientEngine(Connect("c"), automatic=False)
    engine.begin(0)
    engine.receive(encode(ConnAck()), 0)
    engine.take_output()
    (message,) = engine.receive(encode(Publish("a", b"", 2, packet_id=1)), 0)
    assert engine.take_output() == b""
    assert isinstance(message, Publish)
    engine.acknowledge(message, 0)
    assert sent(engine) == [PubRec(1)]
