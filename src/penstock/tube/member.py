"""The connection of a broker to its master: register, heartbeat, reconnect, next master."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.tube.codec.envelope import Request, Response, decode_response, encode_request
from penstock.tube.codec.exceptions import is_standby
from penstock.tube.codec.framing import FrameDecoder, encode_frame
from penstock.tube.codec.methods import Service
from penstock.tube.engine.membership import Membership, Orders

__all__ = ["Member"]

_log = logging.getLogger("penstock.tube.broker")

_TIMEOUT_S = 10.0
_RETRY_S = 0.2
_RETRY_MOST_S = 5.0
_SOON_S = 0.02


class _Link(asyncio.Protocol):
    """One connection to a master; one call at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()
        self._serial = 0
        self._waiting: asyncio.Future[Response] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has it without being a subclass

    def data_received(self, data: bytes) -> None:
        try:
            for serial, body in self._decoder.feed(data):
                response = decode_response(serial, body)
                if self._waiting is not None and serial == self._serial and not self._waiting.done():
                    self._waiting.set_result(response)
        except PenstockError as error:
            self._fail(error)
            assert self.transport is not None
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(UnavailableError("tube: the connection to the master was lost", why=str(exc) if exc else None))

    def _fail(self, error: PenstockError) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    async def call(self, method: int, payload: bytes) -> bytes:
        """The payload of the answer. After a PenstockError or TimeoutError the connection is of no use any more."""
        assert self.transport is not None
        if self.transport.is_closing():
            raise UnavailableError("tube: the connection to the master was lost", applied=False)
        self._serial += 1
        self._waiting = asyncio.get_running_loop().create_future()
        request = Request(self._serial, Service.MASTER, method, payload, timeout=int(_TIMEOUT_S * 1000))
        self.transport.write(encode_frame(self._serial, encode_request(request)))
        async with asyncio.timeout(_TIMEOUT_S):
            response = await self._waiting
        if response.status:
            if is_standby(response.exception):
                raise UnavailableError("tube: this master is not the active one", applied=False)
            raise RefusedError(f"tube: the master answered {response.exception}: {response.text}", peer="master")
        return response.payload


class Member:
    """Keeps a broker registered at one of ``masters``. ``apply(orders)`` is called in the loop for each answer."""

    def __init__(
        self,
        membership: Membership,
        masters: Sequence[tuple[str, int]],
        apply: Callable[[Orders], None],
        status: Callable[[], tuple[int, int]],
        *,
        heartbeat_s: float,
    ) -> None:
        self.membership = membership
        self.heartbeats = 0
        self.registered = asyncio.Event()
        self._masters = sorted(masters)
        self._apply = apply
        self._status = status
        self._heartbeat_s = heartbeat_s
        self._wake = asyncio.Event()
        self._link: _Link | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; returns at once, ``registered`` is set after the first registration."""
        self._task = asyncio.create_task(self._run(), name=f"tube broker {self.membership.broker_id} membership")

    def poke(self) -> None:
        """Heartbeat now."""
        self._wake.set()

    async def close(self) -> None:
        """Stop, and tell the master if it can be reached."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        link = self._link
        if link is not None and self.membership.registered:
            with suppress(PenstockError, TimeoutError):
                async with asyncio.timeout(1):
                    await link.call(*self.membership.close_request())
        if link is not None and link.transport is not None:
            link.transport.close()

    async def _run(self) -> None:
        place = failures = 0
        while True:
            host, port = self._masters[place % len(self._masters)]
            try:
                await self._serve(host, port)
            except (OSError, PenstockError, TimeoutError) as error:
                failures = 0 if self.membership.registered else failures + 1
                self.membership.lost()
                fields = {"broker_id": self.membership.broker_id, "master": f"{host}:{port}", "error": str(error)}
                _log.warning("tube broker lost its master", extra={"fields": fields})
            if self._link is not None and self._link.transport is not None:
                self._link.transport.abort()
            self._link = None
            place += 1
            await asyncio.sleep(min(_RETRY_S * 2 ** min(failures, 10), _RETRY_MOST_S))

    async def _serve(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_TIMEOUT_S):
            _, self._link = await loop.create_connection(_Link, host, port)
        while True:
            method, payload = self.membership.next_request(*self._status())
            orders = self.membership.receive(method, await self._link.call(method, payload))
            self._apply(orders)
            self.heartbeats += 1
            if self.membership.registered and not self.registered.is_set():
                self.registered.set()
                fields = {"broker_id": self.membership.broker_id, "master": f"{host}:{port}"}
                _log.info("tube broker registered", extra={"fields": fields})
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_SOON_S if orders.soon else self._heartbeat_s):
                    await self._wake.wait()
