"""One request and its answer: stamped, sent, awaited by correlation data, refusals read as errors."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping

from penstock.errors import PenstockError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.statestore.binding import request
from penstock.statestore.client.request_clock import RequestClock
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import decode_reply
from penstock.statestore.errors import as_text, refusal, status_refusal
from penstock.statestore.hlc import Hlc

__all__ = ["Exchange"]


class Exchange:
    """The requests of one client under way. ``extra`` are user properties of every request."""

    def __init__(self, mqtt: MqttClient, clock: RequestClock, timeout_s: float, extra: Mapping[str, str]) -> None:
        self.timeout_s = timeout_s
        self.clock = clock
        self._mqtt = mqtt
        self._extra = extra
        self._prefix = os.urandom(8)
        self._requests = 0
        # An error is a result too: set as an exception it would be reported where its waiter had gone already.
        self._waiting: dict[bytes, asyncio.Future[Publish | UnavailableError]] = {}

    async def call(
        self,
        args: list[bytes],
        fencing_token: Hlc | None = None,
        *,
        timeout_s: float | None = None,
        extra: Mapping[str, str] | None = None,
        named: tuple[str, bytes] | None = None,
        extension: str | None = None,
    ) -> tuple[bytes, Hlc | None]:
        """Send one request and wait for its answer: the payload, which is no error, and its version.

        ``named``: the command and the key that errors name, where they are not the first two of ``args``.
        ``extension``: the extension of the store that the request needs; errors name it.
        """
        named = named or (args[0].decode(), args[1])
        timeout_s = timeout_s or self.timeout_s
        self._requests += 1
        correlation = self._prefix + self._requests.to_bytes(8, "big")
        publish = request(
            args,
            self._mqtt.client_id,
            correlation,
            self.clock.stamp(),
            fencing_token=fencing_token,
            expiry_s=max(1, math.ceil(timeout_s)),
            extra={**self._extra, **extra} if extra else self._extra,
        )
        taken: int | None = None
        future = self._waiting[correlation] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                # Not queued while there is no connection: a write must not be carried out long after its timeout.
                await self._mqtt.wait_connected()
                taken = await self._mqtt.publish(publish.topic, publish.payload, qos=1, properties=publish.properties)
                message = await future
        except TimeoutError:
            raise self._no_answer(named, timeout_s, taken) from None
        finally:
            del self._waiting[correlation]
        if isinstance(message, UnavailableError):
            raise message
        return self._answer(named, fencing_token, message, extension)

    def _no_answer(self, named: tuple[str, bytes], timeout_s: float, taken: int | None) -> UnavailableError:
        if not self._mqtt.connected:
            why, do = "there is no connection to the broker", "repeat it once the broker is back"
        elif taken == ReasonCode.NO_MATCHING_SUBSCRIBERS:
            why = "the broker says that nobody takes requests to a state store"
            do = "name a broker that has one (penstock up), or attach one: penstock statestore attach --broker URL"
        else:
            why = "no state store at this broker, or it is overloaded"
            do = "read the key again to see what happened, then repeat"
        return UnavailableError(
            f"state store: no answer to {named[0]} {as_text(named[1])} within {timeout_s:g} s",
            applied=None,
            why=why,
            do=do,
        )

    def _answer(
        self, named: tuple[str, bytes], token: Hlc | None, message: Publish, extension: str | None
    ) -> tuple[bytes, Hlc | None]:
        properties = message.properties
        command, key = named
        status = properties.user_property("__stat")
        if status != "200":
            text, field = properties.user_property("__stMsg"), properties.user_property("__propName")
            raise status_refusal(command, key, status, text, field)
        payload = message.payload
        if not payload.startswith(b"-"):
            return payload, self.clock.saw(properties.user_property("__ts"))
        text = decode_reply(payload).text
        why, skew_ms = None, None
        if text == StoreError.TIMESTAMP_TOO_FAR_AHEAD:
            skew_ms, why = self.clock.skew()
        self.clock.saw(properties.user_property("__ts"))
        raise refusal(command, key, text, token=token, why=why, skew_ms=skew_ms, extension=extension)

    def answered(self, message: Publish) -> None:
        """An answer came in."""
        correlation = message.properties.correlation_data
        future = self._waiting.get(correlation) if correlation is not None else None
        # An answer that nobody waits for any more came after its timeout.
        if future is not None and not future.done():
            future.set_result(message)

    def give_up(self, error: PenstockError | None) -> None:
        """No answer will come any more: the client was closed, or the connection is gone for good."""
        for future in self._waiting.values():
            if not future.done():
                why = error.what if error is not None else "the client was closed"
                future.set_result(UnavailableError("state store: the answer will not come", applied=None, why=why))
