"""A node that is stopped for longer than Keep Alive (SIGSTOP): clients that go on sending, and one that does not."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    Publish,
    Subscribe,
    Subscription,
    Will,
)
from tests.end_to_end.nodes import RunningNode

KEEP_ALIVE_S = 1
PINGING_KEEP_ALIVE_S = 4
"""A busy machine may keep the thread that pings from running, but not for that long."""
PAUSE_S = 1.5 * PINGING_KEEP_ALIVE_S + 0.5


class Client:
    """A client on a blocking socket; ``packets`` is what it got."""

    def __init__(self, address: str, client_id: str, *, keep_alive: int = KEEP_ALIVE_S) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), 60)
        self.packets: list[Packet] = []
        self._decoder = Decoder(role=Role.CLIENT)
        will = Will(f"wills/{client_id}", b"x")
        self.send(Connect(client_id, keep_alive=keep_alive, will=will))
        self.read(1)

    def close(self) -> None:
        self.socket.close()

    def send(self, packet: Packet) -> None:
        self.socket.sendall(encode(packet))

    def read(self, count: int) -> list[Packet]:
        """Until there were so many packets, or the end; fewer after the time."""
        deadline = time.monotonic() + 60
        while len(self.packets) < count:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self.socket.recv(65_536)
            except TimeoutError:
                break
            if not data:
                break
            self.packets += self._decoder.feed(data)
        return self.packets


class Pinging:
    """Pings of a client in time, whatever the node does."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.sent = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(KEEP_ALIVE_S / 2):
            self.client.send(PingReq())
            self.sent += 1

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.sent


@pytest.mark.parametrize("loop", ["uvloop", pytest.param("asyncio", marks=pytest.mark.nightly)])
def test_clients_that_pinged_in_time_stay_and_their_wills_do_not_fire(
    tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes as long as the pause and the grace after it, since both are times of a real process."""
    monkeypatch.setattr("tests.end_to_end.nodes.environment", lambda: {**os.environ, "PENSTOCK_LOOP": loop})
    node = RunningNode(tmp_path).start()
    address = node.ready["mqtt"]
    with (
        closing(Client(address, "w", keep_alive=0)) as watcher,
        closing(Client(address, "alive", keep_alive=PINGING_KEEP_ALIVE_S)) as alive,
        closing(Client(address, "gone")) as gone,
    ):
        watcher.send(Subscribe(1, [Subscription("wills/#")]))
        watcher.read(2)
        assert node.process is not None
        pings = Pinging(alive)
        os.kill(node.process.pid, signal.SIGSTOP)
        try:
            threading.Event().wait(PAUSE_S)
        finally:
            os.kill(node.process.pid, signal.SIGCONT)
        end = gone.read(2)
        sent = pings.end()
        assert isinstance(end[-1], Disconnect), "who is gone is still noticed"
        assert end[-1].reason_code == 0x8D
        got = alive.read(1 + sent)
        assert [type(packet) for packet in got[1:]] == [PingResp] * sent
        wills = [packet for packet in watcher.read(3) if isinstance(packet, Publish)]
        assert [will.topic for will in wills] == ["wills/gone"]
    node.stop()
    assert "the process did not run for up to" in node.log.read_text()
