"""Request and response [MQTT 5.0 section 4.10]: one response topic a client, correlation data for each request."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from penstock.errors import UnavailableError
from penstock.mqtt.codec.packets import Publish

__all__ = ["PendingRequests"]

_PREFIX_BYTES: Final = 8


class PendingRequests:
    """The requests of one client that have no response yet, by their correlation data.

    The data is eight random bytes of this client and a number: a response to an earlier run, or to somebody else, finds
    nobody.
    """

    def __init__(self) -> None:
        self._prefix = os.urandom(_PREFIX_BYTES)
        self._number = 0
        self._waiting: dict[bytes, asyncio.Future[Publish]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self) -> tuple[bytes, asyncio.Future[Publish]]:
        """The correlation data of a new request, and the future of its response."""
        self._number += 1
        correlation = self._prefix + self._number.to_bytes(8, "big")
        future: asyncio.Future[Publish] = asyncio.get_running_loop().create_future()
        self._waiting[correlation] = future
        return correlation, future

    def end(self, correlation: bytes) -> None:
        """Nobody waits for that response any more."""
        self._waiting.pop(correlation, None)

    def response(self, message: Publish) -> None:
        """A message came to the response topic; one that answers nothing is late, and is dropped."""
        given = message.optional_properties
        data = given.correlation_data if given is not None else None
        future = self._waiting.pop(data, None) if data is not None else None
        if future is not None and not future.done():
            future.set_result(message)

    def close(self, error: UnavailableError) -> None:
        """No response will come any more."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
