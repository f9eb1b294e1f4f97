"""The state store attached to Mosquitto: commands, locks, fencing and notifications for clients that subscribe."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import trustme

from penstock.errors import ConfigError, RefusedError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.properties import Properties
from penstock.runtime.io.files import Durability
from penstock.statestore.binding import INVOKE
from penstock.statestore.client.client import Condition, StateStoreClient
from penstock.statestore.client.locks import Lease
from penstock.statestore.codec.resp3 import encode_array
from penstock.statestore.errors import FencingError
from penstock.statestore.service.attach import Attachment
from penstock.statestore.service.service import StateStoreService
from tests.interop.mosquitto import Mosquitto

DEADLINE_S = 60


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Mosquitto]:
    mosquitto = Mosquitto(tmp_path)
    await mosquitto.start()
    yield mosquitto
    await mosquitto.stop()


def attach(broker: Mosquitto, path: Path, *, lease_s: float = 3600, client_id: str = "store") -> Attachment:
    service = StateStoreService(path, Durability.FLUSHED)
    return Attachment(service, partial(MqttClient, broker.url), client_id=client_id, lease_s=lease_s)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_commands_locks_fencing_and_notifications(broker: Mosquitto, tmp_path: Path) -> None:
    async with (
        attach(broker, tmp_path / "store") as attached,
        StateStoreClient.connect(broker.url, client_id="a") as a,
        StateStoreClient.connect(broker.url, client_id="b") as b,
        asyncio.timeout(DEADLINE_S),
    ):
        assert await a.get("k") is None
        first = await a.set("k", b"\x00v")
        assert await b.get("k") == (b"\x00v", first.version)
        assert not (await b.set("k", "w", condition=Condition.NX)).applied
        assert [await b.vdelete("k", "x"), await b.vdelete("k", b"\x00v"), await b.delete("k")] == [-1, 1, 0]
        async with a.observe("k") as changes:
            written = await b.set("k", "1", ttl_ms=100)
            change = await anext(changes)
            assert (change.operation, change.value, change.version) == ("SET", b"1", written.version)
            assert (await anext(changes)).operation == "DELETE"
        async with Lease(a, "lock", holder="a") as lease:
            old = lease.token
            waiting = asyncio.create_task(Lease(b, "lock", holder="b").acquire())
            await a.set("output", "a", fencing_token=old)
        await b.set("output", "b", fencing_token=await waiting)
        with pytest.raises(FencingError):
            await a.set("output", "late", fencing_token=old)
        assert (attached.stats.dropped, attached.stats.undelivered_reason) == (0, 0)


async def test_data_and_requests_survive_the_store(broker: Mosquitto, tmp_path: Path) -> None:
    async with StateStoreClient.connect(broker.url, client_id="a") as a, asyncio.timeout(DEADLINE_S):
        async with attach(broker, tmp_path / "store"):
            written = await a.set("k", "v")
        # Asked while there is no store: the broker keeps it, and the store answers once it is back.
        reading = asyncio.create_task(a.get("k"))
        await asyncio.sleep(0.05)
        async with attach(broker, tmp_path / "store"):
            assert await reading == (b"v", written.version)


async def test_observations_end_without_a_subscriber(broker: Mosquitto, tmp_path: Path) -> None:
    service_path = tmp_path / "store"
    async with (
        attach(broker, service_path) as attached,
        StateStoreClient.connect(broker.url, client_id="b") as b,
        asyncio.timeout(DEADLINE_S),
    ):
        gone = StateStoreClient.connect(broker.url, client_id="gone")
        await gone.__aenter__()
        context = gone.observe("k")
        await context.__aenter__()
        # It leaves without STOP, as one that crashes.
        await gone._mqtt.disconnect(session_expiry_s=0)
        assert attached._service.observations == 1
        await b.set("k", "v")
        await until(lambda: attached._service.observations == 0)
        assert attached.stats.undelivered_reason == 1


async def test_observations_of_a_silent_client_end_with_the_lease(broker: Mosquitto, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with (
        attach(broker, tmp_path / "store", lease_s=1.0) as attached,
        StateStoreClient.connect(broker.url, client_id="a") as a,
        StateStoreClient.connect(broker.url, client_id="silent") as silent,
        asyncio.timeout(DEADLINE_S),
        a.observe("k"),
        silent.observe("k"),
    ):
        while attached._service.observations == 2:
            await a.get("k")
            await asyncio.sleep(0.02)
        assert loop.time() - start >= 0.9
        assert attached.stats.forgotten == 1


async def test_two_stores_at_one_broker_are_refused(broker: Mosquitto, tmp_path: Path) -> None:
    async with attach(broker, tmp_path / "store") as attached, asyncio.timeout(DEADLINE_S):
        for client_id in ("other", "store"):
            with pytest.raises(ConfigError, match="has a state store already"):
                await attach(broker, tmp_path / "other", client_id=client_id).__aenter__()
        assert not attached.ended.done()
        # Another client with its identifier: both take each other's place, until the store ends.
        async with MqttClient(broker.url, client_id="store"):
            error = await attached.ended
        assert isinstance(error, RefusedError)
        assert "another client took over the session of 'store'" in error.what


async def test_an_observer_must_identify_itself(broker: Mosquitto, tmp_path: Path) -> None:
    async with (
        attach(broker, tmp_path / "store"),
        MqttClient(broker.url, client_id="anonymous") as mqtt,
        mqtt.subscription("answers/here") as answers,
        asyncio.timeout(DEADLINE_S),
    ):
        user = [("__ts", "0:0:c"), ("__protVer", "1.0")]
        properties = Properties(response_topic="answers/here", correlation_data=b"1", user_properties=user)
        await mqtt.publish(INVOKE, encode_array([b"KEYNOTIFY", b"k"]), properties=properties)
        answer = await anext(answers)
        assert answer.properties.user_property("__stat") == "400"
        assert answer.properties.user_property("__propName") == "__srcId"
        await mqtt.publish(INVOKE, encode_array([b"GET", b"k"]), properties=properties)
        assert (await anext(answers)).payload == b"$-1\r\n"


async def test_the_command_line_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key", "client")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    server = authority.issue_cert("127.0.0.1")
    server.private_key_pem.write_to_path(str(files["key"]))
    server.cert_chain_pems[0].write_to_path(str(files["cert"]))
    authority.issue_cert("line-3").private_key_and_cert_chain_pem.write_to_path(str(files["client"]))
    tls = f"cafile {files['ca']}\ncertfile {files['cert']}\nkeyfile {files['key']}\nrequire_certificate true"
    broker = Mosquitto(tmp_path, tls, "")
    await broker.start()

    async def kv(*args: str) -> tuple[int | None, bytes, bytes]:
        main = "from penstock.cli.main import main; raise SystemExit(main())"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", main, "kv", *args, "--broker", f"mqtts://127.0.0.1:{broker.port}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return process.returncode, out, err

    trust = ("--ca-file", str(files["ca"]), "--cert-file", str(files["client"]))
    try:
        service = StateStoreService(tmp_path / "store", Durability.FLUSHED)
        connect = partial(MqttClient, f"mqtt://127.0.0.1:{broker.ports[1]}")
        async with Attachment(service, connect), asyncio.timeout(DEADLINE_S):
            assert (await kv("set", "k", "v", *trust))[0] == 0
            assert (await kv("get", "k", *trust))[:2] == (0, b"v")
            status, _, err = await kv("get", "k")
            assert status == 1
            assert b"hint: set the file with the certificate of the server's authority (--ca-file, ca_file)" in err
    finally:
        await broker.stop()


async def test_the_command(broker: Mosquitto, tmp_path: Path) -> None:
    main = "from penstock.cli.main import main; raise SystemExit(main())"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", main, "statestore", "attach", "--json", "--data-dir", str(tmp_path / "data")),
        env=os.environ | {"PENSTOCK_BROKER": broker.url},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        ready = await process.stdout.readline()
        assert ready.startswith(b'{"event": "ready", "broker": "mqtt://127.0.0.1:')
        async with StateStoreClient.connect(broker.url) as store:
            assert (await store.set("k", "v")).applied
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
