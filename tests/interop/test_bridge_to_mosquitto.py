"""A bridge from our broker to Mosquitto's: both directions, with Mosquitto restarted in between, and over TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trustme

from penstock.mqtt.bridge import Bridge, BridgeSettings, BridgeTopic, Direction
from penstock.mqtt.client import MqttClient, TlsOptions
from penstock.mqtt.server import MqttServer
from tests.interop.mosquitto import Mosquitto

DEADLINE_S = 30


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_restarts_of_mosquitto_lose_nothing_in_either_direction(tmp_path: Path) -> None:
    mosquitto = Mosquitto(tmp_path, persistent=True)
    await mosquitto.start()
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    topics = (BridgeTopic("up/#", Direction.OUT, 2), BridgeTopic("down/#", Direction.IN, 2))
    bridge = Bridge(BridgeSettings("plant", mosquitto.url, topics, window=20), server)
    await bridge.start()
    session: dict[str, Any] = {"clean_start": False, "session_expiry_s": 600, "jitter": lambda: 0.0}
    here = MqttClient("127.0.0.1", port, client_id="here")
    there = MqttClient(mosquitto.url, client_id="there", **session)
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: bridge.stats.connected == 1)
        async with (
            here,
            there,
            here.subscription("down/#", qos=2) as into,
            there.subscription("up/#", qos=2) as out,
        ):
            for batch in range(3):
                numbers = range(batch * 50, batch * 50 + 50)
                sending = [asyncio.create_task(here.publish("up/1", str(n), qos=2)) for n in numbers]
                sending += [asyncio.create_task(there.publish("down/1", str(n), qos=2)) for n in numbers]
                if batch == 1:
                    await asyncio.gather(*sending)
                await mosquitto.stop()
                await mosquitto.start()
                await asyncio.gather(*sending)
            for stream in (out, into):
                assert [int((await anext(stream)).payload) for _ in range(150)] == list(range(150))
            assert (len(out), len(into)) == (0, 0), "nothing arrived twice"
        await bridge.close()
    await server.close()
    await mosquitto.stop()


async def test_tls_to_mosquitto(tmp_path: Path) -> None:
    authority = trustme.CA()
    names = ("ca", "cert", "key", "client")
    files = {name: tmp_path / f"{name}.pem" for name in names}
    authority.cert_pem.write_to_path(str(files["ca"]))
    server_cert = authority.issue_cert("127.0.0.1")
    server_cert.private_key_pem.write_to_path(str(files["key"]))
    server_cert.cert_chain_pems[0].write_to_path(str(files["cert"]))
    authority.issue_cert("site-7").private_key_and_cert_chain_pem.write_to_path(str(files["client"]))
    tls = f"cafile {files['ca']}\ncertfile {files['cert']}\nkeyfile {files['key']}\nrequire_certificate true"
    mosquitto = Mosquitto(tmp_path, "", tls)
    await mosquitto.start()
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    url = f"mqtts://127.0.0.1:{mosquitto.ports[1]}"
    options = TlsOptions(files["ca"], files["client"])
    bridge = Bridge(BridgeSettings("plant", url, (BridgeTopic("a"),), tls=options, remote_status_topic="s"), server)
    async with (
        asyncio.timeout(DEADLINE_S),
        MqttClient(mosquitto.url) as there,
        there.subscription(["a", "s"]) as out,
    ):
        await bridge.start()
        assert [(m.topic, m.payload) for m in [await anext(out)]] == [("s", b"1")]
        async with MqttClient("127.0.0.1", port) as here:
            await here.publish("a", b"x")
        assert (await anext(out)).payload == b"x"
        await bridge.close()
        assert (await anext(out)).payload == b"0"
    await server.close()
    await mosquitto.stop()
