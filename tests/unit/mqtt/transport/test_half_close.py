"""A client that closes its sending side reads the answers to all that it sent, over every transport."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, PubAck, Publish
from penstock.mqtt.server import MqttServer
from penstock.mqtt.transport.listener_settings import ListenerSettings, Transport
from penstock.mqtt.transport.tls import TlsFiles
from tests.certificates import Authority

DEADLINE_S = 60
MANY = 400
"""More messages than a share of a turn: the end of the input is read, or waits, while others are not handled yet."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("half-close"))
    made.issue("server", "127.0.0.1")
    return made


@pytest.fixture(params=list(Transport), ids=[each.value for each in Transport])
async def listener(
    request: pytest.FixtureRequest, authority: Authority
) -> AsyncIterator[tuple[Transport, tuple[str, int]]]:
    transport: Transport = request.param
    folder = authority.directory
    tls = TlsFiles(certificate=folder / "server.pem", key=folder / "server.key") if transport.encrypted else None
    server = MqttServer()
    address = await server.listen(ListenerSettings(host="127.0.0.1", port=0, transport=transport, tls=tls))
    yield transport, address
    await server.close()


class Client:
    """A socket, plain or with TLS, of which the sending side can be closed alone."""

    def __init__(self, end: socket.socket, context: ssl.SSLContext | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = end
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = None
        if context is not None:
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")

    async def connect(self, address: tuple[str, int]) -> None:
        await self._loop.sock_connect(self._socket, address)
        while self._tls is not None:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._loop.sock_sendall(self._socket, self._outgoing.read())
                self._incoming.write(await self._loop.sock_recv(self._socket, 65_536))
            else:
                break

    async def send_and_end(self, data: bytes, *, close_notify: bool) -> None:
        """Send ``data`` and the end of the input; with TLS after close_notify, or without it."""
        if self._tls is not None:
            self._tls.write(data)
            if close_notify:
                with pytest.raises(ssl.SSLWantReadError):  # that of the broker follows its answers
                    self._tls.unwrap()
            data = self._outgoing.read()
        await self._loop.sock_sendall(self._socket, data)
        self._socket.shutdown(socket.SHUT_WR)

    async def read_all(self) -> bytes:
        """Return all that the broker sends before it closes its side."""
        received = b""
        while data := await self._loop.sock_recv(self._socket, 65_536):
            received += data
        if self._tls is None:
            return received
        self._incoming.write(received)
        received = b""
        try:
            while data := self._tls.read(65_536):
                received += data
        except ssl.SSLZeroReturnError:
            pass
        return received


@pytest.mark.parametrize("messages", [1, MANY])
@pytest.mark.parametrize("close_notify", [True, False])
async def test_answers_precede_the_end(
    authority: Authority, listener: tuple[Transport, tuple[str, int]], messages: int, *, close_notify: bool
) -> None:
    transport, address = listener
    sent = encode(Connect("half")) + b"".join(encode(Publish("a", b"", 1, packet_id=n + 1)) for n in range(messages))
    web = ClientProtocol(parse_uri(f"ws://127.0.0.1:{address[1]}/mqtt"), subprotocols=[Subprotocol("mqtt")])
    if transport.websocket:
        web.send_request(web.connect())
        sent = b"".join(web.data_to_send()) + Frame(Opcode.BINARY, sent).serialize(mask=True)
    with socket.socket() as end:
        end.setblocking(False)
        client = Client(end, authority.client_context() if transport.encrypted else None)
        async with asyncio.timeout(DEADLINE_S):
            await client.connect(address)
            await client.send_and_end(sent, close_notify=close_notify)
            received = await client.read_all()
    if transport.websocket:
        web.receive_data(received)
        received = b"".join(bytes(each.data) for each in web.events_received() if isinstance(each, Frame))
    packets = Decoder(role=Role.CLIENT).feed(received)
    assert Counter(map(type, packets)) == {ConnAck: 1, PubAck: messages}
