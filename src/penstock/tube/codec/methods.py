"""Table of the RPC methods: id, name, services that may carry them, message types, requester and responder.

Decoder, server dispatch, reference page and conformance list read this table.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from google.protobuf.message import Message

from penstock.tube.codec.proto import broker_pb2 as broker
from penstock.tube.codec.proto import master_pb2 as master

__all__ = ["METHODS", "RESERVED", "Method", "MethodId", "PeerRole", "ServiceType"]


class ServiceType(IntEnum):
    """RequestHeader.serviceType. 4 and 5 exist and have no methods."""

    MASTER = 1
    BROKER_READ = 2
    BROKER_WRITE = 3
    BROKER_ADMIN = 4
    MASTER_ADMIN = 5


class PeerRole(IntEnum):
    """Participants of a method."""

    PRODUCER = 1
    CONSUMER = 2
    BROKER = 3
    MASTER = 4


class MethodId(IntEnum):
    """RequestBody.method and RspResponseBody.method."""

    PRODUCER_REGISTER = 1
    PRODUCER_HEARTBEAT = 2
    PRODUCER_CLOSE = 3
    CONSUMER_REGISTER = 4
    CONSUMER_HEARTBEAT = 5
    CONSUMER_CLOSE = 6
    BROKER_REGISTER = 7
    BROKER_HEARTBEAT = 8
    BROKER_CLOSE = 9
    SEND_MESSAGE = 13
    PARTITION_REGISTER = 15
    PARTITION_HEARTBEAT = 16
    GET_MESSAGES = 17
    COMMIT_OFFSET = 18
    CONSUMER_REGISTER_V2 = 20
    CONSUMER_HEARTBEAT_V2 = 21
    GET_PARTITION_META = 22


class Method(NamedTuple):
    """One row of the table. ``name`` is the name in Apache's implementation; ``services`` are the service types that
    may carry it."""

    id: MethodId
    name: str
    services: tuple[ServiceType, ...]
    request: type[Message]
    response: type[Message]
    asks: PeerRole
    answers: PeerRole


_M = ServiceType.MASTER
_R = ServiceType.BROKER_READ
_W = ServiceType.BROKER_WRITE
_ROWS = [
    Method(MethodId.PRODUCER_REGISTER, "producerRegisterP2M", (_M,), master.RegisterRequestP2M,
           master.RegisterResponseM2P, PeerRole.PRODUCER, PeerRole.MASTER),
    Method(MethodId.PRODUCER_HEARTBEAT, "producerHeartbeatP2M", (_M,), master.HeartRequestP2M,
           master.HeartResponseM2P, PeerRole.PRODUCER, PeerRole.MASTER),
    Method(MethodId.PRODUCER_CLOSE, "producerCloseClientP2M", (_M,), master.CloseRequestP2M,
           master.CloseResponseM2P, PeerRole.PRODUCER, PeerRole.MASTER),
    Method(MethodId.CONSUMER_REGISTER, "consumerRegisterC2M", (_M,), master.RegisterRequestC2M,
           master.RegisterResponseM2C, PeerRole.CONSUMER, PeerRole.MASTER),
    Method(MethodId.CONSUMER_HEARTBEAT, "consumerHeartbeatC2M", (_M,), master.HeartRequestC2M,
           master.HeartResponseM2C, PeerRole.CONSUMER, PeerRole.MASTER),
    Method(MethodId.CONSUMER_CLOSE, "consumerCloseClientC2M", (_M,), master.CloseRequestC2M,
           master.CloseResponseM2C, PeerRole.CONSUMER, PeerRole.MASTER),
    Method(MethodId.BROKER_REGISTER, "brokerRegisterB2M", (_M,), master.RegisterRequestB2M,
           master.RegisterResponseM2B, PeerRole.BROKER, PeerRole.MASTER),
    Method(MethodId.BROKER_HEARTBEAT, "brokerHeartbeatB2M", (_M,), master.HeartRequestB2M,
           master.HeartResponseM2B, PeerRole.BROKER, PeerRole.MASTER),
    Method(MethodId.BROKER_CLOSE, "brokerCloseClientB2M", (_M,), master.CloseRequestB2M,
           master.CloseResponseM2B, PeerRole.BROKER, PeerRole.MASTER),
    # The Go client sends messages under the read service.
    Method(MethodId.SEND_MESSAGE, "sendMessageP2B", (_W, _R), broker.SendMessageRequestP2B,
           broker.SendMessageResponseB2P, PeerRole.PRODUCER, PeerRole.BROKER),
    Method(MethodId.PARTITION_REGISTER, "consumerRegisterC2B", (_R,), broker.RegisterRequestC2B,
           broker.RegisterResponseB2C, PeerRole.CONSUMER, PeerRole.BROKER),
    Method(MethodId.PARTITION_HEARTBEAT, "consumerHeartbeatC2B", (_R,), broker.HeartBeatRequestC2B,
           broker.HeartBeatResponseB2C, PeerRole.CONSUMER, PeerRole.BROKER),
    Method(MethodId.GET_MESSAGES, "getMessagesC2B", (_R,), broker.GetMessageRequestC2B,
           broker.GetMessageResponseB2C, PeerRole.CONSUMER, PeerRole.BROKER),
    Method(MethodId.COMMIT_OFFSET, "consumerCommitC2B", (_R,), broker.CommitOffsetRequestC2B,
           broker.CommitOffsetResponseB2C, PeerRole.CONSUMER, PeerRole.BROKER),
    Method(MethodId.CONSUMER_REGISTER_V2, "consumerRegisterC2MV2", (_M,), master.RegisterRequestC2MV2,
           master.RegisterResponseM2CV2, PeerRole.CONSUMER, PeerRole.MASTER),
    Method(MethodId.CONSUMER_HEARTBEAT_V2, "consumerHeartbeatC2MV2", (_M,), master.HeartRequestC2MV2,
           master.HeartResponseM2CV2, PeerRole.CONSUMER, PeerRole.MASTER),
    Method(MethodId.GET_PARTITION_META, "consumerGetPartMetaInfoC2M", (_M,), master.GetPartMetaRequestC2M,
           master.GetPartMetaResponseM2C, PeerRole.CONSUMER, PeerRole.MASTER),
]  # fmt: skip

METHODS: dict[int, Method] = {row.id: row for row in _ROWS}

# Known ids without an implementation: the response is ERROR, not FATAL.
RESERVED = frozenset({11, 12, 14, 19})
