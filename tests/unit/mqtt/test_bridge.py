"""A bridge between two brokers of ours: both directions, outages, loops, refusals, states."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.errors import RefusedError
from penstock.mqtt import bridge as bridge_module
from penstock.mqtt.bridge import (
    HOPS,
    NO_EXPIRY,
    UNLISTED_EXPIRY_S,
    Bridge,
    BridgeSettings,
    BridgeTopic,
    Direction,
    end_removed_bridges,
    expire_unlisted_bridges,
)
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.listener_access import AccessRules, AccessStats, InProcessAccess
from penstock.mqtt.password_checks import PasswordChecks
from penstock.mqtt.server import MqttServer
from penstock.mqtt.service import Inbound, Service
from penstock.security.policy_file import parse_policy
from tests.ports import free_port

DEADLINE_S = 60
STATE = "$SYS/broker/bridge/plant/state"


class LogService(Service):
    """Takes ``log/#`` here: what came in over the bridge is acknowledged there once this has it."""

    filters = ("log/#",)
    exclusive = False
    reserved = ("reserved/#",)

    def __init__(self) -> None:
        self.held: list[Inbound] = []
        self.code = 0
        self.came = asyncio.Event()

    def receive(self, message: Inbound) -> None:
        self.held.append(message)
        self.came.set()

    def disconnected(self, client_id: str) -> None: ...


class Sites:
    """Here and there, a bridge between them, and a client on each side that listens to everything."""

    def __init__(self) -> None:
        self.service = LogService()
        self.here = MqttServer(services=[self.service])
        self.there = MqttServer()
        self.bridge: Bridge | None = None
        self.port = free_port()

    async def start(self) -> None:
        _, here = await self.here.start("127.0.0.1", 0)
        self.at_here = MqttClient("127.0.0.1", here)
        await self.at_here.connect()
        await self.start_there()
        self.at_there = MqttClient("127.0.0.1", self.port, jitter=lambda: 0.0)
        await self.at_there.connect()

    async def start_there(self) -> None:
        _, self.port = await self.there.start("127.0.0.1", self.port)

    async def run_bridge(self, *topics: BridgeTopic, **options: Any) -> Bridge:
        settings = BridgeSettings("plant", f"mqtt://127.0.0.1:{self.port}", topics, **options)
        bridge = self.bridge = Bridge(settings, self.here)
        await bridge.start()
        return bridge

    async def close(self) -> None:
        if self.bridge is not None:
            await self.bridge.close()
        for client in (self.at_here, self.at_there):
            await client.disconnect()
        for server in (self.here, self.there):
            await server.close()


@pytest.fixture
async def sites() -> AsyncIterator[Sites]:
    pair = Sites()
    await pair.start()
    async with asyncio.timeout(DEADLINE_S):
        yield pair
        await pair.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_both_directions_with_prefixes(sites: Sites) -> None:
    bridge = await sites.run_bridge(
        BridgeTopic("line/#", Direction.OUT, 1, remote_prefix="site-7/"),
        BridgeTopic("#", Direction.IN, 1, local_prefix="cloud/", remote_prefix="commands/"),
    )
    async with sites.at_there.subscription("site-7/#") as out, sites.at_here.subscription("cloud/#") as into:
        await until(lambda: sites.there.stats.subscriptions >= 2)
        await asyncio.gather(*(sites.at_here.publish("line/1", str(n)) for n in range(300)))
        got = [await anext(out) for _ in range(300)]
        assert [int(m.payload) for m in got] == list(range(300))
        assert (got[0].topic, got[0].properties.user_properties) == ("site-7/line/1", [(HOPS, "1")])
        await sites.at_there.publish("commands/stop", b"now")
        assert (await anext(into)).topic == "cloud/stop"
    await until(lambda: (bridge.stats.sent, bridge.stats.received) == (300, 1))
    assert bridge.stats.connected == 1


async def test_outbound_messages_wait_while_the_remote_broker_is_unavailable(sites: Sites) -> None:
    bridge = await sites.run_bridge(BridgeTopic("a"), window=5)
    await until(lambda: bridge.stats.connected == 1)
    await sites.there.close()
    await until(lambda: bridge.stats.connected == 0)
    for n in range(50):
        assert await sites.at_here.publish("a", str(n)) == 0
    sites.there = MqttServer()
    received: list[Publish] = []
    async with asyncio.timeout(DEADLINE_S):
        await sites.start_there()
        await sites.at_there.wait_connected()
        sites.at_there.listen("a", received.append)
        await sites.at_there.subscribe("a")
        await until(lambda: bridge.stats.sent == 50)
    assert [int(m.payload) for m in received] == sorted(int(m.payload) for m in received)


async def test_outbound_messages_wait_for_a_stopped_bridge(sites: Sites) -> None:
    first = await sites.run_bridge(BridgeTopic("a"), BridgeTopic("old"))
    await until(lambda: first.stats.connected == 1)
    await first.close()
    await sites.at_here.publish("a", b"kept")
    async with sites.at_there.subscription("a") as out:
        await sites.run_bridge(BridgeTopic("a"))
        assert (await anext(out)).payload == b"kept"
    assert sites.here.subscriptions_of("$bridge/plant") == ["a"], (
        "a topic that is gone from the settings is not carried"
    )
    assert await sites.at_here.publish("old") == 0x10


async def test_sessions_of_removed_bridges_end(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    bridge = await sites.run_bridge(BridgeTopic("a"))
    await until(lambda: bridge.stats.connected == 1)
    await bridge.close()
    other = MqttClient("127.0.0.1", sites.at_here.port, client_id="$bridge/other", session_expiry_s=60)
    async with other:
        await other.subscribe("other")
    await sites.at_here.publish("a", b"waits")
    await end_removed_bridges(sites.here, ["plant"])
    assert sites.here.subscriptions_of("$bridge/plant") == ["a"]
    await end_removed_bridges(sites.here, [])
    assert await sites.at_here.publish("a") == 0x10
    assert sites.here.subscriptions_of("$bridge/other") == ["other"], "it belongs to a client"
    assert "bridge plant is not configured any more: its session ended; messages dropped: 1" in caplog.text


async def test_the_queue_of_a_bridge_that_another_node_of_the_cluster_lists_remains(
    sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = await sites.run_bridge(BridgeTopic("a"))
    await until(lambda: bridge.stats.connected == 1)
    await bridge.close()
    session = sites.here.broker.sessions["$bridge/plant"]
    assert await expire_unlisted_bridges(sites.here, ["plant"]) is not None
    assert session.expiry_s == NO_EXPIRY
    for n in range(3):
        assert await sites.at_here.publish("a", str(n)) == 0
    warning = await expire_unlisted_bridges(sites.here, ["another"])
    session = sites.here.broker.sessions["$bridge/plant"]
    assert (session.connection, session.expiry_s) == (None, UNLISTED_EXPIRY_S)
    assert "bridges of another node are not configured on this one: plant; messages waiting: 3" in caplog.text
    ends_at = session.ends_at
    await expire_unlisted_bridges(sites.here, [])
    assert session.ends_at == ends_at, "a later takeover does not extend it"
    assert await sites.at_here.publish("a", b"3") == 0
    found = warning()
    assert found is not None
    assert found.what.endswith("messages waiting: 4")
    async with sites.at_there.subscription("a") as out:
        await sites.run_bridge(BridgeTopic("a"))
        assert [int((await anext(out)).payload) for _ in range(4)] == [0, 1, 2, 3]
    assert session.expiry_s == NO_EXPIRY
    await end_removed_bridges(sites.here, [])
    assert warning() is None


async def test_a_node_that_may_have_lost_its_lease_sends_nothing_to_the_other_broker(sites: Sites) -> None:
    leads, asked = [True], asyncio.Event()

    def may_send() -> bool:
        if not leads[0]:
            asked.set()
        return leads[0]

    sites.here.gate(may_send)
    bridge = await sites.run_bridge(BridgeTopic("a"))
    await until(lambda: bridge.stats.connected == 1)
    leads[0] = False
    sites.here.outlet.publish(Publish("a", b"1", 1))
    await asked.wait()
    await bridge.close()
    asked.clear()
    bridge = await sites.run_bridge(BridgeTopic("a"))
    await asked.wait()
    assert (bridge.stats.connects, bridge.stats.sent) == (0, 0)
    await bridge.close()
    leads[0] = True
    async with sites.at_there.subscription("a") as out:
        await sites.run_bridge(BridgeTopic("a"))
        assert (await anext(out)).payload == b"1"


async def test_inbound_messages_are_acknowledged_once_accepted_locally(sites: Sites) -> None:
    bridge = await sites.run_bridge(BridgeTopic("log/#", Direction.IN))
    await until(lambda: sites.there.stats.subscriptions == 1)
    await sites.at_there.publish("log/x", b"1")
    await sites.service.came.wait()
    assert (sites.there.stats.inflight, bridge.stats.received) == (1, 0)
    sites.service.held[0].settle()
    await until(lambda: bridge.stats.received == 1 and sites.there.stats.inflight == 0)


async def test_messages_do_not_loop_between_bridges(sites: Sites) -> None:
    bridge = await sites.run_bridge(BridgeTopic("#", Direction.BOTH))
    await until(lambda: sites.there.stats.subscriptions == 1)
    async with sites.at_here.subscription("t/#") as here, sites.at_there.subscription("t/#") as there:
        await sites.at_here.publish("t/1")
        await sites.at_there.publish("t/2")
        assert {(await anext(here)).topic for _ in range(2)} == {"t/1", "t/2"}
        assert {(await anext(there)).topic for _ in range(2)} == {"t/1", "t/2"}
        second = Bridge(
            BridgeSettings("second", f"mqtt://127.0.0.1:{sites.port}", (BridgeTopic("#", Direction.BOTH),)), sites.here
        )
        await second.start()  # a loop on purpose: out over one, in over the other
        await until(lambda: sites.there.stats.subscriptions == 3)
        await sites.at_here.publish("t/3")
        await until(lambda: bridge.stats.dropped_hops + second.stats.dropped_hops >= 2)
        await second.close()
        assert len(here) + len(there) <= 8


async def test_refused_messages_do_not_stop_the_rest(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    bridge = await sites.run_bridge(BridgeTopic("log/#", Direction.IN))
    await until(lambda: sites.there.stats.subscriptions == 1)
    for n in range(3):
        await sites.at_there.publish("log/x", str(n))
    await until(lambda: len(sites.service.held) == 3)
    for message, code in zip(sites.service.held, (0x87, 0x97, 0), strict=True):
        message.settle(code, "so")
    await until(lambda: len(sites.service.held) == 4)
    assert sites.service.held[3].publish.payload == b"1", "what found no room is offered again"
    sites.service.held[3].settle()
    await until(lambda: bridge.stats.received == 2)
    assert (bridge.stats.dropped_refused, bridge.stats.retries) == (1, 1)
    assert "dropped a message to 'log/x'" in caplog.text


async def test_refused_messages_of_a_topic_stay_in_order_and_delay_no_other_topic(sites: Sites) -> None:
    bridge = await sites.run_bridge(BridgeTopic("log/#", Direction.IN))
    await until(lambda: sites.there.stats.subscriptions == 1)
    held = sites.service.held
    accepted: list[bytes] = []
    for n in range(3):
        await sites.at_there.publish("log/x", str(n))
    await until(lambda: len(held) == 3)
    await sites.at_there.publish("log/x", b"3")
    await sites.at_there.publish("log/y", b"other")
    while len(accepted) < 5:
        await until(lambda: len(held) > 0)
        message = held.pop(0)
        if message.publish.topic == "log/y" or b"other" in accepted:
            accepted.append(message.publish.payload)
            message.settle()
        else:
            message.settle(0x97)
    assert accepted == [b"other", b"0", b"1", b"2", b"3"]
    assert bridge.stats.retries >= 3
    for n in range(4, 6):
        await sites.at_there.publish("log/x", str(n))
    await until(lambda: len(held) == 2)
    assert [message.publish.payload for message in held] == [b"4", b"5"], "they do not wait for each other any more"
    for message in held:
        message.settle()
    await until(lambda: bridge.stats.received == 7)


async def test_a_topic_is_sent_faster_again_while_later_messages_of_it_still_wait(sites: Sites) -> None:
    bridge = await sites.run_bridge(BridgeTopic("log/#", Direction.IN))
    await until(lambda: sites.there.stats.subscriptions == 1)
    held = sites.service.held
    await sites.at_there.publish("log/x", b"0")
    await until(lambda: len(held) == 1)
    held.pop().settle(0x97)
    for n in range(1, 7):
        await sites.at_there.publish("log/x", str(n))
    for together in ([b"0"], [b"1", b"2"], [b"3", b"4", b"5", b"6"]):
        await until(lambda: len(held) == len(together))
        assert [message.publish.payload for message in held] == together
        for message in [*held]:
            held.remove(message)
            message.settle()
    await until(lambda: bridge.stats.received == 7)


async def test_the_time_for_which_the_destination_refuses_a_message_counts_towards_its_expiry(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = await sites.run_bridge(BridgeTopic("log/#", Direction.IN))
    await until(lambda: sites.there.stats.subscriptions == 1)
    held = sites.service.held

    async def refuse(interval: int) -> None:
        await sites.at_there.publish("log/x", properties=Properties(message_expiry_interval=interval))
        await until(lambda: len(held) == 1)
        monkeypatch.setattr(bridge_module, "monotonic_ms", lambda: 3_600_000)
        held.pop().settle(0x97)

    monkeypatch.setattr(bridge_module, "monotonic_ms", lambda: 0)
    await refuse(7200)
    await until(lambda: len(held) == 1)
    message = held.pop()
    assert 3000 < (message.publish.properties.message_expiry_interval or 0) <= 3600
    message.settle()
    monkeypatch.setattr(bridge_module, "monotonic_ms", lambda: 0)
    await refuse(3600)
    await until(lambda: bridge.stats.dropped_refused == 1)
    assert bridge.stats.received == 1


async def test_a_bridge_publishes_no_reserved_topic(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    bridge = await sites.run_bridge(BridgeTopic("#", Direction.IN))
    async with sites.at_here.subscription("#") as here:
        await until(lambda: sites.there.stats.subscriptions == 1)
        for topic in ("reserved/x", "open/x"):
            await sites.at_there.publish(topic, b"")
        assert (await anext(here)).topic == "open/x"
    assert bridge.stats.dropped_refused == 1
    assert "dropped a message to 'reserved/x'" in caplog.text


async def test_a_bridge_without_room_for_its_state_carries_all_the_same(
    sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    sites.here._broker.retained.max_messages = 0
    bridge = await sites.run_bridge(BridgeTopic("a"))
    async with sites.at_there.subscription("a") as out:
        for n in range(2):
            await until(lambda: bridge.stats.connected == 1)
            await sites.at_here.publish("a", str(n))
            assert (await anext(out)).payload == b"%d" % n
            if not n:
                sites.there.outlet.disconnect("penstock-plant", 0x89)
                await until(lambda: bridge.stats.connects == 2)
    assert "its state was not published on this broker" in caplog.text


async def test_a_bridge_that_is_thrown_out_each_time_comes_back_ever_later(
    sites: Sites, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_bridge: Bridge, _remote: MqttClient) -> None:
        raise RefusedError("no such topic for you")

    monkeypatch.setattr("penstock.mqtt.bridge.RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(Bridge, "_subscribe_remote", refused)
    bridge = await sites.run_bridge(BridgeTopic("log/#", Direction.IN))
    await until(lambda: bridge.stats.connects == 4)
    tries = [record.fields["next_try_s"] for record in caplog.records if hasattr(record, "fields")]
    assert tries[:3] == [0.01, 0.02, 0.04]


async def test_states_on_both_sides(sites: Sites) -> None:
    async with sites.at_here.subscription(STATE) as here, sites.at_there.subscription("sites/7") as there:
        bridge = await sites.run_bridge(BridgeTopic("a"), remote_status_topic="sites/7")
        states = [(await anext(here)).payload for _ in range(2)]
        assert states == [b"0", b"1"]
        assert (await anext(there)).payload == b"1"
        await bridge.close()
        assert (await anext(here)).payload == b"0"
        assert (await anext(there)).payload == b"0"


async def test_retained_messages_cross(sites: Sites) -> None:
    await sites.at_here.publish("kept", b"before", retain=True)
    await sites.run_bridge(BridgeTopic("kept"))
    await until(lambda: sites.there.stats.retained == 1)
    async with sites.at_there.subscription("kept") as out:
        message = await anext(out)
        assert (message.payload, message.retain) == (b"before", True)


async def test_a_bridge_that_acts_for_a_user_is_bound_by_its_policies(sites: Sites) -> None:
    policy = parse_policy("""
rules:
  - principals: {usernames: [plant]}
    brokerResources:
      - {method: Subscribe, topics: ["out/#"]}
      - {method: Publish, topics: ["in/ok"]}
""")
    checks = PasswordChecks()
    gate = InProcessAccess("plant", "$bridge/plant", AccessRules(policy=policy), checks, AccessStats(), sites.here.now)
    settings = BridgeSettings(
        "plant",
        f"mqtt://127.0.0.1:{sites.port}",
        (BridgeTopic("out/#", Direction.OUT), BridgeTopic("in/#", Direction.IN)),
    )
    bridge = sites.bridge = Bridge(settings, sites.here, gate)
    await bridge.start()
    await until(lambda: bridge.stats.connected == 1)
    async with sites.at_there.subscription("out/#") as there, sites.at_here.subscription("in/#") as here:
        await sites.at_here.publish("out/1", b"x")
        assert (await anext(there)).topic == "out/1"
        await sites.at_there.publish("in/no", b"refused")
        await sites.at_there.publish("in/ok", b"accepted")
        assert (await anext(here)).payload == b"accepted"
    await until(lambda: bridge.stats.dropped_refused == 1)
    gate.access_rules = AccessRules(policy=parse_policy("rules: []"))
    sites.here.reauthorise()
    assert sites.here.subscriptions_of("$bridge/plant") == []
    refused = Bridge(BridgeSettings("other", settings.url, (BridgeTopic("out/#"),)), sites.here, gate)
    with pytest.raises(RefusedError, match="out/#"):
        await refused.start()
    checks.close()


async def test_a_session_of_a_bridge_cannot_be_taken_over(sites: Sites) -> None:
    bridge = await sites.run_bridge(BridgeTopic("a"))
    await until(lambda: bridge.stats.connected == 1)
    with pytest.raises(RefusedError) as caught:
        await MqttClient("127.0.0.1", sites.at_here.port, client_id="$bridge/plant").connect()
    assert caught.value.code == 0x87
    assert bridge.stats.connected == 1
