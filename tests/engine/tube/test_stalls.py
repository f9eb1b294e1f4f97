"""A master and a broker that did not run for a while: members whose heartbeats wait in sockets keep what they have."""

from __future__ import annotations

from penstock.tube.codec.methods import MethodId
from penstock.tube.engine.client.producer_state import Routes
from penstock.tube.engine.master.master import MasterConfig
from penstock.tube.engine.master.settings import TopicSetting
from tests.engine.tube.broker_harness import SESSION_MS, Talk
from tests.engine.tube.master_harness import NOW, ask, broker_beat, join_broker, master
from tests.engine.tube.test_master import beat, consumer

PAUSE = 300_000


def test_a_master_keeps_members_that_are_about_to_be_heard() -> None:
    config = MasterConfig()
    engine = master(TopicSetting("demo", 3, 1), config=config)
    join_broker(engine)
    lake, sea = consumer(engine, "lake"), consumer(engine, "sea")
    routes = Routes("p1", "h")
    ask(engine, MethodId.PRODUCER_REGISTER, routes.register())
    now = NOW + PAUSE
    engine.stalled(now, PAUSE)
    engine.tick(now)
    assert beat(engine, lake, now).errCode == 200
    assert broker_beat(engine, now).errCode == 200
    assert set(engine.groups["lake"].members) == {lake.client_id, sea.client_id}
    assert engine.producers
    deadline = engine.next_deadline()
    assert deadline == now + PAUSE, "the shell does not look in vain"
    now += PAUSE - 1
    assert beat(engine, lake, now).errCode == 200
    assert broker_beat(engine, now).errCode == 200
    engine.tick(now + 1)
    assert set(engine.groups["lake"].members) == {lake.client_id}, "who is gone goes one grace later"
    assert not engine.producers
    assert engine.cluster.brokers[1].online


def test_a_broker_keeps_the_partitions_of_consumers_that_are_about_to_be_heard() -> None:
    talk = Talk()
    talk.topic("demo", partitions=2)
    talk.register(0)
    talk.register(1)
    talk.now += PAUSE
    talk.engine.registrations.stalled(talk.now, PAUSE)
    talk.engine.tick(talk.now)
    assert talk.engine.next_deadline() == talk.now + PAUSE
    assert talk.register(1, clientId="other").errCode == 410
    assert talk.get(0).errCode == 404, "a get that waited is answered: there is nothing to read"
    talk.now += PAUSE - SESSION_MS // 2
    assert talk.get(0).errCode == 404
    talk.now += SESSION_MS // 2
    talk.engine.tick(talk.now)
    assert talk.register(1, clientId="other").success, "who is gone goes one grace later"
    assert talk.get(0).errCode == 404
