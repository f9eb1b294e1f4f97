"""A master engine without sockets: requests as clients send them, answers as they read them."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

from penstock.tube.codec.envelope import Request, Response, decode_request, decode_response, encode_request
from penstock.tube.codec.methods import METHODS, MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.engine.master.master import MasterConfig, MasterEngine
from penstock.tube.engine.master.settings import TopicSetting
from penstock.tube.engine.sessions import RequestContext

M = TypeVar("M", bound=Message)

NOW = 1_700_000_000_000


def master(*topics: TopicSetting, config: MasterConfig | None = None, active: bool = True) -> MasterEngine:
    return MasterEngine(topics or [TopicSetting("demo")], NOW, config=config, address="m:1", active=active)


def raw(engine: MasterEngine, request: Request, now: int = NOW, connection: str = "") -> Response:
    """One request through the envelope, both ways."""
    body = engine.answer(decode_request(7, encode_request(request)), RequestContext(now, connection=connection))
    return decode_response(7, body)


def ask(engine: MasterEngine, method: MethodId, message: Message, now: int = NOW, *, connection: str = "") -> Any:
    """The decoded answer; the engine must not answer with an exception."""
    response = raw(engine, Request(7, 1, method, message.SerializeToString()), now, connection)
    assert response.status == 0, (response.exception, response.text)
    assert response.method == method
    return decode(METHODS[method].response, response.payload)


def join_broker(
    engine: MasterEngine,
    now: int = NOW,
    *,
    number: int = 1,
    port: int = 8123,
    connection: str = "",
    was_registered: bool = False,
) -> None:
    """A broker registers as Apache's does: offline first, then online with what it was told to serve.

    ``was_registered``: at the master before this one.
    """
    told = ask(
        engine,
        MethodId.BROKER_REGISTER,
        pb.RegisterRequestB2M(
            clientId=f"{number}:10.0.0.{number}:{port}:2.4.0",
            brokerOnline=was_registered,
            enableTls=False,
            readStatusRpt=0,
            writeStatusRpt=0,
            curBrokerConfId=0,
            confCheckSumId=0,
            brokerDefaultConfInfo="",
            tlsPort=8124,
        ),
        now,
        connection=connection,
    )
    assert told.takeConfInfo, told.errMsg
    report(engine, told, now, number=number, connection=connection)


def report(engine: MasterEngine, told: Any, now: int = NOW, *, number: int = 1, connection: str = "") -> Any:
    """The heartbeat with which a broker says that it serves what ``told`` (an answer with configuration) says."""
    return ask(
        engine,
        MethodId.BROKER_HEARTBEAT,
        pb.HeartRequestB2M(
            brokerId=str(number),
            brokerOnline=True,
            readStatusRpt=0,
            writeStatusRpt=0,
            curBrokerConfId=told.curBrokerConfId,
            confCheckSumId=told.confCheckSumId,
            takeConfInfo=True,
            takeRemovedTopicInfo=False,
            brokerDefaultConfInfo=told.brokerDefaultConfInfo,
            brokerTopicSetConfInfo=told.brokerTopicSetConfInfo,
        ),
        now,
        connection=connection,
    )


def broker_beat(engine: MasterEngine, now: int = NOW, *, number: int = 1, connection: str = "") -> Any:
    """A heartbeat without news, in step with the master as far as the test knows."""
    broker = engine.cluster.brokers.get(number)
    return ask(
        engine,
        MethodId.BROKER_HEARTBEAT,
        pb.HeartRequestB2M(
            brokerId=str(number),
            brokerOnline=True,
            readStatusRpt=0,
            writeStatusRpt=0,
            curBrokerConfId=broker.config_id if broker else 0,
            confCheckSumId=broker.check_sum if broker else 0,
            takeConfInfo=False,
            takeRemovedTopicInfo=False,
        ),
        now,
        connection=connection,
    )
