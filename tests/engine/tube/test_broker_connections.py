"""A registration belongs to the connection that made it: a client id alone gives nobody its messages."""

from __future__ import annotations

from penstock.tube.codec.envelope import Request, decode_response
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import BrokerInfo, Partition
from penstock.tube.engine.access import ClientAccess
from tests.engine.tube.broker_harness import SESSION_MS, Talk, texts

OURS, THEIRS = "ours", "theirs"
PART = Partition(BrokerInfo(1, "h", 8123), "demo", 0).full


def over(talk: Talk, connection: str, host: str = "10.0.0.1") -> Talk:
    """The same broker; requests come over ``connection`` of ``host`` from now on."""
    talk.connection = connection
    talk.peer = host
    return talk


def registered() -> Talk:
    talk = over(Talk(), OURS)
    talk.fill(b"secret")
    assert talk.register().success
    return talk


def test_another_connection_gets_nothing_with_the_client_id() -> None:
    talk = registered()
    for host in ("10.0.0.1", "10.0.0.2"):
        over(talk, THEIRS, host)
        assert (talk.get().errCode, talk.get().messages) == (411, [])
        assert talk.confirm().errCode == 401
        assert list(talk.beat(PART).failureInfo) == [f"411:{PART}"]
        assert talk.register(opType=32).errCode == 411
        occupied = talk.register()
        assert (occupied.errCode, "c1" in occupied.errMsg) == (410, False), "a refusal names no client id"
    assert texts(over(talk, OURS).get()) == [b"secret"]
    assert talk.confirm().success


def test_a_client_continues_over_a_new_connection_as_apaches_clients_do() -> None:
    talk = registered()
    assert texts(talk.get()) == [b"secret"]
    talk.engine.connection_closed(OURS)
    assert over(talk, "stranger", "10.0.0.2").get().errCode == 411
    assert over(talk, "again").confirm().success
    assert talk.beat(PART).failureInfo == []
    talk.fill(b"more")
    assert texts(talk.get()) == [b"more"]
    assert over(talk, THEIRS).get().errCode == 411, "the session is that of the second connection now"


def test_a_client_may_register_again_from_its_host_and_from_another_after_its_session() -> None:
    talk = registered()
    talk.engine.connection_closed(OURS)
    assert over(talk, "moved", "10.0.0.2").register().errCode == 410
    assert over(talk, "again").register().success
    talk.engine.connection_closed("again")
    talk.now += SESSION_MS
    assert over(talk, "moved", "10.0.0.2").register().errCode == 410, "as in the reference: the next try succeeds"
    assert talk.register().success


def test_a_waiting_get_is_answered_on_its_own_connection() -> None:
    talk = over(Talk(), OURS)
    talk.register()
    message = pb.GetMessageRequestC2B(clientId="c1", groupName="group", topicName="demo", partitionId=0, maxWaitMs=1000)
    request = Request(1, 2, MethodId.GET_MESSAGES, message.SerializeToString())
    assert talk.answer(request, address=OURS) is None
    over(talk, THEIRS)
    talk.fill(b"x")
    ((address, _, _),) = talk.engine.ready
    assert address == OURS


def test_a_waiting_get_is_authenticated_with_its_own_address() -> None:
    """Requests of other connections in between change nothing: neither for it, nor for them."""
    talk = Talk()
    talk.engine.checks.access = ClientAccess({}, networks=["10.0.0.0/8"])
    wanted = pb.GetMessageRequestC2B(
        clientId="c1", partitionId=0, groupName="group", topicName="demo", maxWaitMs=1000,
        range=pb.RangeRequest(startOffset=0),
    )  # fmt: skip
    request = Request(5, 2, MethodId.GET_MESSAGES, wanted.SerializeToString())
    assert over(talk, OURS, "10.0.0.1").answer(request) is None
    assert talk.send(b"x").success
    assert over(talk, THEIRS, "192.0.2.9").get(range=pb.RangeRequest(startOffset=0)).errCode == 415
    talk.commit()
    ((connection, serial, found),) = talk.engine.ready
    answer = decode(pb.GetMessageResponseB2C, decode_response(serial, found.body).payload)
    assert (connection, answer.errCode, texts(answer)) == (OURS, 200, [b"x"])
    assert talk.get(range=pb.RangeRequest(startOffset=0)).errCode == 415
    assert over(talk, OURS, "10.0.0.1").get(range=pb.RangeRequest(startOffset=0)).errCode == 200
