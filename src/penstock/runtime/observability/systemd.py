"""Notifications for systemd: ready, reloading, stopping, and the watchdog [sd_notify(3), sd_watchdog_enabled(3)].

A service with ``Type=notify`` gets the path of a datagram socket in ``NOTIFY_SOCKET``; every message is one datagram of
lines ``NAME=VALUE``. Without the variable nothing is sent, so a process calls these methods in any environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

__all__ = ["ServiceNotifier"]

_log = logging.getLogger("penstock.systemd")

SEND_S: Final = 5.0
"""Time limit to send a message while the socket's queue is full, as in libsystemd."""


class ServiceNotifier:
    """Sends the states of this process to systemd. ``environment``: that of the process."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = _socket_address(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog_s = _watchdog_s(environment)
        self._watchdog: asyncio.TimerHandle | None = None
        self._ready = False
        self._failed = False

    def ready(self, status: str) -> None:
        """Report that the process serves clients, and send watchdog messages from now on.

        ``status``: one line for ``systemctl status``. Call it in the event loop, again after each change.
        """
        self._ready = True
        self._send(f"READY=1\nSTATUS={status}")
        if self._watchdog_s is not None and self._watchdog is None:
            self._feed(asyncio.get_running_loop(), self._watchdog_s / 2)

    def reloading(self) -> None:
        """Report the begin of a reload, which `reloaded` ends; during the start it does nothing."""
        if self._ready:
            self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self, *, done: bool) -> None:
        """Report the end of a reload. ``done`` False: a file was invalid, and nothing changed."""
        if self._ready:
            self._send("READY=1\nSTATUS=" + ("reloaded" if done else "reload failed: see the log"))

    def stopping(self) -> None:
        """Report the begin of the shutdown, and send no watchdog messages any more: TimeoutStopSec applies instead."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        self._send("STOPPING=1\nSTATUS=completing accepted requests")

    def _feed(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        """Send a watchdog message from a timer of the loop, so that a blocked loop sends none."""
        self._send("WATCHDOG=1")
        self._watchdog = loop.call_later(interval_s, self._feed, loop, interval_s)

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_S)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            if not self._failed:  # once: the watchdog repeats its message
                self._failed = True
                fields = {"socket": self._address.replace("\0", "@"), "error": error.strerror or str(error)}
                _log.error("cannot notify systemd, which may stop the service", extra={"fields": fields})


def _socket_address(text: str) -> str | None:
    """Return the address of ``NOTIFY_SOCKET``, where ``@`` marks an abstract socket; None if there is none."""
    if text.startswith("@"):
        return "\0" + text[1:]
    if text and not text.startswith("/"):
        _log.error("NOTIFY_SOCKET is ignored: it is not the path of a socket", extra={"fields": {"value": text}})
        return None
    return text or None


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Return the watchdog's timeout in seconds; None if this process has none."""
    text = environment.get("WATCHDOG_USEC", "")
    if not text or environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not text.isdecimal() or text == "0":
        _log.error("WATCHDOG_USEC is ignored: it is not a number of microseconds", extra={"fields": {"value": text}})
        return None
    return int(text) / 1e6
