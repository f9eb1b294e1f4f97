"""Request and response [MQTT 5.0 section 4.10]: one response topic a client, correlation data for each request."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final, Protocol

from penstock.errors import LocalProtocolError, UnavailableError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode

__all__ = ["Asker", "PendingRequests", "Requests"]

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


class Asker(Protocol):
    """The client, as far as requests are concerned."""

    @property
    def client_id(self) -> str:
        """The client identifier in use."""
        ...

    async def wait_connected(self) -> None:
        """Wait until the connection stands."""
        ...

    async def publish(
        self, topic: str, payload: bytes | str, *, qos: int = 1, properties: Properties | None = None
    ) -> int:
        """Publish; the reason code."""
        ...

    async def subscribe(self, filters: str, *, qos: int = 1) -> list[int]:
        """Subscribe."""
        ...

    def listen(self, topic_filter: str, listener: Callable[[Publish], None]) -> Callable[[], None]:
        """Call ``listener`` for messages whose topic matches."""
        ...


class Requests:
    """What :meth:`MqttClient.request` and :meth:`MqttClient.respond` do, and what they raise."""

    def __init__(self, client: Asker, response_topic: str | None) -> None:
        self.pending = PendingRequests()
        self._client = client
        self._response_topic = response_topic
        self._responses: asyncio.Task[list[int]] | None = None

    async def request(
        self,
        topic: str,
        payload: bytes | str,
        timeout: float,  # noqa: ASYNC109 - the response never comes by itself: a request has a deadline
        *,
        qos: int,
        properties: Properties | None,
    ) -> Publish:
        """Publish a request and wait for its response."""
        response_topic = await self._subscribe()
        asked = properties.copy() if properties is not None else Properties()
        correlation, future = self.pending.begin()
        asked.response_topic, asked.correlation_data = response_topic, correlation
        try:
            async with asyncio.timeout(timeout):
                code = await self._client.publish(topic, payload, qos=qos, properties=asked)
                if code == ReasonCode.NO_MATCHING_SUBSCRIBERS:
                    raise UnavailableError(
                        f"mqtt: the request to {topic!r} reached nobody",
                        applied=False,
                        why="nobody is subscribed to that topic",
                        do="start what answers there, or correct the topic",
                    )
                return await future
        except TimeoutError:
            raise UnavailableError(
                f"mqtt: no response to the request to {topic!r} within {timeout:g} s",
                why="whoever is subscribed there did not answer, or not to the response topic",
            ) from None
        finally:
            self.pending.end(correlation)

    async def respond(self, request: Publish, payload: bytes | str, *, properties: Properties | None) -> int:
        """Publish the response to a request that came in."""
        asked = request.optional_properties
        if asked is None or asked.response_topic is None:
            raise LocalProtocolError(f"mqtt: the message to {request.topic!r} asks for no response")
        given = properties.copy() if properties is not None else Properties()
        given.correlation_data = asked.correlation_data
        return await self._client.publish(
            asked.response_topic,
            payload,
            qos=max(1, request.qos),
            properties=given,
        )

    async def _subscribe(self) -> str:
        """The response topic, once the server sends us what comes to it."""
        if self._responses is None or (self._responses.done() and self._responses.exception() is not None):
            await self._client.wait_connected()
            if self._response_topic is None:
                self._response_topic = f"clients/{self._client.client_id}/response"
            topic = self._response_topic
            self._client.listen(topic, self.pending.response)
            self._responses = asyncio.create_task(self._client.subscribe(topic, qos=1))
        await asyncio.shield(self._responses)
        assert self._response_topic is not None
        return self._response_topic
