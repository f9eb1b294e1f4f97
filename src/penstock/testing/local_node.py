"""A broker with a state store inside the process of a test, in a separate thread, so that blocking and asynchronous
code can use it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.errors import LocalProtocolError
from penstock.mqtt.faults import FaultListener
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.files import Durability
from penstock.runtime.io.loop import LoopThread
from penstock.statestore.blocking import Client
from penstock.statestore.options import StoreOptions, extensions_named
from penstock.statestore.service.service import StateStoreService

__all__ = ["LocalNode"]

HOST = "127.0.0.1"

_LOOK_AT_CLOCK_S = 0.01
"""Interval for polling a caller's clock, which has no timers."""


class LocalNode:
    """A broker with a state store, started by ``with`` or :meth:`start` on a free port; :meth:`restart` uses the same
    port.

    Args:
        directory: data directory; None: a temporary one.
        durability: guarantee of responses; ``memory`` is the fastest.
        dialect: ``auto``, or one format of the protocol.
        max_keys: limit of keys; 0 for none.
        extensions: extensions of the published protocol, named as in the configuration; ``scan`` is always enabled.
        faults: enable fault injection (see :mod:`penstock.mqtt.faults`).
        clock: wall clock of the store in ms, also for expiry: after it has advanced, due keys expire within about 10
        ms. The clients of :meth:`client` use it as well. None: the system clock.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        durability: str = "memory",
        dialect: str = "auto",
        max_keys: int = 0,
        extensions: Sequence[str] = (),
        faults: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._given = directory
        self._durability = Durability(durability)
        self._options = StoreOptions(dialect=dialect, max_keys=max_keys, extensions=extensions_named(extensions))
        self._with_faults = faults
        self._clock = clock
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._thread: LoopThread | None = None
        self._server: MqttServer | None = None
        self._store: StateStoreService | None = None
        self._faults: FaultListener | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._port = 0
        self._clients: list[Client] = []

    @property
    def host(self) -> str:
        """Address of the listener."""
        return HOST

    @property
    def port(self) -> int:
        """Port of the listener; 0 before the first start."""
        return self._port

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"mqtt://{HOST}:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which the SDKs and the command line connect to this broker."""
        return {
            "AIO_BROKER_HOSTNAME": HOST,
            "AIO_BROKER_TCP_PORT": str(self._port),
            "AIO_MQTT_USE_TLS": "false",
            "PENSTOCK_BROKER": self.url,
        }

    @property
    def keys(self) -> int:
        """Number of keys in the store."""
        return 0 if self._store is None else self._store.keys

    @property
    def observations(self) -> int:
        """Number of observations, for example to wait until an application observes its keys."""
        return 0 if self._store is None else self._store.observations

    def start(self) -> Self:
        """Load the stored state and listen."""
        if self._thread is not None:
            raise LocalProtocolError("local node: it is already running")
        if self._given is None and self._own is None:
            self._own = tempfile.TemporaryDirectory(prefix="penstock-")
        self._thread = LoopThread("penstock-node")
        try:
            self._thread.run(self._start())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all connections and close the files; the keys are available after the next start."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self._stop())
            finally:
                thread.close()

    def restart(self) -> None:
        """Stop and start on the same port, as after a crash of the broker: clients lose their connections."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Close the clients of :meth:`client`, stop, and remove a temporary directory."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.stop()
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    def client(self, client_id: str | None = None) -> Client:
        """Return a connected client of the store, which is closed with the node."""
        client = Client(self.url, client_id=client_id, server_clock=self._clock is not None).open()
        self._clients.append(client)
        return client

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _start(self) -> None:
        directory = self._given or Path(self._own.name if self._own is not None else ".")
        store = StateStoreService(
            directory / "statestore",
            self._durability,
            self._clock,
            options=self._options,
        )
        server = MqttServer(services=[store])
        await store.start(server.outlet)
        # Set after the start: a part that did not start need not be stopped.
        self._server, self._store = server, store
        if self._clock is not None:
            self._ticking = asyncio.create_task(_follow_clock(store))
        if self._with_faults:
            _, behind = await server.start(HOST, 0)
            self._faults = FaultListener(HOST, behind)
            _, self._port = await self._faults.start(HOST, self._port)
        else:
            _, self._port = await server.start(HOST, self._port)

    async def _stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        if self._faults is not None:
            await self._faults.close()
            self._faults = None
        if self._server is not None:
            await self._server.close()
        if self._store is not None:
            await self._store.close()


async def _follow_clock(store: StateStoreService) -> None:
    while True:
        await asyncio.sleep(_LOOK_AT_CLOCK_S)
        store.wake()
