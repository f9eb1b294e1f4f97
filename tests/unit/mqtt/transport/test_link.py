"""The end of a connection as its client sees it."""

from __future__ import annotations

import asyncio
import socket

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, Disconnect, Packet, Publish, PubRec, PubRel
from penstock.mqtt.server import BrokerLimits, MqttServer

DEADLINE_S = 10


def overrun(address: tuple[str, int]) -> list[Packet]:
    """A client with a thread of its own that sends too much, and answers what it reads while the server ends it."""
    decoder = Decoder(role=Role.CLIENT)
    packets: list[Packet] = []
    with socket.create_connection(address, timeout=DEADLINE_S) as tcp:
        tcp.sendall(encode(Connect("c")) + b"".join(encode(Publish("t", b"", 2, packet_id=n)) for n in range(1, 302)))
        while data := tcp.recv(1):
            for packet in decoder.feed(data):
                packets.append(packet)
                if isinstance(packet, PubRec):
                    tcp.sendall(encode(PubRel(packet.packet_id)))
    return packets


async def test_a_client_in_the_middle_of_sending_reads_why_it_was_ended() -> None:
    server = MqttServer(limits=BrokerLimits(receive_maximum=300))
    address = await server.start("127.0.0.1", 0)
    packets = await asyncio.wait_for(asyncio.to_thread(overrun, address), DEADLINE_S)
    assert isinstance(packets[0], ConnAck)
    assert isinstance(packets[-1], Disconnect)
    assert packets[-1].reason_code == 0x93
    await server.close()


async def test_a_client_that_does_not_close_its_side_does_not_hold_up_the_server() -> None:
    server = MqttServer()
    address = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(encode(Connect("c")) + encode(Connect("c")))
    async with asyncio.timeout(DEADLINE_S):
        assert (await reader.read()).startswith(b"\x20"), "CONNACK, DISCONNECT, and the end"
    assert server.stats.connections == 1
    started = asyncio.get_running_loop().time()
    await server.close()
    assert asyncio.get_running_loop().time() - started < 2
    writer.close()
