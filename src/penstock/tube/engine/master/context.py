"""Shared state and helpers of the master's handlers: refusals, checked names, tokens, settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import shared_pb2
from penstock.tube.codec.strings import GROUP_RULE, UNDEFINED, DefaultConfig, java_trim, valid_group
from penstock.tube.engine.access import AuthenticationResult, ClientAccess
from penstock.tube.engine.limits import DEFAULT_LIMITS, TubeLimits
from penstock.tube.engine.master.cluster import Cluster
from penstock.tube.engine.master.settings import ClusterControls
from penstock.tube.engine.sessions import RequestContext, SessionOrigin, SessionOrigins

__all__ = [
    "DEFAULTS",
    "MAX_FILTERS",
    "MAX_TOPICS",
    "MIN_MESSAGE_BYTES",
    "OK",
    "QUERY_PRIORITY",
    "SETTLE_MS",
    "TOKEN_PERIOD_MS",
    "HasOrigin",
    "MasterConfig",
    "MasterContext",
    "RefusedRequest",
    "client_id_of",
    "group_name_of",
    "refused",
]


OK = "OK!"
MAX_CLIENT_ID = 1024
MAX_TOPICS = 1024
MAX_FILTERS = 500
DEFAULTS = DefaultConfig(partitions=3)
"""Settings of a topic that its configuration does not override."""
QUERY_PRIORITY = 301
"""qryPriorityId of brokers if the cluster's setting has none: consumers read from memory and disk."""
SETTLE_MS = 15_000
"""Time for which a new master waits for reports of a group's members: slightly more than a Java client's heartbeat
interval."""
TOKEN_PERIOD_MS = 240_000
"""Period after which the visit token changes."""
MIN_MESSAGE_BYTES = 1 << 20
"""Smallest maximum message size of a topic, and the unit of ``maxMsgSizeInMB``."""


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """Settings of a master. ``check_visit_tokens``: brokers refuse requests without a visit token of the master."""

    consumer_session_ms: int = 30_000
    check_visit_tokens: bool = False
    limits: TubeLimits = DEFAULT_LIMITS


class RefusedRequest(Exception):
    """Ends a handler with an error response."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class HasOrigin(Protocol):
    """A session of a producer or consumer, with the connection that owns it."""

    origin: SessionOrigin


class MasterContext:
    """State that all handlers of the master share. ``access`` None: clients do not authenticate."""

    def __init__(
        self, config: MasterConfig, cluster: Cluster, controls: ClusterControls, access: ClientAccess | None, now: int
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.controls = controls
        self.access = access
        self.origins = SessionOrigins()
        self.newcomers: set[int] = set()
        """Brokers that registered for the first time."""
        self.visit_token = self.fresh_token = now
        self._token_at = now

    @property
    def max_message_bytes(self) -> int:
        """Message size of topics without their own."""
        return self.controls.cluster.max_message_bytes or MIN_MESSAGE_BYTES

    def broker_infos(self, context: RequestContext) -> list[str]:
        """brokerInfos of an answer: all brokers, online or not, with TLS ports for a client that uses TLS."""
        return self.cluster.broker_infos(tls=context.tls)

    def check_origin(self, session: HasOrigin | None, client_id: str, context: RequestContext) -> None:
        """Refuse a request for a session of another connection if that connection is open or from another host.

        Raises RefusedRequest (411): clients then register again, which `check_free` allows after the end of that
        session.
        """
        origin = self.origins.origin_of(context)
        if session is not None and session.origin is not origin:
            if not session.origin.may_be_continued_by(origin):
                text = f"{client_id} is registered over another connection, register again"
                raise RefusedRequest(ErrCode.HB_NO_NODE, text)
            session.origin = origin

    def check_free(self, session: HasOrigin | None, client_id: str, context: RequestContext) -> None:
        """Refuse to register a client id whose session belongs to another connection. Raises RefusedRequest (430)."""
        if session is not None and not session.origin.may_be_continued_by(self.origins.origin_of(context)):
            text = f"{client_id} is registered over another open connection, or from another host"
            raise RefusedRequest(ErrCode.CLIENT_DUPLICATE_INDEXID, text)

    def refresh_tokens(self, now: int) -> None:
        """Issue a new visit token every four minutes; clients get the previous token, which brokers have already
        received."""
        if now - self._token_at >= TOKEN_PERIOD_MS:
            # Brokers get a token with a heartbeat: all brokers have it before clients get it.
            self.visit_token, self.fresh_token, self._token_at = self.fresh_token, now, now

    def admit(self, request: Any, group: str | None, context: RequestContext) -> AuthenticationResult:
        """Authenticate the sender of ``request``. Raises RefusedRequest (415)."""
        if self.access is None:
            return AuthenticationResult("")
        passed = self.access.admit(request.authInfo, context.peer, group, context.now_ms)
        if passed is None:
            signed = request.authInfo.authInfo.userName
            who = (
                f"user {signed!r}: the signature or its time is wrong" if signed else "no signature and no valid token"
            )
            raise RefusedRequest(ErrCode.CERTIFICATE_FAILURE, f"authentication failed: {who}")
        return passed

    def admit_broker(self, request: Any, context: RequestContext) -> None:
        """Authenticate and authorize the broker that sent ``request``. Raises RefusedRequest."""
        user = self.admit(request, None, context).user
        if self.access is not None and not self.access.may_administer(user):
            text = f"{self.user_label(user)} may not register a broker: that needs Administer for all topics"
            raise RefusedRequest(ErrCode.FORBIDDEN, text)

    def may_consume(self, user: str, topic: str, group: str) -> bool:
        """Return True if ``user`` may consume the topic as a member of the group."""
        return self.access is None or self.access.may_consume(user, topic, group)

    @staticmethod
    def user_label(user: str) -> str:
        """Return the user's name for error texts."""
        return f"user {user}" if user else "an anonymous client"

    def authorized(self, passed: AuthenticationResult, now: int) -> shared_pb2.MasterAuthorizedInfo:
        """authorizedInfo of a response to a client."""
        self.refresh_tokens(now)
        info = shared_pb2.MasterAuthorizedInfo(visitAuthorizedToken=self.visit_token)
        if passed.token:
            info.authAuthorizedToken = passed.token
        return info

    def client_config(self, request: Any, answer: Any) -> None:
        """Set appdConfig of a response to a producer if its version differs."""
        serial = self.controls.cluster.serial
        answer.appdConfig.configId = serial
        # A missing message counts as version 0, as in the reference, so the size is sent.
        if request.appdConfig.configId != serial or self.max_message_bytes != MIN_MESSAGE_BYTES:
            answer.appdConfig.maxMsgSize = self.max_message_bytes


def client_id_of(text: str, host: str | None) -> str:
    """Check a client id. Raises RefusedRequest."""
    client_id = java_trim(text)
    if not client_id or len(client_id) > MAX_CLIENT_ID or "@" in client_id or "#" in client_id:
        raise RefusedRequest(
            ErrCode.BAD_REQUEST, f"client id {client_id!r}: 1 to {MAX_CLIENT_ID} characters, no '@' and no hash"
        )
    if host is not None and not 0 < len(java_trim(host)) <= 256:
        raise RefusedRequest(ErrCode.BAD_REQUEST, f"host name {host!r}: 1 to 256 characters are possible")
    return client_id


def group_name_of(text: str) -> str:
    """Check a group name. Raises RefusedRequest."""
    name = java_trim(text)
    if not valid_group(name):
        raise RefusedRequest(ErrCode.BAD_REQUEST, f"{name!r} is not a valid group name: {GROUP_RULE}")
    return name


# Required fields of an error response in addition to code and text: clients reject a message without them.
_REQUIRED: dict[str, dict[str, int | bool]] = {
    "RegisterResponseM2P": {"brokerCheckSum": -1},
    "HeartResponseM2P": {"brokerCheckSum": -1},
    "RegisterResponseM2B": {"stopRead": False, "stopWrite": False, "takeConfInfo": False},
    "HeartResponseM2B": {
        "stopRead": False,
        "stopWrite": False,
        "curBrokerConfId": UNDEFINED,
        "confCheckSumId": UNDEFINED,
        "needReportData": False,
        "takeConfInfo": False,
        "takeRemoveTopicInfo": False,
    },
}


def refused(kind: type[Message], code: int, text: str) -> Message:
    """Create an error response of type ``kind`` with every required field."""
    fields: dict[str, Any] = dict(_REQUIRED.get(kind.DESCRIPTOR.name, {}))
    if "success" in kind.DESCRIPTOR.fields_by_name:
        fields["success"] = False
    return kind(errCode=code, errMsg=text, **fields)
