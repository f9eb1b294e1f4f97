"""Brokers at the master (methods 7 to 9): the master sends the configuration, brokers report the served topics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.proto import shared_pb2
from penstock.tube.codec.strings import UNDEFINED, BrokerInfo
from penstock.tube.engine.master.cluster import RegisteredBroker, parse_broker_id
from penstock.tube.engine.master.context import (
    OK,
    QUERY_PRIORITY,
    MasterContext,
    RefusedRequest,
)
from penstock.tube.engine.master.settings import BrokerSetting, BrokerStatus
from penstock.tube.engine.sessions import RequestContext

__all__ = ["BrokerHandler"]

_MAX_ADDRESS = 300
_MAX_FAILURE = 1000
_MAX_RIVALS = 16
"""Refused addresses that are remembered for each broker; the oldest one is dropped."""


class BrokerHandler:
    """Answers brokers. Calls ``changed(now)`` when served topics change, ``restarted(id)`` after a restart."""

    def __init__(self, master: MasterContext, changed: Callable[[int], None], restarted: Callable[[int], None]) -> None:
        self._master = master
        self._changed = changed
        self._restarted = restarted

    def deadlines(self) -> Iterable[int]:
        """Times at which sessions end without further requests."""
        return (self._deadline(broker) for broker in self._master.cluster.brokers.values() if broker.online)

    def tick(self, now: int) -> None:
        """End the sessions of brokers without heartbeats or connection, which then count as offline, and find brokers
        whose heartbeat is overdue."""
        for broker in self._master.cluster.brokers.values():
            if not broker.online:
                continue
            if self._expiry(broker) <= now:
                self._master.cluster.lost(broker)
            elif self._deadline(broker) <= now:
                broker.overdue = True

    def _deadline(self, broker: RegisteredBroker) -> int:
        """Return when the broker is overdue or, if it is, when its session ends.

        Only its own heartbeats show how often a broker sends them: penstock's every half second, Apache's every 8 s.
        """
        expiry = self._expiry(broker)
        if broker.overdue or not broker.interval_ms:
            return expiry
        due = broker.last_seen + broker.interval_ms
        return min(expiry, due + self._master.config.limits.broker_overdue_ms)

    def _expiry(self, broker: RegisteredBroker) -> int:
        limits = self._master.config.limits
        expiry = broker.last_seen + limits.broker_session_ms
        if broker.disconnected_at is None:
            return expiry
        return min(expiry, broker.disconnected_at + limits.broker_reconnect_ms)

    def order(self, broker: RegisteredBroker) -> None:
        """Set which of reading and writing a broker is ordered to stop, from its setting."""
        setting = self._master.controls.brokers.get(broker.info.id)
        status = BrokerStatus.ONLINE if setting is None else setting.status
        broker.stop_read = status in {BrokerStatus.ONLY_WRITE, BrokerStatus.OFFLINE, BrokerStatus.DRAFT}
        broker.stop_write = status in {BrokerStatus.ONLY_READ, BrokerStatus.OFFLINE, BrokerStatus.DRAFT}

    def register(self, request: pb.RegisterRequestB2M, context: RequestContext) -> Message:
        """Register a broker, or renew its registration after a reconnect, and return its configuration.

        Raises:
            RefusedRequest: its credentials or its id are wrong, or another broker uses the id or the address.
        """
        cluster = self._master.cluster
        self._master.admit_broker(request, context)
        pieces = request.clientId.split(":")
        if len(pieces) < 3:
            raise RefusedRequest(ErrCode.BAD_REQUEST, f"{request.clientId!r} is not id:host:port:version")
        info = BrokerInfo.parse(":".join(pieces[:3]))
        known = cluster.brokers.get(info.id)
        self._check_unique(info, context.now_ms, was_registered=request.brokerOnline)
        moves = known is not None and known.online and known.info != info
        if known is None and len(cluster.brokers) >= self._master.config.limits.max_brokers:
            raise RefusedRequest(
                ErrCode.INTERNAL_SERVER_ERROR, f"the limit of {len(cluster.brokers)} brokers is reached"
            )
        setting = self._master.controls.brokers.get(info.id)
        if setting is not None:
            _check_setting(setting, info, request.tlsPort)
        broker = cluster.register(info, context.now_ms)
        broker.connection = context.connection
        broker.disconnected_at = None
        first = known is None and not request.brokerOnline
        broker.yields_until = context.now_ms + self._master.config.limits.broker_session_ms if first else 0
        if info.id not in self._master.controls.seen:
            self._master.newcomers.add(info.id)
        self.order(broker)
        broker.failure = request.failure[:_MAX_FAILURE]
        broker.tls = request.enableTls
        broker.tls_port = request.tlsPort
        broker.web_address = request.webAddress if len(request.webAddress) <= _MAX_ADDRESS else ""
        self._report(
            broker, request.readStatusRpt, request.writeStatusRpt, request.brokerDefaultConfInfo,
            request.brokerTopicSetConfInfo if request.brokerOnline else (), context.now_ms,
        )  # fmt: skip
        broker.need_report = True
        if moves or not request.brokerOnline:
            self._restarted(info.id)
        answer = pb.RegisterResponseM2B(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=OK,
            stopRead=broker.stop_read,
            stopWrite=broker.stop_write,
            takeConfInfo=True,
            enableBrokerInfo=shared_pb2.EnableBrokerFunInfo(
                enableConsumeAuthenticate=False,
                enableConsumeAuthorize=False,
                enableProduceAuthenticate=False,
                enableProduceAuthorize=False,
                enableVisitTokenCheck=self._master.config.check_visit_tokens,
            ),
        )
        self._answer(request, answer, broker, context.now_ms)
        return answer

    def heartbeat(self, request: pb.HeartRequestB2M, context: RequestContext) -> Message:
        """Renew the session of a broker, record what it reports, and return orders and changes of its configuration.

        Raises:
            RefusedRequest: its credentials are wrong, or it is not registered on this connection.
        """
        cluster = self._master.cluster
        self._master.admit_broker(request, context)
        broker = cluster.brokers.get(parse_broker_id(request.brokerId))
        # A heartbeat contains only the broker id. A broker that lost its connection while another one registered its id
        # must not renew the other's session: it registers again, and is refused because the id is in use.
        if broker is None or not broker.online or broker.connection != context.connection:
            raise RefusedRequest(ErrCode.HB_NO_NODE, f"broker {request.brokerId} is not registered, register again")
        cluster.seen(broker, context.now_ms)
        if request.takeConfInfo or request.readStatusRpt != broker.read_status:
            self._report(
                broker, request.readStatusRpt, request.writeStatusRpt, request.brokerDefaultConfInfo,
                request.brokerTopicSetConfInfo, context.now_ms,
            )  # fmt: skip
        broker.write_status = request.writeStatusRpt
        broker.failure = request.failure[:_MAX_FAILURE]
        if request.takeRemovedTopicInfo:
            cluster.removed_on(broker, [text.partition(":")[0] for text in request.removedTopicsInfo])
        synced = cluster.in_sync(broker, request.curBrokerConfId, request.confCheckSumId)
        if synced and request.takeConfInfo:
            broker.need_report = False
        answer = pb.HeartResponseM2B(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=OK,
            stopRead=broker.stop_read,
            stopWrite=broker.stop_write,
            needReportData=broker.need_report or not synced,
            takeConfInfo=broker.push or not synced,
            takeRemoveTopicInfo=True,
            removeTopicConfInfo=cluster.removals(broker),
        )
        broker.push = False
        self._answer(request, answer, broker, context.now_ms)
        return answer

    def close(self, request: pb.CloseRequestB2M, context: RequestContext) -> Message:
        """End the session of a broker that stops. Raises RefusedRequest for wrong credentials."""
        self._master.admit_broker(request, context)
        broker = self._master.cluster.brokers.get(parse_broker_id(request.brokerId))
        if broker is not None and broker.connection == context.connection:
            self._master.cluster.lost(broker)
        return pb.CloseResponseM2B(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)

    def disconnected(self, connection: object, now: int) -> bool:
        """Require the broker that registered on ``connection`` to register again, from any address.

        Its session continues for `broker_reconnect_ms`: a connection may break while the broker serves its clients.
        Returns whether such a broker is online.
        """
        found = False
        for broker in self._master.cluster.brokers.values():
            if broker.online and broker.connection == connection and broker.disconnected_at is None:
                broker.disconnected_at = now
                found = True
        return found

    def _check_unique(self, info: BrokerInfo, now: int, *, was_registered: bool) -> None:
        """Refuse a second broker with the same id, which would take over clients and offsets. Raises RefusedRequest.

        A broker whose connection ended (its process was killed) may register at another address immediately, and one
        whose machine disappeared without closing it when its heartbeat is overdue. A rival that was refused while the
        registered broker lived, as later heartbeats of it show, is another broker with the same id instead: it must not
        take over at a pause or a short network failure of the first one, and waits for the end of its session.

        A master that has just taken over knows neither of two brokers. ``was_registered``: the broker had its id at an
        earlier master. It gets the id back from one that had not, for as long as its session may have continued.
        """
        known = self._master.cluster.brokers.get(info.id)
        address = info.host, info.port
        if known is None or not known.online or (known.info.host, known.info.port) == address:
            return
        since = known.rivals.get(address)
        proved = since is not None and known.last_seen > since
        if not proved and (known.overdue or known.disconnected_at is not None):
            return
        if was_registered and now < known.yields_until:
            return
        if since is None:
            if len(known.rivals) >= _MAX_RIVALS:
                del known.rivals[next(iter(known.rivals))]
            known.rivals[address] = now
        raise RefusedRequest(
            ErrCode.BAD_REQUEST,
            f"broker {info.id} is registered from {known.info.host}:{known.info.port}: "
            "give this broker another id, or stop the other one",
        )

    def _report(
        self, broker: RegisteredBroker, read: int, write: int, default: str, topics: Iterable[str], now: int
    ) -> None:
        changed = broker.read_status != read
        broker.read_status = read
        broker.write_status = write
        if self._master.cluster.report(broker, default, topics) or changed:
            self._changed(now)

    def _answer(self, request: Any, answer: Any, broker: RegisteredBroker, now: int) -> None:
        master = self._master
        master.refresh_tokens(now)
        answer.curBrokerConfId = broker.config_id
        answer.confCheckSumId = broker.check_sum
        if answer.takeConfInfo:
            answer.brokerDefaultConfInfo = master.cluster.default_text
            answer.brokerTopicSetConfInfo.extend(broker.topics)
        answer.ssdStoreId = UNDEFINED
        setting = master.controls.cluster
        answer.qryPriorityId = QUERY_PRIORITY if setting.query_priority is None else setting.query_priority
        answer.authorizedInfo.visitAuthorizedToken = master.visit_token
        answer.brokerAuthorizedInfo.visitAuthorizedToken = f"{master.visit_token},{master.fresh_token}"
        answer.flowCheckId, rules = master.controls.default_flow(request.flowCheckId)
        if answer.flowCheckId not in {request.flowCheckId, UNDEFINED}:
            answer.flowControlInfo = rules
        answer.clsConfig.configId = setting.serial
        if request.clsConfig.configId != setting.serial:
            answer.clsConfig.maxMsgSize = master.max_message_bytes


def _check_setting(setting: BrokerSetting, info: BrokerInfo, tls_port: int) -> None:
    """Refuse a broker that differs from the broker configured under its id. Raises RefusedRequest."""
    if setting.status == BrokerStatus.DRAFT:
        raise RefusedRequest(ErrCode.BAD_REQUEST, f"broker {info.id} is a draft: set it online first")
    if (setting.host, setting.port) != (info.host, info.port):
        text = f"broker {info.id} is configured as {setting.host}:{setting.port}, not {info.host}:{info.port}"
        raise RefusedRequest(ErrCode.BAD_REQUEST, text)
    if setting.tls_port != tls_port:
        text = f"broker {info.id} is configured with TLS port {setting.tls_port}, not {tls_port}"
        raise RefusedRequest(ErrCode.BAD_REQUEST, text)
