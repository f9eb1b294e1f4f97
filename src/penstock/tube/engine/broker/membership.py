"""Membership of a broker in its cluster: requests to the master, and the changes in its responses.

    request = membership.next_request(read_status, write_status)   # method id and payload
    update = membership.receive(method, payload)                   # changes to apply; then next_request again

The master sends the whole configuration with a registration, and with a heartbeat if the broker's report differs. The
broker reports its configuration with the next heartbeat after a change, or when the master requests it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.errors import RefusedError, RemoteProtocolError
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.proto import shared_pb2
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import (
    DEFAULT_BROKER_TLS_PORT,
    OFFSET_HISTORY_TOPIC,
    TOPIC_RULE,
    UNDEFINED,
    DefaultConfig,
    TopicConfig,
    valid_topic,
)

__all__ = ["BrokerConfig", "BrokerMembership", "MasterUpdate"]


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The configuration that a master sent: version and checksum (both are only echoed), default and topic texts."""

    config_id: int = 0
    check_sum: int = 0
    default: str = ""
    topics: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Encode the configuration, for :meth:`from_json` after a restart."""
        return json.dumps([self.config_id, self.check_sum, self.default, self.topics]).encode()

    @classmethod
    def from_json(cls, data: bytes) -> BrokerConfig:
        """Decode the result of :meth:`to_json`."""
        config_id, check_sum, default, topics = json.loads(data)
        return cls(config_id, check_sum, default, tuple(topics))

    def parsed(self) -> tuple[DefaultConfig, list[TopicConfig]]:
        """Parse the settings.

        Raises:
            RemoteProtocolError: the configuration cannot be parsed, or a topic name is not valid (and could be a path
            outside of the log's directory).
        """
        default = DefaultConfig.parse(self.default) if self.default.strip() else DefaultConfig()
        topics = [TopicConfig.parse(text) for text in self.topics]
        for each in topics:
            if not valid_topic(each.topic) and each.topic != OFFSET_HISTORY_TOPIC:
                raise RemoteProtocolError(
                    f"tube: the master configured topic {each.topic[:100]!r}; a name is {TOPIC_RULE}"
                )
        return default, topics


@dataclass(slots=True)
class MasterUpdate:
    """Changes in a response of the master; None and empty mean no change."""

    config: BrokerConfig | None = None
    removed_topics: list[str] = field(default_factory=list)
    stop_read: bool = False
    stop_write: bool = False
    tokens: list[int] = field(default_factory=list)
    check_tokens: bool | None = None
    max_message_bytes: int | None = None
    flow_rules: str | None = None
    soon: bool = False
    """True if the next request must be sent immediately, because the master waits for a report."""


class BrokerMembership:
    """One broker's membership. ``address``: ``host:port`` for clients; ``web_address``: ``host:port`` of its
    administration. ``is_removing``: returns True while a removed topic still has data, and is not reported yet."""

    def __init__(
        self,
        broker_id: int,
        address: str,
        version: str,
        config: BrokerConfig | None = None,
        *,
        tls_port: int | None = None,
        web_address: str | None = None,
        is_removing: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._tls_port = tls_port
        self._is_removing = is_removing
        self._web_address = web_address
        self.broker_id = broker_id
        self.address = address
        self.version = version
        self.config = config or BrokerConfig()
        self.registered = False
        self._online = False
        self._report = False
        self._removed: list[str] = []
        self._cluster_id = UNDEFINED
        self._flow_id = UNDEFINED

    def lost(self) -> None:
        """Register again, because the connection or the session is lost."""
        self.registered = False

    def next_request(
        self,
        read_status: int,
        write_status: int,
        failure: str | None = None,
        *,
        signed: shared_pb2.MasterCertificateInfo | None = None,
    ) -> tuple[int, bytes]:
        """Return method id and payload of the next request. Statuses: 0 normal, 1 stopped by the master, -1 disk
        failure.

        ``failure``: description of the disk failure. ``signed``: the broker's credentials, if the master requires them.
        """
        if not self.registered:
            request = pb.RegisterRequestB2M(
                clientId=f"{self.broker_id}:{self.address}:{self.version}",
                brokerOnline=self._online,
                enableTls=self._tls_port is not None,
                readStatusRpt=read_status,
                writeStatusRpt=write_status,
                curBrokerConfId=self.config.config_id,
                confCheckSumId=self.config.check_sum,
                brokerDefaultConfInfo=self.config.default,
                brokerTopicSetConfInfo=self.config.topics,
                flowCheckId=self._flow_id,
                qryPriorityId=UNDEFINED,
                # The Java master compares it even without TLS.
                tlsPort=DEFAULT_BROKER_TLS_PORT if self._tls_port is None else self._tls_port,
                authInfo=signed,
                webAddress=self._web_address,
                failure=failure,
            )
            request.clsConfig.configId = self._cluster_id
            return MethodId.BROKER_REGISTER, request.SerializeToString()
        # The master then forgets the topic, and does not order its removal again after a crash of the broker.
        removed = [name for name in self._removed if not self._is_removing(name)]
        beat = pb.HeartRequestB2M(
            brokerId=str(self.broker_id),
            brokerOnline=True,
            readStatusRpt=read_status,
            writeStatusRpt=write_status,
            curBrokerConfId=self.config.config_id,
            confCheckSumId=self.config.check_sum,
            takeConfInfo=self._report,
            takeRemovedTopicInfo=bool(removed),
            removedTopicsInfo=removed,
            flowCheckId=self._flow_id,
            qryPriorityId=UNDEFINED,
            authInfo=signed,
            failure=failure,
        )
        if self._report:
            beat.brokerDefaultConfInfo = self.config.default
            beat.brokerTopicSetConfInfo.extend(self.config.topics)
        beat.clsConfig.configId = self._cluster_id
        return MethodId.BROKER_HEARTBEAT, beat.SerializeToString()

    def close_request(self, signed: shared_pb2.MasterCertificateInfo | None = None) -> tuple[int, bytes]:
        """Return the request that ends the membership: the master removes the broker immediately."""
        request = pb.CloseRequestB2M(brokerId=str(self.broker_id), authInfo=signed)
        return MethodId.BROKER_CLOSE, request.SerializeToString()

    def receive(self, method: int, payload: bytes) -> MasterUpdate:
        """Process the response to the request of `next_request`.

        Raises:
            RefusedError: the master does not accept this broker (for example: it is not configured there).
            RemoteProtocolError: the response or a configuration text cannot be parsed.
        """
        if method == MethodId.BROKER_REGISTER:
            return self._registered(decode(pb.RegisterResponseM2B, payload))
        return self._heartbeat_answered(decode(pb.HeartResponseM2B, payload))

    def _registered(self, answer: pb.RegisterResponseM2B) -> MasterUpdate:
        if not answer.success:
            self._online = False  # the next master must not prefer it to the broker that has the id
            raise RefusedError(
                f"tube: the master refused broker {self.broker_id} ({self.address}): {answer.errMsg}",
                code=answer.errCode,
                text=answer.errMsg,
                peer="master",
                hint=remedy(answer.errCode)
                or "give each broker its own id, and the address and TLS port that the master has for it",
            )
        self.registered = self._online = True
        update = self._common(answer)
        if answer.HasField("enableBrokerInfo"):
            update.check_tokens = answer.enableBrokerInfo.enableVisitTokenCheck
        self._report = True
        update.soon = True
        return update

    def _heartbeat_answered(self, answer: pb.HeartResponseM2B) -> MasterUpdate:
        if not answer.success:
            self.registered = False
            if answer.errCode == ErrCode.HB_NO_NODE:
                return MasterUpdate(soon=True)
            raise RefusedError(
                f"tube: the master refused the heartbeat of broker {self.broker_id}: {answer.errMsg}",
                code=answer.errCode,
                text=answer.errMsg,
                peer="master",
            )
        reported = self._report
        self._report = answer.needReportData and not reported
        update = self._common(answer)
        if answer.takeRemoveTopicInfo:
            update.removed_topics = [TopicConfig.parse(text).topic for text in answer.removeTopicConfInfo]
            self._removed = update.removed_topics
        update.soon = update.soon or self._report or bool(self._removed)
        return update

    def _common(self, answer: pb.RegisterResponseM2B | pb.HeartResponseM2B) -> MasterUpdate:
        update = MasterUpdate(stop_read=answer.stopRead, stop_write=answer.stopWrite)
        # A blank default or an empty list means no change.
        if answer.takeConfInfo and answer.brokerDefaultConfInfo.strip() and answer.brokerTopicSetConfInfo:
            config = BrokerConfig(
                answer.curBrokerConfId,
                answer.confCheckSumId,
                answer.brokerDefaultConfInfo,
                tuple(answer.brokerTopicSetConfInfo),
            )
            if config != self.config:
                config.parsed()
                self.config = config
                update.config = config
                self._report = True
                update.soon = True
        for text in answer.brokerAuthorizedInfo.visitAuthorizedToken.split(","):
            if text.strip():
                try:
                    update.tokens.append(int(text))
                except ValueError:
                    raise RemoteProtocolError(f"tube: visit token {text!r} is not a number") from None
        if answer.HasField("flowCheckId") and answer.flowCheckId != self._flow_id:
            if answer.HasField("flowControlInfo"):
                self._flow_id = answer.flowCheckId
                update.flow_rules = answer.flowControlInfo
            elif answer.flowCheckId == UNDEFINED:
                self._flow_id = UNDEFINED
                update.flow_rules = ""
        if answer.HasField("clsConfig"):
            self._cluster_id = answer.clsConfig.configId
            if answer.clsConfig.HasField("maxMsgSize"):
                update.max_message_bytes = answer.clsConfig.maxMsgSize
        return update
