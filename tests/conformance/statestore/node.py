"""An MQTT server with a state store in this process, and a plain client that speaks any form."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.files import Durability
from penstock.statestore.binding import INVOKE
from penstock.statestore.codec.resp3 import encode_array
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.service import StateStoreService
from tests.ports import free_port

__all__ = ["PlainClient", "StoreNode"]


class StoreNode:
    """Server and store on a loopback port that stays the same over restarts."""

    def __init__(
        self, path: Path, durability: Durability = Durability.FLUSHED, options: StoreOptions | None = None
    ) -> None:
        self.path = path
        self.durability = durability
        self.options = options or StoreOptions()
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.service = StateStoreService(self.path, self.durability, options=self.options)
        self.server = MqttServer(services=[self.service])
        await self.service.start(self.server.outlet)
        _, self.port = await self.server.start("127.0.0.1", self.port)

    async def close(self) -> None:
        await self.server.close()
        await self.service.close()

    async def restart(self) -> None:
        await self.close()
        await self.start()


class PlainClient:
    """A client that writes what it is told and keeps every message it gets.

    It subscribes to ``subscribe`` and, unless ``listens`` is False, to its response topic.
    """

    def __init__(
        self,
        node: StoreNode,
        client_id: str = "client-id1",
        *,
        subscribe: Sequence[str | Subscription] = (),
        form: Sequence[tuple[str, str]] = (("__protVer", "1.0"),),
        response_topic: str | None = None,
        listens: bool = True,
    ) -> None:
        self.response_topic = response_topic or f"clients/{client_id}/response"
        self.subscriptions = [*subscribe]
        filters = [item if isinstance(item, str) else item.topic_filter for item in subscribe]
        if listens and self.response_topic not in filters:
            self.subscriptions.append(self.response_topic)
        self.form = form
        self.messages: list[Publish] = []
        self._news = asyncio.Event()
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.mqtt = MqttClient("127.0.0.1", node.port, client_id=client_id, reconnect=False, on_message=self._message)
        self.mqtt.on_disconnected(self._ended)

    async def __aenter__(self) -> Self:
        await self.mqtt.connect()
        if self.subscriptions:
            await self.mqtt.subscribe(self.subscriptions)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.mqtt.disconnect()

    def _ended(self, error: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    def _message(self, message: Publish) -> None:
        self.messages.append(message)
        self._news.set()

    async def send(
        self,
        words: str | Sequence[bytes],
        *,
        ts: str | None = "now",
        ft: Hlc | None = None,
        qos: int = 1,
        response_topic: str | None = "own",
        correlation: bytes | None = b"",
        extra: Sequence[tuple[str, str]] = (),
    ) -> bytes:
        """Send one request; gives its correlation data."""
        if correlation == b"":
            correlation = uuid.uuid4().bytes
        args = [word.encode() for word in words.split(" ")] if isinstance(words, str) else list(words)
        user = [*self.form, *extra]
        if ts is not None:
            user.append(("__ts", "0:0:c" if ts == "now" else ts))
        if ft is not None:
            user.append(("__ft", ft.padded()))
        properties = Properties(
            response_topic=self.response_topic if response_topic == "own" else response_topic,
            correlation_data=correlation,
            user_properties=user,
        )
        await self.mqtt.publish(INVOKE, encode_array(args), qos=qos, properties=properties)
        return correlation or b""

    async def ask(
        self, words: str | Sequence[bytes], *, ft: Hlc | None = None, extra: Sequence[tuple[str, str]] = ()
    ) -> Publish:
        """Send one request and wait for its answer."""
        correlation = await self.send(words, ft=ft, extra=extra)
        return await self.wait_for(lambda message: message.properties.correlation_data == correlation)

    async def wait_for(self, wanted: Callable[[Publish], bool]) -> Publish:
        """The first message for which ``wanted`` is true, taken out of ``messages``."""
        async with asyncio.timeout(60):
            while True:
                for message in self.messages:
                    if wanted(message):
                        self.messages.remove(message)
                        return message
                self._news.clear()
                await self._news.wait()

    async def settle(self) -> None:
        """Wait until everything that was on its way to this client is there: answers come in order."""
        await self.ask("GET settle")

    def notifications(self) -> list[Publish]:
        """The notifications that came, taken out of ``messages``."""
        found = [m for m in self.messages if "/command/notify/" in m.topic]
        self.messages = [m for m in self.messages if m not in found]
        return found
