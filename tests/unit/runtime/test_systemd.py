"""Notifications for systemd, received on a socket of the test."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime.observability.systemd import ServiceNotifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        yield receiver


def received(manager: socket.socket) -> list[str]:
    """All messages so far; the kernel has them as soon as they are sent."""
    found: list[str] = []
    try:
        while True:
            found.append(manager.recv(4096).decode())
    except BlockingIOError:
        return found


async def test_ready_reload_and_stop(manager: socket.socket) -> None:
    notifier = ServiceNotifier({"NOTIFY_SOCKET": manager.getsockname()})
    notifier.reloading()
    notifier.reloaded(done=True)
    assert received(manager) == []  # it has not started
    notifier.ready("mqtt 127.0.0.1:1883")
    assert received(manager) == ["READY=1\nSTATUS=mqtt 127.0.0.1:1883"]
    notifier.reloading()
    (message,) = received(manager)
    first, _, microseconds = message.partition("\nMONOTONIC_USEC=")
    assert first == "RELOADING=1"
    assert int(microseconds) > 0
    notifier.reloaded(done=False)
    assert received(manager) == ["READY=1\nSTATUS=reload failed: see the log"]
    notifier.stopping()
    assert received(manager) == ["STOPPING=1\nSTATUS=completing accepted requests"]


async def test_the_watchdog_is_fed_from_ready_to_stopping(manager: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    environment = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())}
    notifier = ServiceNotifier(environment)
    notifier.ready("a")
    notifier.ready("b")  # changes the status only
    assert received(manager) == ["READY=1\nSTATUS=a", "WATCHDOG=1", "READY=1\nSTATUS=b"]
    for _ in range(3):
        async with asyncio.timeout(60):
            assert await loop.sock_recv(manager, 4096) == b"WATCHDOG=1"
    notifier.stopping()
    assert received(manager)[-1].startswith("STOPPING=1")
    await asyncio.sleep(0.03)
    assert received(manager) == []


@pytest.mark.parametrize("more", [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "0"}])
async def test_no_watchdog_of_another_process_or_without_time(manager: socket.socket, more: dict[str, str]) -> None:
    ServiceNotifier({"NOTIFY_SOCKET": manager.getsockname(), **more}).ready("a")
    assert received(manager) == ["READY=1\nSTATUS=a"]


async def test_an_abstract_socket() -> None:
    name = f"penstock-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}")
        receiver.setblocking(False)
        ServiceNotifier({"NOTIFY_SOCKET": f"@{name}"}).ready("a")
        assert received(receiver) == ["READY=1\nSTATUS=a"]


async def test_nothing_is_sent_without_a_socket(caplog: pytest.LogCaptureFixture) -> None:
    notifier = ServiceNotifier({})
    notifier.ready("a")
    notifier.stopping()
    assert caplog.records == []


async def test_a_failure_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    notifier = ServiceNotifier({"NOTIFY_SOCKET": str(tmp_path / "missing")})
    notifier.ready("a")
    notifier.stopping()
    assert [record.getMessage() for record in caplog.records] == ["cannot notify systemd, which may stop the service"]
    ServiceNotifier({"NOTIFY_SOCKET": "vsock:2:1234", "WATCHDOG_USEC": "soon"}).ready("a")
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "NOTIFY_SOCKET is ignored: it is not the path of a socket",
        "WATCHDOG_USEC is ignored: it is not a number of microseconds",
    ]
