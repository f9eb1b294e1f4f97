"""Listeners that other machines can reach need users, unless they say ``anonymous: allow``; loopback does not."""

from __future__ import annotations

import asyncio
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, PenstockError, RefusedError
from penstock.mqtt.client import MqttClient
from penstock.node.config.node import NodeConfig
from penstock.node.node import Node
from penstock.node.security import NodeSecurity
from penstock.node.tube_broker import BrokerSettings, serve_broker
from penstock.runtime.io.files import Durability
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.service.attach import Attachment
from penstock.statestore.service.service import StateStoreService
from penstock.tube.producer import Producer
from tests.certificates import Authority
from tests.unit.node.test_node import config
from tests.unit.node.test_security import put_user, serving

EVERYWHERE = "0.0.0.0:0"
BROKER = {"bind": EVERYWHERE, "advertise": "edge-1:8123"}
PLACES: dict[str, dict[str, Any]] = {
    "mqtt": {"mqtt": EVERYWHERE},
    "mqtt.listeners.devices": {"mqtt": {"listeners": {"devices": {"bind": "edge-1:1884"}}}},
    "tube_master": {"tube_master": EVERYWHERE},
    "tube_broker": {"tube_broker": BROKER},
    "http": {"http": "[::]:0"},
    "tube_broker_http": {"tube_broker_http": "10.0.0.1:0"},
}


def status_of(page: str) -> int:
    with urllib.request.urlopen(page, timeout=60) as answer:
        return int(answer.status)


def checked(settings: dict[str, Any]) -> None:
    NodeSecurity(NodeConfig.model_validate(settings)).close()


def allowing(settings: dict[str, Any]) -> dict[str, Any]:
    """The same, with ``anonymous: allow`` at its listener."""
    if "listeners" in settings.get("mqtt", ()):
        (entry,) = settings["mqtt"]["listeners"].values()
        return {"mqtt": {"listeners": {"devices": {**entry, "anonymous": "allow"}}}}
    ((name, listener),) = settings.items()
    return {name: {**(listener if isinstance(listener, dict) else {"bind": listener}), "anonymous": "allow"}}


@pytest.mark.parametrize("place", PLACES)
def test_a_reachable_listener_needs_users_or_an_explicit_exception(place: str, tmp_path: Path) -> None:
    settings = PLACES[place]
    with pytest.raises(ConfigError) as refused:
        checked(settings)
    told = str(refused.value)
    for words in (
        f"without credentials: {place} (",
        "security.passwords (--passwords FILE) is not set",
        "`penstock user create passwords NAME`",
        f"{place}.anonymous: allow",
    ):
        assert words in told
    assert (f"--{place.replace('_', '-')}-anonymous allow" in told) is ("listeners" not in place)
    checked(allowing(settings))
    put_user(tmp_path / "passwords", "ann", b"ann")
    checked(settings | {"security": {"passwords": str(tmp_path / "passwords")}})


def test_all_open_listeners_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"mqtt \(0\.0\.0\.0:0\), http \(0\.0\.0\.0:0\)"):
        checked({"mqtt": EVERYWHERE, "http": EVERYWHERE})
    with pytest.raises(ConfigError) as refused:
        checked({"mqtt": {"bind": EVERYWHERE, "anonymous": "allow"}, "http": EVERYWHERE})
    assert "mqtt" not in str(refused.value)


def test_users_elsewhere_do_not_open_a_listener(tmp_path: Path) -> None:
    put_user(tmp_path / "passwords", "ann", b"ann")
    security = {"passwords": str(tmp_path / "passwords")}
    with pytest.raises(ConfigError, match=r"mqtt\.authentication has `anonymous`"):
        checked({"mqtt": {"bind": EVERYWHERE, "authentication": ["anonymous", "password"]}, "security": security})
    checked({"mqtt": {"bind": "127.0.0.1:0", "authentication": ["anonymous"]}, "security": security})


def test_the_listener_for_faults_passes_to_mqtt() -> None:
    with pytest.raises(ConfigError, match=r"mqtt \(0\.0\.0\.0:0\)"):
        checked({"mqtt_faults": EVERYWHERE})
    checked({"mqtt_faults": EVERYWHERE, "mqtt": {"bind": "127.0.0.1:0", "anonymous": "allow"}})


def test_certificates_are_credentials(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", "127.0.0.1")
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(authority.file)}
    checked({"mqtt": {"bind": EVERYWHERE, "transport": "tls", "tls": tls}})


async def test_a_reload_does_not_open_a_listener(tmp_path: Path) -> None:
    put_user(tmp_path / "passwords", "ann", b"ann")
    settings: dict[str, Any] = {"mqtt": EVERYWHERE, "security": {"passwords": str(tmp_path / "passwords")}}
    security = NodeSecurity(NodeConfig.model_validate(settings))
    assert not security.reload(lambda: NodeConfig.model_validate({"mqtt": EVERYWHERE}))
    assert security.failure is not None
    assert "without credentials" in str(security.failure)
    security.close()


async def test_a_broker_of_its_own(tmp_path: Path) -> None:
    settings = BrokerSettings(
        2,
        [parse_address("127.0.0.1:1")],
        tmp_path / "broker",
        parse_address(EVERYWHERE),
        parse_address(EVERYWHERE),
        advertise=parse_address("127.0.0.1:1"),
    )
    with pytest.raises(ConfigError) as refused:
        await serve_broker(settings, lambda _: None)
    told = str(refused.value)
    assert "--tube-broker (0.0.0.0:0), --tube-broker-http (0.0.0.0:0)" in told
    assert "--passwords FILE is not set" in told
    assert "--tube-broker-anonymous allow, --tube-broker-http-anonymous allow" in told


async def test_with_users_a_listener_may_still_accept_anonymous_clients(tmp_path: Path) -> None:
    """Every kind of listener says so for itself; wrong credentials stay wrong."""
    put_user(tmp_path / "passwords", "ann", b"ann")
    kept = config(tmp_path / "data").model_dump(exclude_unset=True)
    names = ("mqtt", "tube_master", "tube_broker", "http", "tube_broker_http")
    settings = NodeConfig.model_validate(
        {
            **kept,
            **{name: {"bind": "127.0.0.1:0", "anonymous": "allow"} for name in names},
            "security": {"passwords": tmp_path / "passwords"},
            "tube": {"topics": ["water"]},
        }
    )
    node = Node(settings)
    ready = await node.start()
    try:
        url = f"mqtt://{ready.mqtt}"
        async with MqttClient(url) as client, Producer(ready.tube_master) as producer:
            await client.publish("a", qos=1)
            await producer.send("water", b"1")
        async with Producer(ready.tube_master, username="ann", password="ann") as producer:
            await producer.send("water", b"2")
        with pytest.raises(RefusedError):
            await MqttClient(url, username="ann", password="wrong", reconnect=False).connect()
        with pytest.raises(PenstockError, match="authentication failed"):
            await Producer(ready.tube_master, username="ann", password="wrong").start()
        for page in (
            f"http://{ready.http}/metrics",
            f"http://{ready.tube_broker_http}/broker.htm?method=admin_get_methods",
        ):
            assert await asyncio.to_thread(status_of, page) == 200
    finally:
        await node.close()


@pytest.mark.parametrize("anonymous", [False, True])
async def test_a_store_attaches_with_a_user_or_to_a_broker_that_needs_none(tmp_path: Path, *, anonymous: bool) -> None:
    put_user(tmp_path / "passwords", "store", b"secret")
    put_user(tmp_path / "passwords", "ann", b"ann")
    mqtt = {"anonymous": "allow"} if anonymous else {}
    async with serving(mqtt=mqtt, security={"passwords": str(tmp_path / "passwords")}) as (_, bound):
        url = "mqtt://{}:{}".format(*bound["mqtt"])
        service = StateStoreService(tmp_path / "store", Durability.MEMORY)
        stranger = Attachment(service, partial(MqttClient, url, reconnect=False))
        if anonymous:
            async with stranger, StateStoreClient.connect(url) as store:
                assert (await store.set("k", "v")).applied
            return
        with pytest.raises(PenstockError, match="0x87"):
            await stranger.__aenter__()
        connect = partial(MqttClient, url, username="store", password="secret")
        service = StateStoreService(tmp_path / "store", Durability.MEMORY)
        async with Attachment(service, connect), StateStoreClient.connect(url, username="ann", password="ann") as store:
            assert (await store.set("k", "v")).applied
