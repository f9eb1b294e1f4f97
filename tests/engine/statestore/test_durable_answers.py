"""Durable requests are answered after the sync that makes the change durable, wherever the commit runs."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Subscribe, Subscription
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.clock import wall_clock_ms
from penstock.statestore.binding import client_response_topic, request
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.service import StateStoreService

CLIENT = "order-1"
SETS = 20


def a_set(number: int, client: str = CLIENT) -> bytes:
    packet = request(
        [b"SET", b"key", b"value %d" % number],
        client,
        number.to_bytes(16, "big"),
        Hlc(wall_clock_ms(), number, client),
        expiry_s=10,
    )
    packet.packet_id = number
    return encode(packet)


class Peer:
    """A client on a socket of its own."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)

    async def exchange(self, data: bytes, answers: int) -> None:
        """Send ``data``, and read until the packets that were received end with ``answers`` times ``+OK``."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.socket, data)
        received = b""
        while received.count(b"+OK\r\n") < answers or not received:
            received += await loop.sock_recv(self.socket, 65536)

    def has_input(self) -> bool:
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False


@pytest.mark.parametrize("inline_s", [0.0, 60.0], ids=["thread", "loop"])
@pytest.mark.parametrize("window", [1, 4])
async def test_no_request_is_answered_before_its_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_s: float, window: int
) -> None:
    """The log is written and synced; only then has the client something to read, all of a commit in one write."""
    store = StateStoreService(tmp_path / "store")
    server = MqttServer(services=[store])
    await store.start(server.outlet)
    queue = store._writer.queue
    queue.inline_s = inline_s
    queue.expected_s = inline_s / 2
    _, port = await server.start("127.0.0.1", 0)
    peer = Peer(port)
    done: list[str] = []
    early: list[bool] = []
    write, sync = os.pwrite, os.fdatasync

    def watched_write(*given: Any) -> int:
        done.append("write")
        return write(*given)

    def watched_sync(descriptor: int) -> None:
        early.append(peer.has_input())
        sync(descriptor)
        done.append("sync")
        early.append(peer.has_input())

    try:
        await peer.exchange(encode(Connect(CLIENT, keep_alive=0)), 0)
        await peer.exchange(encode(Subscribe(1, [Subscription(client_response_topic(CLIENT))])), 0)
        monkeypatch.setattr(os, "pwrite", watched_write)
        monkeypatch.setattr(os, "fdatasync", watched_sync)
        before = queue.commits
        for first in range(1, SETS + 1, window):
            await peer.exchange(b"".join(a_set(number) for number in range(first, first + window)), window)
        commits = queue.commits - before
        assert commits == SETS // window
        assert done == ["write", "sync"] * commits, "one write and one sync for each commit"
        assert early == [False] * (2 * commits)
        assert queue.inline_commits == (commits if inline_s else 0)
    finally:
        peer.socket.close()
        await server.close()
        await store.close()


async def test_the_commit_of_a_client_that_is_alone_does_not_wait_for_other_reads(tmp_path: Path) -> None:
    """It begins at the end of the client's read; once another client waits for a commit, they share commits again."""
    store = StateStoreService(tmp_path / "store")
    server = MqttServer(services=[store])
    await store.start(server.outlet)
    queue = store._writer.queue
    queue.inline_s = 60.0
    _, port = await server.start("127.0.0.1", 0)
    clients = CLIENT, "order-2"
    peers = [Peer(port) for _ in clients]

    async def commits_of_both(number: int) -> int:
        """Let the server find a request of each in the same turn; returns the number of commits."""
        before = queue.commits
        for client, peer in zip(clients, peers, strict=True):
            peer.socket.send(a_set(number, client))
        for peer in peers:
            await peer.exchange(b"", 1)
        return queue.commits - before

    try:
        for client, peer in zip(clients, peers, strict=True):
            await peer.exchange(encode(Connect(client, keep_alive=0)), 0)
            await peer.exchange(encode(Subscribe(1, [Subscription(client_response_topic(client))])), 0)
        assert await commits_of_both(1) == 1
        for number in range(2, SETS + 1):
            await peers[0].exchange(a_set(number), 1)
        assert queue.commits == SETS
        assert await commits_of_both(SETS + 1) == 2
        assert await commits_of_both(SETS + 2) == 1
        assert queue.inline_commits == queue.commits
    finally:
        for peer in peers:
            peer.socket.close()
        await server.close()
        await store.close()
