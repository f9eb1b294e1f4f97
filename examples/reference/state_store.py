# Send a command of the protocol with any MQTT 5 client. Libraries for applications: "Use the state store from Python".
import asyncio
import os
import time

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec import Properties

BROKER = os.environ.get("PENSTOCK_BROKER", "mqtt://127.0.0.1:1883")
TOPIC = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke"


async def main() -> None:
    async with MqttClient(BROKER, client_id="press-1") as client:
        response = await client.request(  # sets Response Topic and Correlation Data, and waits for the response
            TOPIC,
            b"*3\r\n$3\r\nSET\r\n$5\r\nlimit\r\n$2\r\n90\r\n",  # RESP3: an array of bulk strings
            properties=Properties(
                user_properties=[
                    ("__ts", f"{time.time_ns() // 1_000_000:015}:00000:press-1"),  # required for SET
                    ("__protVer", "1.0"),  # the form of the SDKs
                ]
            ),
        )
        properties = dict(response.properties.user_properties)
        print(response.payload.decode().strip(), properties["__stat"])  # the version of the key is in __ts


asyncio.run(main())
