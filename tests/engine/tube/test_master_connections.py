"""A session at the master belongs to the connection that made it."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from penstock.tube.codec.envelope import Request, decode_request, decode_response, encode_request
from penstock.tube.codec.methods import METHODS, MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.engine.access import ClientAccess
from penstock.tube.engine.client.consumer_state import ClientBalance, Membership
from penstock.tube.engine.client.producer_state import Routes
from penstock.tube.engine.master.master import MasterEngine
from penstock.tube.engine.master.settings import TopicSetting
from penstock.tube.engine.sessions import RequestContext
from tests.engine.tube.master_harness import NOW, join_broker, master

HOST = "10.0.0.1"


def ask(
    engine: MasterEngine, connection: str, method: MethodId, message: Message, host: str = HOST, now: int = NOW
) -> int:
    """The code that answers a request over ``connection``."""
    payload = message.SerializeToString()
    request = decode_request(7, encode_request(Request(7, 1, method, payload)))
    answer = decode_response(7, engine.answer(request, RequestContext(now, host, connection)))
    found: Any = decode(METHODS[method].response, answer.payload)
    return int(found.errCode)


def running() -> MasterEngine:
    engine = master()
    join_broker(engine)
    return engine


def test_a_member_of_a_group_is_its_connections() -> None:
    engine, member = running(), Membership("c1", "h", "lake", ["demo"], {}, NOW)
    register, beat = MethodId.CONSUMER_REGISTER, MethodId.CONSUMER_HEARTBEAT
    assert ask(engine, "ours", register, member.register()) == 200
    for host in (HOST, "10.0.0.2"):
        assert ask(engine, "theirs", beat, member.heartbeat(), host) == 411
        assert ask(engine, "theirs", register, member.register(), host) == 430
        assert ask(engine, "theirs", MethodId.CONSUMER_CLOSE, member.close(), host) == 411
    assert ask(engine, "ours", beat, member.heartbeat()) == 200
    engine.disconnected("ours", NOW)
    assert ask(engine, "stranger", beat, member.heartbeat(), "10.0.0.2") == 411
    assert ask(engine, "again", beat, member.heartbeat()) == 200
    assert ask(engine, "again", register, member.register()) == 200
    assert ask(engine, "again", MethodId.CONSUMER_CLOSE, member.close()) == 200
    assert "lake" not in engine.groups


def test_a_member_that_balances_by_itself_is_its_connections() -> None:
    engine, member = running(), ClientBalance("c1", "h", "lake", ["demo"], {})
    register, beat = MethodId.CONSUMER_REGISTER_V2, MethodId.CONSUMER_HEARTBEAT_V2
    assert ask(engine, "ours", register, member.register()) == 200
    assert ask(engine, "theirs", beat, member.heartbeat()) == 411
    assert ask(engine, "theirs", MethodId.GET_PARTITION_META, member.metadata_request()) == 411
    assert ask(engine, "theirs", register, member.register()) == 430
    assert ask(engine, "theirs", MethodId.CONSUMER_CLOSE, member.close()) == 411
    engine.disconnected("ours", NOW)
    assert ask(engine, "again", beat, member.heartbeat()) == 200


def test_a_producers_session_is_closed_by_its_own_connection() -> None:
    engine = running()
    register = pb.RegisterRequestP2M(clientId="p1", brokerCheckSum=-1, hostName="h")
    close = pb.CloseRequestP2M(clientId="p1")
    assert ask(engine, "ours", MethodId.PRODUCER_REGISTER, register) == 200
    assert ask(engine, "theirs", MethodId.PRODUCER_CLOSE, close) == 411
    assert list(engine.producers) == ["p1"]
    assert ask(engine, "ours", MethodId.PRODUCER_CLOSE, close) == 200
    assert list(engine.producers) == []


def test_interleaved_requests_are_authenticated_with_their_own_addresses() -> None:
    engine = MasterEngine([TopicSetting("demo")], NOW, access=ClientAccess({}, networks=["10.0.0.0/8"]))
    register, beat = MethodId.PRODUCER_REGISTER, MethodId.PRODUCER_HEARTBEAT
    inside, outside = Routes("p1", "h"), Routes("p2", "h")
    for _ in range(2):
        assert ask(engine, "ours", register, inside.register(), HOST) == 200
        assert ask(engine, "theirs", register, outside.register(), "192.0.2.9") == 415
        assert ask(engine, "ours", beat, inside.heartbeat(), HOST) == 200
        assert ask(engine, "theirs", beat, outside.heartbeat(), "192.0.2.9") == 415
    assert list(engine.producers) == ["p1"]
