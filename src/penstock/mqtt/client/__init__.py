"""MQTT 5 client on asyncio. It reconnects, sends unacknowledged messages again, and removes duplicates.

    async with MqttClient("mqtt://127.0.0.1:1883", client_id="pump-3") as client:
        await client.publish("line/3/flow", b"12.5")
        async with client.subscription("line/+/alarm") as messages:
            async for message in messages:
                ...

:mod:`~penstock.mqtt.client.client` has the interface, :mod:`~penstock.mqtt.client.driver` connects and reconnects,
:mod:`~penstock.mqtt.client.inbox` dispatches received messages. :class:`TlsOptions` is imported on first use, since
most commands connect without TLS.
"""

from typing import TYPE_CHECKING, Any

from penstock.mqtt.client.client import MqttClient, ScramAuthentication, TokenAuthentication
from penstock.mqtt.client.inbox import MessageStream
from penstock.mqtt.engine.client.client import EnhancedAuthentication

if TYPE_CHECKING:
    from penstock.runtime.io.tls import TlsOptions

__all__ = [
    "EnhancedAuthentication",
    "MessageStream",
    "MqttClient",
    "ScramAuthentication",
    "TlsOptions",
    "TokenAuthentication",
]


def __getattr__(name: str) -> Any:
    if name != "TlsOptions":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.runtime.io.tls import TlsOptions

    return TlsOptions
