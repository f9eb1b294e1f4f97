"""A broker that did not run for a while judges nobody by what it could not read, and everybody one grace later."""

from __future__ import annotations

from penstock.mqtt.codec.packets import Disconnect, PingReq, PingResp, Publish, Subscription, Will
from penstock.mqtt.engine.model.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench, Peer

PAUSE = 30_000


def watcher(bench: Bench) -> Peer:
    peer = bench.connect("w")
    peer.subscribe(Subscription("wills/#", 1))
    return peer


def closed(peer: Peer) -> bool:
    return peer.closed


def present(bench: Bench) -> bool:
    return bench.connack.session_present


def pause(bench: Bench, ms: int = PAUSE) -> None:
    """Time passes, and the broker learns of it when it runs again: its deadlines come before anything is read."""
    bench.now += ms
    bench.broker.stalled(bench.now, ms)
    bench.broker.tick(bench.now)
    bench.flush()


def test_clients_that_did_ping_stay_and_others_go_one_grace_later() -> None:
    bench = Bench()
    watch = watcher(bench)
    alive = bench.connect("alive", keep_alive=1, will=Will("wills/alive", b"x"))
    gone = bench.connect("gone", keep_alive=1, will=Will("wills/gone", b"x"))
    pause(bench)
    assert not closed(alive)
    assert not closed(gone)
    assert watch.topics() == []
    alive.send(PingReq())
    assert alive.only() == PingResp()
    bench.advance(PAUSE - 1)
    assert not closed(gone)
    for _ in range(3):
        alive.send(PingReq())
        bench.advance(1000)
    assert closed(gone)
    assert not closed(alive)
    assert watch.topics() == ["wills/gone"]
    packet = gone.only()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x8D


def test_a_deadline_after_the_grace_stays_as_it_is() -> None:
    bench = Bench()
    peer = bench.connect("c", keep_alive=60)
    pause(bench, 2_000)
    bench.advance(87_999)
    assert not closed(peer)
    bench.advance(1)
    assert closed(peer)


def test_after_the_grace_silence_counts_as_ever() -> None:
    bench = Bench()
    pause(bench)
    bench.advance(PAUSE)
    peer = bench.connect("c", keep_alive=1)
    bench.advance(1_500)
    assert closed(peer)


def test_sessions_and_delayed_wills_wait_for_clients_that_are_coming_back() -> None:
    bench = Bench()
    watch = watcher(bench)
    will = Will("wills/c", b"x")
    will.properties.will_delay_interval = 1
    for name in ("back", "late"):
        bench.connect(name, expiry=2, will=will).drop()
    pause(bench)
    assert watch.topics() == []
    back = bench.connect("back", clean_start=False, expiry=2)
    assert present(bench)
    bench.advance(PAUSE)
    assert watch.topics() == ["wills/c"], "of the one that did not come"
    bench.connect("late", clean_start=False, expiry=2)
    assert not present(bench)
    assert not closed(back)


def test_connect_and_a_full_transport_have_their_time_again() -> None:
    limits = BrokerLimits(connect_timeout_ms=1_000, write_stall_ms=1_000)
    bench = Bench(limits=limits)
    stranger = bench.open()
    slow = bench.connect("slow")
    slow.connection.pause(bench.now)
    pause(bench)
    assert not closed(stranger)
    assert not closed(slow)
    bench.advance(PAUSE)
    assert closed(stranger)
    assert closed(slow)


def test_a_message_does_not_live_longer() -> None:
    """Its Message Expiry Interval is the publisher's word, not a judgement about anybody's silence."""
    bench = Bench()
    peer = bench.connect("c", expiry=3600)
    peer.subscribe(Subscription("t", 1))
    peer.drop()
    message = Publish("t", b"", 1, packet_id=1)
    message.properties.message_expiry_interval = 1
    bench.connect("p").send(message)
    pause(bench)
    back = bench.connect("c", expiry=3600, clean_start=False)
    assert back.publishes() == []
