"""Clients that send what the SDKs send, byte for byte where it matters, and refuse what they refuse.

A :class:`Profile` holds how one SDK connects, subscribes and addresses its requests; :class:`SdkClient` speaks by it
and reads answers and notifications as strictly as that SDK's parser does. Written from what they put on the wire.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Self

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.statestore.hlc import MAX_DRIFT_MS, Hlc, parse

__all__ = ["DOTNET", "GO", "RUST", "Notice", "Profile", "RefusedByStoreError", "SdkClient"]

STORE: Final = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8"
INVOKE: Final = f"{STORE}/command/invoke"


def _hex(text: str) -> str:
    return text.encode().hex().upper()


@dataclass(frozen=True)
class Profile:
    """How one SDK speaks."""

    name: str
    response_topic: Callable[[str], str]
    no_local: bool
    retain_as_published: bool
    notify_filter: Callable[[str], str] | None
    """What it subscribes to before its first observation; None: nothing."""
    session_expiry_s: int
    payload_format: int | None
    invoker_property: bool
    """Whether the older ``__invId`` is sent beside ``__srcId``."""
    stop_must_find: bool
    """Whether ``:0`` to KEYNOTIFY STOP is an error."""


GO: Final = Profile(
    name="go",
    response_topic=lambda client_id: f"clients/{_hex(client_id)}/{INVOKE}/response",
    no_local=True,
    retain_as_published=False,
    notify_filter=None,
    session_expiry_s=0xFFFF_FFFF,
    payload_format=0,
    invoker_property=False,
    stop_must_find=False,
)
RUST: Final = Profile(
    name="rust",
    response_topic=lambda client_id: f"clients/{client_id}/services/{INVOKE}/response",
    no_local=False,
    retain_as_published=True,
    notify_filter=lambda client_id: f"clients/{STORE}/{_hex(client_id)}/command/notify/+",
    session_expiry_s=3600,
    payload_format=None,
    invoker_property=False,
    stop_must_find=False,
)
DOTNET: Final = Profile(
    name="dotnet",
    response_topic=lambda client_id: f"clients/{client_id}/{INVOKE}",
    no_local=False,
    retain_as_published=False,
    notify_filter=lambda client_id: f"clients/{STORE}/{client_id}/command/notify",
    session_expiry_s=3600,
    payload_format=0,
    invoker_property=True,
    stop_must_find=True,
)


class RefusedByStoreError(Exception):
    """The store answered with an error; the text without ``-ERR`` and line end."""


class Notice(NamedTuple):
    """One notification: ``value`` None for a delete."""

    key: bytes
    operation: str
    value: bytes | None
    version: Hlc


class SdkClient:
    """One connected client of an SDK."""

    def __init__(self, port: int, profile: Profile, client_id: str | None = None) -> None:
        self.profile = profile
        self.client_id = client_id or f"{profile.name}-{uuid.uuid4().hex[:12]}"
        self.notices: asyncio.Queue[Publish] = asyncio.Queue()
        self._clock = Hlc(0, 0, str(uuid.uuid4()))
        self._response_topic = profile.response_topic(self.client_id)
        self._answers: dict[bytes, asyncio.Future[Publish]] = {}
        self._subscribed_to_notices = False
        self.mqtt = MqttClient(
            "127.0.0.1",
            port,
            client_id=self.client_id,
            clean_start=False,
            session_expiry_s=profile.session_expiry_s,
            keep_alive_s=60,
            receive_maximum=65_535,
            user_properties=[("metriccategory", f"aiosdk-{profile.name}")],
            reconnect=False,
            on_message=self._message,
        )

    async def __aenter__(self) -> Self:
        await self.mqtt.connect()
        await self.mqtt.subscribe(
            [
                Subscription(
                    self._response_topic,
                    1,
                    no_local=self.profile.no_local,
                    retain_as_published=self.profile.retain_as_published,
                )
            ]
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.mqtt.disconnect()

    def stamp(self) -> Hlc:
        """A new value of the client's own clock."""
        self._clock = self._clock.ticked(_now_ms())
        return self._clock

    async def invoke(self, *words: bytes | str, ft: Hlc | None = None, persist: bool = False) -> Publish:
        """Send one request and give its answer, which has passed what an SDK checks of every answer."""
        args = [word.encode() if isinstance(word, str) else word for word in words]
        payload = b"*%d\r\n" % len(args) + b"".join(b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args)
        correlation = uuid.uuid4().bytes
        user = [
            ("__ts", self.stamp().padded()),
            ("__srcId", self.client_id),
            ("__protVer", "1.0"),
            ("$partition", self.client_id),
            ("$high_priority", ""),
        ]
        user += [("__invId", self.client_id)] if self.profile.invoker_property else []
        user += [("__ft", ft.padded())] if ft is not None else []
        user += [("aio-persistence", "true")] if persist else []
        properties = Properties(
            payload_format_indicator=self.profile.payload_format,
            message_expiry_interval=10,
            content_type="application/octet-stream",
            response_topic=self._response_topic,
            correlation_data=correlation,
            user_properties=user,
        )
        future: asyncio.Future[Publish] = asyncio.get_running_loop().create_future()
        self._answers[correlation] = future
        try:
            async with asyncio.timeout(60):
                await self.mqtt.publish(INVOKE, payload, qos=1, properties=properties)
                answer = await future
        finally:
            del self._answers[correlation]
        self._check(answer)
        return answer

    async def set(
        self,
        key: str | bytes,
        value: str | bytes,
        *options: str,
        px_ms: int | None = None,
        ft: Hlc | None = None,
        persist: bool = False,
    ) -> tuple[bool, Hlc]:
        """Whether it was set, and the version that the answer must have in both cases."""
        words = [*options, *(("PX", str(px_ms)) if px_ms is not None else ())]
        answer = await self.invoke("SET", key, value, *words, ft=ft, persist=persist)
        payload, version = _payload(answer), _version(answer)
        assert payload in (b"+OK\r\n", b":-1\r\n")
        assert version is not None, "an answer to SET without __ts"
        return payload == b"+OK\r\n", version

    async def get(self, key: str | bytes) -> tuple[bytes, Hlc] | None:
        """Value and version; None where there is no such key, told by the answer's payload and by its lack of one."""
        answer = await self.invoke("GET", key)
        payload, version = _payload(answer), _version(answer)
        if payload == b"$-1\r\n":
            assert version is None, "a version says that the key exists"
            return None
        assert version is not None
        return _bulk(payload), version

    async def delete(self, key: str | bytes, *, ft: Hlc | None = None) -> int:
        """How many keys were deleted."""
        return _number(_payload(await self.invoke("DEL", key, ft=ft)))

    async def vdelete(self, key: str | bytes, value: str | bytes) -> int:
        """How many keys were deleted, -1 where the value is another."""
        return _number(_payload(await self.invoke("VDEL", key, value)))

    async def observe(self, key: str | bytes) -> None:
        """Subscribe as the SDK does, then KEYNOTIFY."""
        if self.profile.notify_filter is not None and not self._subscribed_to_notices:
            (code,) = await self.mqtt.subscribe([Subscription(self.profile.notify_filter(self.client_id), 1)])
            assert code == 1
            self._subscribed_to_notices = True
        assert _payload(await self.invoke("KEYNOTIFY", key)) == b"+OK\r\n"

    async def unobserve(self, key: str | bytes) -> bool:
        """Whether it was observed."""
        payload = _payload(await self.invoke("KEYNOTIFY", key, "STOP"))
        assert payload in ((b"+OK\r\n",) if self.profile.stop_must_find else (b"+OK\r\n", b":0\r\n"))
        return payload == b"+OK\r\n"

    async def notice(self) -> Notice:
        """The next notification."""
        async with asyncio.timeout(60):
            return self._notice(await self.notices.get())

    async def settled(self) -> None:
        """Returns once everything that the store sent before is here: messages to one client keep their order."""
        await self.get("settled")

    def _message(self, message: Publish) -> None:
        correlation = message.properties.correlation_data
        future = self._answers.get(correlation) if correlation is not None else None
        if message.topic == self._response_topic and future is not None and not future.done():
            future.set_result(message)
        else:
            self.notices.put_nowait(message)

    def _check(self, answer: Publish) -> None:
        """What an SDK refuses in any answer."""
        properties = answer.properties
        assert properties.user_property("__stat") == "200"
        assert properties.user_property("__protVer") == "1.0"
        assert properties.content_type in (None, "application/octet-stream")
        version = _version(answer)
        if version is not None:
            assert version.wall_ms - _now_ms() <= MAX_DRIFT_MS, "clock drift exceeds maximum"
            self._clock = self._clock.merged(version, _now_ms())

    def _notice(self, message: Publish) -> Notice:
        head = f"clients/{STORE}/{_hex(self.client_id)}/command/notify/"
        assert message.topic.startswith(head), message.topic
        digits = message.topic.removeprefix(head)
        assert digits == digits.upper(), "the Rust SDK decodes upper case alone"
        version = _version(message)
        assert version is not None, "a notification without __ts is dropped"
        return _notice(bytes.fromhex(digits), message.payload, version)


def _notice(key: bytes, payload: bytes, version: Hlc) -> Notice:
    if payload == b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n":
        return Notice(key, "DELETE", None, version)
    head = b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n"
    assert payload.startswith(head), payload
    return Notice(key, "SET", _bulk(payload.removeprefix(head)), version)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _version(message: Publish) -> Hlc | None:
    text = message.properties.user_property("__ts")
    if text is None:
        return None
    version = parse(text)
    assert version is not None, text
    # The .NET SDK reads the counter as a signed 32-bit number.
    assert version.counter < 2**31
    return version


def _payload(answer: Publish) -> bytes:
    payload = answer.payload
    if payload.startswith(b"-"):
        assert payload.startswith(b"-ERR ")
        assert payload.endswith(b"\r\n")
        raise RefusedByStoreError(payload[5:-2].decode())
    return payload


def _number(payload: bytes) -> int:
    assert payload.startswith(b":")
    assert payload.endswith(b"\r\n")
    return int(payload[1:-2])


def _bulk(payload: bytes) -> bytes:
    line, _, rest = payload.partition(b"\r\n")
    size = int(line.removeprefix(b"$"))
    assert len(rest) == size + 2
    assert rest.endswith(b"\r\n")
    return rest[:-2]
