"""MQTT 5 client on asyncio: reconnects, keeps what has no answer, and calls nobody twice for one message.

    async with MqttClient("mqtt://127.0.0.1:1883", client_id="pump-3") as client:
        await client.publish("line/3/flow", b"12.5")
        async with client.subscription("line/+/alarm") as messages:
            async for message in messages:
                ...

:mod:`~penstock.mqtt.client.client` is what is called, :mod:`~penstock.mqtt.client.driver` keeps the connection,
:mod:`~penstock.mqtt.client.inbox` hands out what comes in.
"""

from penstock.mqtt.client.authentication import ScramAuthentication, TokenAuthentication
from penstock.mqtt.client.client import MqttClient
from penstock.mqtt.client.inbox import MessageStream
from penstock.mqtt.engine.client import EnhancedAuthentication
from penstock.runtime.io.tls import TlsOptions

__all__ = [
    "EnhancedAuthentication",
    "MessageStream",
    "MqttClient",
    "ScramAuthentication",
    "TlsOptions",
    "TokenAuthentication",
]
