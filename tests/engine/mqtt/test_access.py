"""Authorization to connect, publish, subscribe and receive; enhanced authentication [MQTT 5.0 3.1.4, 3.15, 4.12]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pytest

from penstock.mqtt.codec.packets import (
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.access import Action, Answer, Challenge, Credentials, Granted, Principal, Refused
from penstock.mqtt.engine.model.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench, Peer, RecordingService


class User(NamedTuple):
    name: str


class Gate:
    """An Access for tests: the user name is the principal; ``denied`` holds (name, action, topic)."""

    def __init__(self, *denied: tuple[str, str, str], later: bool = False) -> None:
        self.denied = set(denied)
        self.later = later
        self.asked: list[Credentials] = []
        self.answers: list[tuple[Answer, Credentials]] = []
        self.questions = 0

    def authenticate(self, credentials: Credentials, answer: Answer, now: int) -> None:
        self.asked.append(credentials)
        if self.later:
            self.answers.append((answer, credentials))
        elif credentials.username == "wrong":
            answer(Refused(0x86, "no"), now)
        else:
            answer(Granted(User(credentials.username or "anonymous")), now)

    def allowed(self, principal: Principal, action: Action, topic: str, qos: int, *, retain: bool) -> bool:
        self.questions += 1
        names = {(principal.name, str(action), topic), (principal.name, f"{action} q{qos} r{retain:d}", topic)}
        return not names & self.denied


def code(packet: Packet) -> int:
    assert isinstance(packet, ConnAck | Disconnect), packet
    return packet.reason_code


def test_the_credentials_are_what_connect_brought() -> None:
    gate = Gate()
    bench = Bench(access=gate)
    properties = Properties(user_properties=[("k", "v")])
    bench.open().send(Connect("", username="u", password=b"secret", properties=properties))
    bench.open().speak_311().send(Connect("old", username="u", password=b"x", protocol_version=4))
    new, old = gate.asked
    assert (new.client_id, new.username, new.user_properties, new.protocol_version) == (
        "assigned-1",
        "u",
        [("k", "v")],
        5,
    )
    assert (old.client_id, old.protocol_version, old.method) == ("old", 4, None)
    assert "secret" not in repr(new)
    assert new.password is None, "not kept once it is decided"


def test_a_refusal_closes_and_makes_no_session() -> None:
    bench = Bench(access=Gate())
    peer = bench.open().send(Connect("c", username="wrong"), PingReq())
    assert peer.take() == [ConnAck(False, 0x86, Properties(reason_string="no"))]
    assert peer.closed
    assert bench.broker.sessions == {}


@pytest.mark.parametrize(("given", "sent"), [(0, 0x87), (0x10, 0x87), (0x8A, 0x8A), (0x92, 0x87)])
def test_a_refusal_has_a_code_that_connack_may_carry(given: int, sent: int) -> None:
    gate = Gate(later=True)
    peer = Bench(access=gate).open().send(Connect("c"))
    gate.answers[0][0](Refused(given), 1000)
    assert code(peer.only()) == sent


def test_messages_sent_with_connect_arrive_when_it_is_accepted() -> None:
    """Services read the clock once per read: these must not get the time of the last one before."""
    gate, service = Gate(later=True), RecordingService("s")
    bench = Bench(service, access=gate)
    for name in ("first", "second"):
        bench.open().send(Connect(name, username="u"), Publish("s", b"", 1, packet_id=1))
    for answer, _ in gate.answers:
        answer(Granted(User("u")), bench.now)
    reads = [message.read for message in service.taken]
    assert len(set(reads)) == 2, reads


def test_packets_wait_for_the_authentication_decision() -> None:
    gate = Gate(later=True)
    bench = Bench(access=gate)
    watcher = bench.open().send(Connect("w", username="w"))
    gate.answers.pop()[0](Granted(User("w")), bench.now)
    watcher.take()
    watcher.subscribe("a")
    peer = bench.open().send(
        Connect("c"),
        Publish("a", b"1", 1, packet_id=1),
        Publish("a", b"2", 2, packet_id=2),
        Subscribe(3, [Subscription("z")]),
        Unsubscribe(4, ["z"]),
        PubRel(2),
        PubAck(9),
        PingReq(),
    )
    assert peer.connection.holds == 1, "nothing more is read from a stranger"
    peer.send(PingReq())
    assert peer.take() == []
    assert watcher.take() == []
    gate.answers.pop()[0](Granted(User("c")), bench.now)
    assert peer.connection.holds == 0
    kinds = [type(packet).__name__ for packet in peer.take()]
    assert kinds == ["ConnAck", "PubAck", "PubRec", "SubAck", "UnsubAck", "PubComp", "PingResp", "PingResp"]
    assert [p.payload for p in watcher.publishes()] == [b"1", b"2"]


def test_a_decision_that_comes_too_late_or_twice_does_nothing() -> None:
    gate = Gate(later=True)
    bench = Bench(access=gate)
    gone = bench.open().send(Connect("c"))
    gone.drop()
    late = bench.open().send(Connect("d"))
    bench.advance(10_000)
    assert late.closed, "the time for CONNECT counts until the decision"
    gate.answers[0][0](Granted(User("c")), bench.now)
    gate.answers[1][0](Granted(User("d")), bench.now)
    assert bench.broker.sessions == {}
    peer = bench.open().send(Connect("e"))
    gate.answers[2][0](Granted(User("e")), bench.now)
    gate.answers[2][0](Refused(0x87), bench.now)
    assert code(peer.only()) == 0


def test_an_answer_that_is_of_no_use_any_more_is_withdrawn_once() -> None:
    gate = Gate(later=True)
    bench = Bench(access=gate, limits=BrokerLimits(connect_timeout_ms=5_000))
    withdrawn: list[str] = []

    def connect(name: str) -> Peer:
        peer = bench.open().send(Connect(name, username="u", will=Will("w", b"")), PingReq())
        gate.asked[-1].withdraw = lambda: withdrawn.append(name)
        return peer

    answered, gone, refused = connect("answered"), connect("gone"), connect("refused")
    gate.answers[0][0](Granted(User("u")), bench.now)
    answered.take()
    gone.drop()
    gate.answers[2][0](Refused(0x86), bench.now)
    assert code(refused.only()) == 0x86
    assert refused.closed
    assert withdrawn == ["gone"]
    late = connect("late")
    bench.advance(5_000)
    assert late.closed
    answered.drop()
    assert withdrawn == ["gone", "late"], "what is answered, either way, has nothing to withdraw"
    assert [peer.connection._handshake for peer in (gone, late)] == [None, None], "CONNECT is not kept for the answer"
    for answer, _ in gate.answers[1:]:
        answer(Granted(User("u")), bench.now)
    assert bench.broker.sessions == {}


def test_keep_alive_counts_from_the_decision() -> None:
    gate = Gate(later=True)
    bench = Bench(access=gate)
    peer = bench.open().send(Connect("c", keep_alive=2))
    bench.advance(9_000)
    assert not peer.closed, "Keep Alive of a client that is not read would end it after 3 s"
    gate.answers[0][0](Granted(User("u")), bench.now)
    assert code(peer.only()) == 0
    bench.advance(2_999)
    assert not peer.closed
    bench.advance(3_001)
    assert peer.closed


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_later_decision_takes_over_between_two_connections_of_one_client_id(order: tuple[int, int]) -> None:
    gate = Gate(later=True)
    bench = Bench(access=gate)
    peers = [bench.open().send(Connect("same", username="u")) for _ in range(2)]
    first, second = (peers[n] for n in order)
    gate.answers[order[0]][0](Granted(User("u")), bench.now)
    assert code(first.only()) == 0
    gate.answers[order[1]][0](Granted(User("u")), bench.now)
    assert code(second.only()) == 0
    assert code(first.only()) == 0x8E
    assert first.closed
    assert second.send(PingReq()).only() == PingResp()
    assert len(bench.broker.sessions) == 1


def test_a_refused_rival_does_not_take_over() -> None:
    gate = Gate(later=True)
    bench = Bench(access=gate)
    owner, rival = (bench.open().send(Connect("same", username="u")) for _ in range(2))
    gate.answers[0][0](Granted(User("u")), bench.now)
    gate.answers[1][0](Refused(0x86), bench.now)
    assert (code(owner.only()), code(rival.only())) == (0, 0x86)
    assert owner.send(PingReq()).only() == PingResp()


def test_an_oversized_packet_before_the_authentication_decision_is_an_error() -> None:
    """The limit of CONNECT ends with CONNECT; that of packets holds for what is sent right behind it."""
    gate = Gate(later=True)
    bench = Bench(access=gate, limits=BrokerLimits(max_packet_size=1024))
    peer = bench.open().send(Connect("c"), Publish("a", b"x" * 2000))
    assert code(peer.only()) == 0x95
    assert peer.closed
    gate.answers[0][0](Granted(User("c")), bench.now)
    assert bench.broker.sessions == {}


@pytest.mark.parametrize(("version", "expected"), [(5, 0x89), (4, 0x88)], ids=["5.0", "3.1.1: return code 3"])
def test_server_busy_by_version(version: int, expected: int) -> None:
    gate = Gate(later=True)
    peer = Bench(access=gate).open()
    if version == 4:
        peer.speak_311()
    peer.send(Connect("c", username="u", protocol_version=version))
    gate.answers[0][0](Refused(0x89), 1000)
    assert code(peer.only()) == expected
    assert peer.closed


@pytest.mark.parametrize(
    ("packet", "expected"),
    [(Connect("c"), 0x82), (Auth(0x18, Properties(authentication_method="m")), 0x82), (Disconnect(), None)],
    ids=["connect", "auth", "disconnect"],
)
def test_forbidden_packets_before_the_authentication_decision_end_the_connection(
    packet: Packet, expected: int | None
) -> None:
    bench = Bench(access=Gate(later=True))
    peer = bench.open().send(Connect("c")).send(packet)
    assert [code(p) for p in peer.take()] == ([] if expected is None else [expected])
    assert peer.closed


def test_a_session_belongs_to_its_principal() -> None:
    bench = Bench(access=Gate())
    owner = bench.connect("c", username="alice", expiry=100)
    owner.subscribe("a")
    for clean_start in (False, True):
        thief = bench.open().send(Connect("c", clean_start, username="mallory"))
        assert code(thief.only()) == 0x87
        assert thief.closed
    assert owner.send(PingReq()).only() == PingResp(), "the owner is not disturbed"
    owner.drop()
    thief = bench.open().send(Connect("c", clean_start=False, username="mallory"))
    assert code(thief.only()) == 0x87, "nor is the session that waits for its owner"
    bench.connect("c", username="alice", clean_start=False, expiry=100)
    assert bench.connack.session_present
    assert bench.broker.stats.refused_unauthorized == 3


@pytest.mark.parametrize("version", [5, 4])
def test_publish(version: int) -> None:
    service = RecordingService("secret")
    bench = Bench(service, access=Gate(("u", "publish", "secret")))
    watcher = bench.connect("w", username="w")
    watcher.subscribe(Subscription("#", 2))
    peer = bench.connect("c", username="u", version=version)
    peer.send(
        Publish("secret", b"", 0),
        Publish("secret", b"", 1, packet_id=1),
        Publish("secret", b"", 2, packet_id=2),
        PubRel(2),
        Publish("open", b"", 1, packet_id=3),
    )
    answers = [PubAck(1, 0x87), PubRec(2, 0x87), PubComp(2, 0x92), PubAck(3)]
    plain = [PubAck(1), PubRec(2), PubComp(2), PubAck(3)]
    assert peer.take() == (answers if version == 5 else plain), "3.1.1 cannot say no"
    assert watcher.topics() == ["open"]
    assert service.taken == []
    assert (bench.broker.stats.refused_unauthorized, bench.broker.stats.dropped_refused) == (3, 1)


def test_publish_by_qos_and_retain_is_asked_once_each() -> None:
    gate = Gate(("u", "publish q1 r1", "a"), ("u", "publish q2 r0", "a"))
    bench = Bench(access=gate)
    peer = bench.connect("c", username="u")
    for _ in range(3):
        before = gate.questions
        peer.send(
            *(
                Publish("a", b"", qos, retain=retain, packet_id=qos * 2 + retain)
                for qos in (1, 2)
                for retain in (False, True)
            )
        )
        answers: list[Any] = peer.take()
        assert [packet.reason_code for packet in answers] == [
            0x10,
            0x87,
            0x87,
            0,
        ]
        peer.send(PubRel(5)).take()
    assert gate.questions == before, "remembered"


@pytest.mark.parametrize("refusal", [0x87, 0x80])
def test_subscribe(refusal: Literal[0x87, 0x80]) -> None:
    gate = Gate(("u", "subscribe", "#"), ("u", "subscribe", "$share/g/x"))
    bench = Bench(access=gate, limits=BrokerLimits(subscription_denied_code=refusal))
    peer = bench.connect("c", username="u")
    assert peer.subscribe("a", "#", "$share/g/x", "$share/g/y") == [1, refusal, refusal, 1]
    assert bench.broker.measure().subscriptions == 2


def test_will_at_connect_and_when_it_is_published() -> None:
    gate = Gate(("u", "publish", "forbidden"))
    bench = Bench(access=gate)
    watcher = bench.connect("w", username="w")
    watcher.subscribe("#")
    assert code(bench.open().send(Connect("c", username="u", will=Will("forbidden", b""))).only()) == 0x87
    peer = bench.connect("c", username="u", will=Will("later", b"x"))
    gate.denied.add(("u", "publish", "later"))
    bench.broker.policies_changed(bench.now)
    peer.drop()
    assert watcher.take() == []
    assert bench.broker.stats.refused_unauthorized == 2


def test_receive_live_retained_delivered_and_shared() -> None:
    gate = Gate(("u", "receive", "a/secret"))
    bench = Bench(access=gate)
    sender = bench.connect("p", username="p")
    sender.send(Publish("a/secret", b"kept", retain=True), Publish("a/open", b"kept", retain=True))
    peer = bench.connect("c", username="u")
    peer.subscribe("a/#", "$share/g/a/#")
    assert peer.topics() == ["a/open"]
    sender.send(Publish("a/secret", b"live"), Publish("a/open", b"live"))
    assert peer.topics() == ["a/open", "a/open"]
    assert not bench.broker.deliver("c", Publish("a/secret", b"", 1), bench.now)
    assert bench.broker.deliver("c", Publish("a/open", b"", 1), bench.now)
    assert peer.topics() == ["a/open"]
    assert bench.broker.stats.dropped_unauthorized == 1


def test_changed_policies_end_subscriptions_and_drop_what_waits() -> None:
    gate = Gate()
    bench = Bench(access=gate)
    peer = bench.connect("c", username="u", expiry=100)
    peer.subscribe("a/#", "b")
    sender = bench.connect("p", username="p")
    peer.drop()
    sender.send(*(Publish(topic, b"", 1, packet_id=n) for n, topic in enumerate(("a/1", "a/2", "b"), start=1)))
    gate.denied |= {("u", "receive", "a/2"), ("u", "subscribe", "b"), ("p", "publish", "a/1")}
    sender.take()
    assert sender.send(Publish("a/1", b"", 1, packet_id=9)).only() == PubAck(9), "remembered until it is told"
    bench.broker.policies_changed(bench.now)
    assert sender.send(Publish("a/1", b"", 1, packet_id=9)).only() == PubAck(9, 0x87)
    sender.send(Publish("a/2", b"", 1, packet_id=4), Publish("b", b"", 1, packet_id=5))
    again = bench.connect("c", username="u", expiry=100, clean_start=False)
    assert again.topics() == ["a/1", "b", "a/1"], "b was accepted for it while it was allowed"
    assert bench.broker.measure().subscriptions == 1


def test_each_listener_may_have_its_own_access_control() -> None:
    bench = Bench(access=Gate(("u", "publish", "a")))
    connection = bench.broker.open("other", bench.now, access=Gate(("u", "publish", "b")))
    assert connection is not None
    peer = bench.peers[connection] = Peer(bench, connection)
    silent = Properties(request_problem_information=0)
    peer.send(Connect("x", username="u", properties=silent))
    peer.send(Publish("a", b"", 1, packet_id=1), Publish("b", b"", 1, packet_id=2))
    assert peer.take()[1:] == [PubAck(1, 0x10), PubAck(2, 0x87)]


# Enhanced authentication


class Exchange(Gate):
    """Asks for ``steps`` answers of ``b"ok"``, then grants; without a method everybody is refused."""

    def __init__(self, steps: int = 1, name: Callable[[Credentials], str] = lambda _credentials: "u") -> None:
        super().__init__()
        self.steps = steps
        self.name = name
        self.heard: list[bytes | None] = []

    def authenticate(self, credentials: Credentials, answer: Answer, now: int) -> None:
        self.asked.append(credentials)
        if credentials.method is None:
            answer(Challenge(b"?", self._proceed), now)
        elif credentials.method != "M":
            answer(Refused(0x8C), now)
        else:
            self.left = self.steps
            self.credentials = credentials
            self._step(answer, now)

    def _step(self, answer: Answer, now: int) -> None:
        if self.left:
            self.left -= 1
            answer(Challenge(b"%d" % self.left, self._proceed), now)
        else:
            answer(Granted(User(self.name(self.credentials)), b"done"), now)

    def _proceed(self, data: bytes | None, answer: Answer, now: int) -> None:
        self.heard.append(data)
        if data == b"ok":
            self._step(answer, now)
        else:
            answer(Refused(0x87, "wrong"), now)


def auth(data: bytes | None = b"ok", reason_code: int = 0x18, method: str | None = "M") -> Auth:
    return Auth(reason_code, Properties(authentication_method=method, authentication_data=data))


def connect(method: str = "M", data: bytes | None = b"first") -> Connect:
    return Connect("c", properties=Properties(authentication_method=method, authentication_data=data))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_exchange(steps: int) -> None:
    gate = Exchange(steps)
    peer = Bench(access=gate).open().send(connect())
    assert gate.asked[0].data == b"first"
    for left in reversed(range(steps)):
        assert peer.only() == auth(b"%d" % left)
        peer.send(auth())
    packet = peer.only()
    assert isinstance(packet, ConnAck)
    assert packet.reason_code == 0
    assert (packet.properties.authentication_method, packet.properties.authentication_data) == ("M", b"done")
    assert gate.heard == [b"ok"] * steps
    assert peer.send(PingReq()).only() == PingResp()


def test_an_exchange_is_refused_at_any_step_and_for_an_unknown_method() -> None:
    bench = Bench(access=Exchange(2))
    peer = bench.open().send(connect())
    peer.take()
    assert code(peer.send(auth(b"bad")).only()) == 0x87
    assert peer.closed
    assert code(bench.open().send(connect("other")).only()) == 0x8C
    assert code(bench.open().send(Connect("c")).only()) == 0x87, "a challenge needs a method"
    assert code(Bench().open().send(connect()).only()) == 0x8C, "nobody is there to decide"


@pytest.mark.parametrize(
    "packet",
    [PingReq(), Publish("a"), Subscribe(1, [Subscription("a")]), PubAck(1), auth(method="other"), auth(None, 0x19)],
    ids=["pingreq", "publish", "subscribe", "puback", "other method", "re-authenticate"],
)
def test_only_auth_comes_between_connect_with_a_method_and_connack(packet: Packet) -> None:
    peer = Bench(access=Exchange()).open().send(connect())
    peer.take()
    assert code(peer.send(packet).only()) == 0x82
    assert peer.closed


def test_disconnect_may_come_too() -> None:
    peer = Bench(access=Exchange()).open().send(connect())
    peer.take()
    assert peer.send(Disconnect()).take() == []
    assert peer.closed


def accepted(gate: Exchange, bench: Bench) -> Peer:
    peer = bench.open().send(connect())
    while isinstance(packet := peer.only(), Auth):
        peer.send(auth())
    assert code(packet) == 0
    return peer


def test_re_authentication_runs_alongside_other_packets() -> None:
    gate = Exchange(1)
    bench = Bench(access=gate)
    peer = accepted(gate, bench)
    peer.send(auth(b"again", 0x19), PingReq())
    assert peer.take() == [auth(b"0"), PingResp()]
    assert gate.asked[-1].previous == User("u")
    assert gate.asked[-1].data == b"again"
    peer.send(Publish("a", b"", 1, packet_id=1), auth())
    assert peer.take() == [PubAck(1, 0x10), auth(b"done", 0)]


def test_re_authentication_changes_permissions_but_not_the_user() -> None:
    gate = Exchange(0)
    bench = Bench(access=gate)
    peer = accepted(gate, bench)
    peer.subscribe("a")
    gate.denied.add(("u", "subscribe", "a"))
    peer.send(auth(b"", 0x19))
    assert peer.only() == auth(b"done", 0)
    gate.name = lambda _credentials: "somebody else"
    assert code(peer.send(auth(b"", 0x19)).only()) == 0x87
    assert peer.closed


@pytest.mark.parametrize(
    ("packets", "expected"),
    [
        ([auth(b"bad", 0x19), auth(b"bad")], 0x87),
        ([auth(b"", 0x19, "other")], 0x82),
        ([auth(b"", 0x19), auth(b"", 0x19)], 0x82),
        ([auth()], 0x82),
        ([auth(b"", 0)], 0x82),
    ],
    ids=["refused", "other method", "within another", "unasked", "success from a client"],
)
def test_a_failed_re_authentication_ends_the_connection(packets: list[Packet], expected: int) -> None:
    gate = Exchange(1)
    peer = accepted(gate, Bench(access=gate))
    assert code(peer.send(*packets).take()[-1]) == expected
    assert peer.closed


def test_auth_without_a_method_in_connect() -> None:
    bench = Bench(access=Gate())
    peer = bench.connect("c", username="u")
    assert bench.connack.properties.authentication_method is None
    assert code(peer.send(auth(b"", 0x19)).only()) == 0x82
