"""Only the store publishes to the response and notify topics of the SDKs; other topics stay open."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import RefusedError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Will
from penstock.statestore.binding import INVOKE, client_response_topic, notify_topic
from tests.conformance.statestore.node import StoreNode
from tests.conformance.statestore.sdk_clients import DOTNET, GO, RUST, Profile, SdkClient

TOPICS = [
    GO.response_topic("victim"),
    RUST.response_topic("victim"),
    DOTNET.response_topic("victim"),
    client_response_topic("victim"),
    "clients/victim/services/statestore/_any_/command/invoke/response",
    notify_topic("victim", b"key"),
    f"clients/{INVOKE.removesuffix('/command/invoke')}/victim/command/notify",
]


@pytest.mark.parametrize("topic", TOPICS)
async def test_no_client_publishes_to_the_response_or_notify_topic_of_another(node: StoreNode, topic: str) -> None:
    async with MqttClient(node.url, client_id="attacker") as attacker:
        for qos in (1, 2):
            for retain in (False, True):
                with pytest.raises(RefusedError) as refused:
                    await attacker.publish(topic, b"forged", qos=qos, retain=retain)
                assert refused.value.code == 0x87
    will = MqttClient(node.url, client_id="dying", will=Will(topic, b"forged", 1), reconnect=False)
    with pytest.raises(RefusedError) as refused:
        await will.connect()
    assert refused.value.code == 0x87
    assert node.server.stats.retained == 0


@pytest.mark.parametrize("profile", [GO, RUST, DOTNET], ids=lambda profile: profile.name)
async def test_a_forged_notification_at_qos_0_is_not_delivered(node: StoreNode, profile: Profile) -> None:
    async with SdkClient(node.port, profile, "victim") as victim, MqttClient(node.url) as attacker:
        await victim.observe("key")
        await attacker.publish(notify_topic("victim", b"key"), b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n", qos=0)
        await attacker.publish("after", b"", qos=1)
        await victim.set("key", "1")
        assert (await victim.notice()).operation == "SET"
        await victim.settled()
        assert victim.notices.empty()
        assert node.server.stats.refused_unauthorized == 1


@pytest.mark.parametrize("response_topic", [None, "clients/asks/services/press/start/response"])
async def test_clients_send_requests_to_each_other_on_topics_of_their_own(
    node: StoreNode, response_topic: str | None
) -> None:
    asking = MqttClient(node.url, client_id="asks", response_topic=response_topic)
    serving = MqttClient(node.url, client_id="serves")
    async with asking as asks, serving as serves, serves.subscription("press/start") as requests:
        answer = asyncio.create_task(asks.request("press/start", b"now"))
        await serves.respond(await anext(requests), b"done")
        assert (await answer).payload == b"done"
