"""A blocking client of etcd: the calls that penstock needs, over several endpoints, with deadlines, TLS and users.

Each endpoint has a separate channel. :meth:`EtcdClient.call` repeats a call without an answer at the next endpoint; for
calls that must not be executed twice, :meth:`EtcdClient.once` leaves this to its caller. After a call without an answer
the files of TLS are read again. Dead members are detected by deadlines instead of pings, because etcd closes
connections that send pings more often than every 5 s.

A client may be used from any thread. Messages: ``proto/etcd.proto``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from penstock.cluster.grpc_import import grpc
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.network import parse_address
from penstock.runtime.io.tls import ANONYMOUS_LOGIN, Login, TlsOptions

__all__ = [
    "DEADLINE_S",
    "EtcdClient",
    "EtcdDeniedError",
    "EtcdStatus",
    "EtcdUnavailableError",
    "Watch",
    "failure_of",
]

DEADLINE_S: Final = 1.0
"""Default deadline of a call in seconds."""

_OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Otherwise channels to one address would share a connection and its failure.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    # Fragments of a watch have up to 2 MiB; a page of frames may be larger.
    ("grpc.max_receive_message_length", 32 << 20),
)
_WITH_LEADER: Final = ("hasleader", "true")
"""Metadata with which a member without a leader fails the call immediately."""
_UNANSWERED: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNKNOWN,  # "context deadline exceeded"
        grpc.StatusCode.CANCELLED,
    }
)
"""Status codes after which it is unknown whether the call was executed."""


class _Message(Protocol):
    """A message of protobuf."""

    def SerializeToString(self) -> bytes: ...  # noqa: N802 - protobuf's name


Response = TypeVar("Response", bound=_Message)


class EtcdUnavailableError(UnavailableError):
    """No member of etcd answered, or one of them did not.

    ``member_hint``: what to do with the member that was called, None if that depends on whether the others answer; the
    action of the error is for all of them.
    """

    def __init__(self, what: str, *, why: str | None = None, hint: str = "", member_hint: str | None = None) -> None:
        super().__init__(what, why=why, hint=hint or member_hint or _CHECK_MEMBERS)
        self.member_hint = member_hint


class EtcdDeniedError(RefusedError):
    """etcd does not admit the user of the node, who lacks a permission or cannot be authenticated, and did not execute
    the call. It may admit the user later."""


class EtcdStatus(NamedTuple):
    """Status of a member: ``endpoint``, ``version``, whether it is etcd's leader, size of its database in bytes, and
    alarms. None: it answers, but only the user root may read its status, as with etcd 3.6.5."""

    endpoint: str
    version: str | None = None
    leads: bool | None = None
    used_bytes: int | None = None
    quota_bytes: int = 0
    """Quota of the database in bytes; 0 before etcd 3.6, which does not report it."""
    errors: tuple[str, ...] = ()


class Watch(NamedTuple):
    """An open watch at ``endpoint``. ``responses`` end with ``grpc.RpcError``, also after ``cancel``."""

    endpoint: str
    responses: Iterator[pb.WatchResponse]
    cancel: Callable[[], object]


class EtcdClient:
    """A client of the etcd cluster with the members ``endpoints`` (host:port). ``login``: user or TLS files.

    Raises:
        ConfigError: an endpoint or a file cannot be used.
    """

    def __init__(self, endpoints: Sequence[str], login: Login = ANONYMOUS_LOGIN) -> None:
        if not endpoints:
            raise ConfigError("etcd: no endpoints", option="endpoints", hint="list host:port of every etcd member")
        for endpoint in endpoints:
            try:
                parse_address(endpoint)
            except ValueError as error:
                raise ConfigError(f"etcd: endpoint {endpoint!r}: {error}", option="endpoints") from None
        self.endpoints = tuple(endpoints)
        self._login = login
        self._files = None if login.tls is None else _checked_files(login.tls)
        """Contents of the files of TLS with which the channels connect."""
        self._channels: dict[str, grpc.Channel] = {}
        self._calls: dict[tuple[str, str], Callable[..., object]] = {}
        """Unary calls by endpoint and method: creating one takes as long as building a small commit."""
        self._current = 0
        self._lock = threading.Lock()
        self._token: str | None = None
        self._closed = threading.Event()

    @property
    def endpoint(self) -> str:
        """The endpoint of the next call."""
        return self.endpoints[self._current]

    def close(self) -> None:
        """Close the channels; running calls fail."""
        self._closed.set()
        with self._lock:
            channels, self._channels = self._channels, {}
            self._calls.clear()
        for channel in channels.values():
            channel.close()

    def once(
        self, method: str, request: _Message, response: type[Response], *, deadline_s: float = DEADLINE_S
    ) -> Response:
        """Call ``method`` (such as ``KV/Txn``) at one endpoint; without an answer, the next call is sent to the next
        endpoint.

        Raises:
            UnavailableError: no answer; the call may have been executed.
            RefusedError: etcd rejected the call (rights, size, a full database) and did not execute it.
        """
        endpoint = self.endpoint
        try:
            return self._authenticated_unary(endpoint, method, request, response, deadline_s)
        except grpc.RpcError as error:
            failure = failure_of(error, endpoint, method)
            if isinstance(failure, UnavailableError):
                self._leave(endpoint)
            elif isinstance(failure, EtcdDeniedError):  # the user can be the name of the certificate
                self._use_changed_files()
            raise failure from error

    def call(
        self,
        method: str,
        request: _Message,
        response: type[Response],
        *,
        deadline_s: float = DEADLINE_S,
        within_s: float = 10.0,
    ) -> Response:
        """:meth:`once`, repeated at the other endpoints for ``within_s``: for calls that may be executed twice.

        Raises:
            UnavailableError: no endpoint answered in time.
            RefusedError: as for :meth:`once`.
        """
        end = time.monotonic() + within_s
        pauses = Backoff(0.05, 0.5)
        while True:
            try:
                return self.once(method, request, response, deadline_s=deadline_s)
            except UnavailableError:
                if self._closed.is_set() or time.monotonic() > end:
                    raise
            self._closed.wait(pauses.failed())

    def keep_alive(self, lease: int, *, deadline_s: float) -> int:
        """Renew a lease; returns its remaining seconds, 0 or less if it has ended.

        Raises:
            UnavailableError, RefusedError: as for :meth:`once`.
        """
        endpoint = self.endpoint
        call = self._channel(endpoint).stream_stream(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=pb.LeaseKeepAliveResponse.FromString,
        )
        try:
            answers = call(
                iter([pb.LeaseKeepAliveRequest(ID=lease)]),
                timeout=deadline_s,
                metadata=self._metadata(self._authenticated(endpoint, deadline_s)),
            )
            for answer in answers:
                return int(answer.TTL)
        except grpc.RpcError as error:
            failure = failure_of(error, endpoint, "Lease/LeaseKeepAlive")
            self._leave(endpoint)
            raise failure from error
        self._leave(endpoint)
        raise EtcdUnavailableError(f"etcd {endpoint}: no answer to Lease/LeaseKeepAlive")

    def watch(self, requests: Iterator[pb.WatchRequest]) -> Watch:
        """Open a watch with ``requests``. Raises UnavailableError or RefusedError if the user cannot be
        authenticated."""
        endpoint = self.endpoint
        call = self._channel(endpoint).stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )
        responses = call(requests, metadata=self._metadata(self._authenticated(endpoint, DEADLINE_S)))
        return Watch(endpoint, responses, responses.cancel)

    def statuses(self) -> list[EtcdStatus | PenstockError]:
        """Return the status of each endpoint, or the error that prevented it."""
        found: list[EtcdStatus | PenstockError] = []
        for endpoint in self.endpoints:
            try:
                answer = self._authenticated_unary(
                    endpoint, "Maintenance/Status", pb.StatusRequest(), pb.StatusResponse, DEADLINE_S
                )
            except grpc.RpcError as error:
                denied = error.code() is grpc.StatusCode.PERMISSION_DENIED
                failure = failure_of(error, endpoint, "Maintenance/Status")
                if isinstance(failure, UnavailableError):
                    self._use_changed_files()
                found.append(EtcdStatus(endpoint) if denied else failure)
            except (UnavailableError, RefusedError) as failure:
                found.append(failure)
            else:
                found.append(
                    EtcdStatus(
                        endpoint,
                        answer.version,
                        answer.leader == answer.header.member_id,
                        answer.dbSizeInUse or answer.dbSize,
                        answer.dbSizeQuota,
                        tuple(answer.errors),
                    )
                )
        return found

    def prefer_leader(self) -> None:
        """Send the next calls to etcd's leader: a commit through another member takes 0.4 ms more."""
        for status in self.statuses():
            if isinstance(status, EtcdStatus) and status.leads:
                self._current = self.endpoints.index(status.endpoint)

    def _authenticated_unary(
        self, endpoint: str, method: str, request: _Message, response: type[Response], deadline_s: float
    ) -> Response:
        """Call with the user's token, with a new one if it has expired. Raises grpc.RpcError, and UnavailableError or
        RefusedError if the user cannot be authenticated."""
        token = self._authenticated(endpoint, deadline_s)
        try:
            return self._unary(endpoint, method, request, response, deadline_s, token)
        except grpc.RpcError as error:
            if token is None or not (
                error.code() is grpc.StatusCode.UNAUTHENTICATED or _OLD_REVISION in (error.details() or "")
            ):
                raise
        self._token = None
        token = self._authenticated(endpoint, deadline_s)
        return self._unary(endpoint, method, request, response, deadline_s, token)

    def _unary(
        self,
        endpoint: str,
        method: str,
        request: _Message,
        response: type[Response],
        deadline_s: float,
        token: str | None,
    ) -> Response:
        call = self._calls.get((endpoint, method))
        if call is None:
            channel = self._channel(endpoint)
            call = channel.unary_unary(
                f"/etcdserverpb.{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=response.FromString,  # type: ignore[attr-defined]  # of every message
            )
            with self._lock:
                if self._channels.get(endpoint) is channel:  # it was not closed or replaced meanwhile
                    self._calls[endpoint, method] = call
        answer = call(request, timeout=deadline_s, metadata=self._metadata(token))
        assert isinstance(answer, response)
        return answer

    def _metadata(self, token: str | None) -> tuple[tuple[str, str], ...]:
        return (_WITH_LEADER,) if token is None else (_WITH_LEADER, ("token", token))

    def _authenticated(self, endpoint: str, deadline_s: float) -> str | None:
        """Return the token of the user; None without a password."""
        if self._login.password_file is None:
            return None
        if self._token is None:
            try:
                password = self._login.password() or ""
            except ConfigError as error:  # for example while the file is replaced
                raise EtcdDeniedError(
                    f"etcd {endpoint}: the user cannot be authenticated", why=error.what, hint=error.hint
                ) from error
            request = pb.AuthenticateRequest(name=self._login.username or "", password=password)
            try:
                answer = self._unary(endpoint, "Auth/Authenticate", request, pb.AuthenticateResponse, deadline_s, None)
            except grpc.RpcError as error:
                failure = failure_of(error, endpoint, "Auth/Authenticate")
                if isinstance(failure, UnavailableError):
                    self._leave(endpoint)
                raise failure from error
            self._token = answer.token
        return self._token

    def _channel(self, endpoint: str) -> grpc.Channel:
        with self._lock:
            if self._closed.is_set():
                raise UnavailableError("etcd: the client is closed", applied=False)
            channel = self._channels.get(endpoint)
            if channel is None:
                channel = self._channels[endpoint] = self._connect(endpoint)
            return channel

    def _connect(self, endpoint: str) -> grpc.Channel:
        if self._files is None:
            return grpc.insecure_channel(endpoint, options=_OPTIONS)
        name = self._login.tls.server_name if self._login.tls is not None else None
        named = () if name is None else (("grpc.ssl_target_name_override", name),)
        return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(*self._files), options=(*_OPTIONS, *named))

    def _leave(self, endpoint: str) -> None:
        """Switch to the next endpoint, unless another thread has done so."""
        with self._lock:
            if self.endpoints[self._current] == endpoint:
                self._current = (self._current + 1) % len(self.endpoints)
        self._use_changed_files()

    def _use_changed_files(self) -> None:
        """Connect again if the files of TLS have changed, as after a renewal of the certificate."""
        tls = self._login.tls
        if tls is None:
            return
        try:
            files = _read_files(tls)
            # gRPC ends the process if a key is empty: files that are being replaced are read again after a later call.
            if files == self._files or _checked_files(tls) != files:
                return
        except (OSError, ConfigError):
            return
        with self._lock:
            self._files = files
            self._channels.clear()  # other threads may use the channels, which end with their last call
            self._calls.clear()


_CHECK_MEMBERS: Final = (
    "check that most etcd members run and are reachable at the addresses of `cluster.etcd`; then calls continue"
    " automatically"
)
"""The remedy if no member answers."""
_OLD_REVISION: Final = "revision of auth store is old"
"""Text of etcd about a token that is older than a change of users or roles; JWT tokens contain the revision."""
_AUTHENTICATION_FAILURES: Final = ("authentication failed", "user name is empty", _OLD_REVISION)
"""Texts of etcd about a user."""
_TLS_FAILURES: Final = ("TSI_", "andshake", "CERTIFICATE_VERIFY_FAILED", "Hostname Verification")
"""Texts of gRPC about TLS."""


def failure_of(error: grpc.RpcError, endpoint: str, method: str) -> UnavailableError | RefusedError:
    """Translate an error of gRPC: no answer, or a rejection with its remedy."""
    code, text = error.code(), error.details() or ""
    if code in _UNANSWERED:
        what, why = f"etcd {endpoint}: no answer to {method}", text or code.name
        if any(failure in text for failure in _TLS_FAILURES):
            why = f"the TLS handshake failed: {text}"
            member_hint = (
                "check that the member uses TLS, `cluster.tls.ca` and `server_name`, and that it accepts the client "
                "certificate (`certificate`, `key`): with --client-cert-auth etcd needs one of its --trusted-ca-file, "
                "which has not expired"
            )
            return EtcdUnavailableError(what, why=why, member_hint=member_hint)
        if text.endswith("Socket closed"):
            tls = "set `cluster.tls` if the member uses TLS; otherwise "
            return EtcdUnavailableError(what, why=why, hint=tls + _CHECK_MEMBERS, member_hint=f"{tls}see its log")
        return EtcdUnavailableError(what, why=why)
    kind: type[RefusedError] = RefusedError
    if "database space exceeded" in text:
        hint = (
            "free space in etcd: etcdctl defrag --cluster, then etcdctl alarm disarm (without an active node first "
            "etcdctl compact REVISION); or start it with a larger --quota-backend-bytes"
        )
    elif code is grpc.StatusCode.PERMISSION_DENIED:
        kind, hint = EtcdDeniedError, "grant the user a role with readwrite permission for the prefix of the cluster"
    elif "authentication is not enabled" in text:
        kind = EtcdDeniedError
        hint = "remove `cluster.user` and `password_file`, or enable authentication: etcdctl auth enable"
    elif code is grpc.StatusCode.UNAUTHENTICATED or any(failure in text for failure in _AUTHENTICATION_FAILURES):
        kind = EtcdDeniedError
        hint = "check user and password_file, or the name (CN) of the client certificate: etcdctl user list"
    elif "too large" in text or "larger than max" in text:
        hint = "start every etcd member with its default --max-request-bytes (1.5 MiB) or a larger one"
    else:
        hint = "see the log of this etcd member"
    return kind(
        f"etcd {endpoint}: {method} was rejected: {text or code.name}",
        code=int(code.value[0]),
        text=text,
        peer=endpoint,
        hint=hint,
    )


def _checked_files(tls: TlsOptions) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Return the contents of the files of authorities, key and certificate. Raises ConfigError."""
    tls.context()  # raises an error for files that cannot be used
    if not tls.verify or tls.key_password is not None:
        option = "verify" if not tls.verify else "key_password"
        raise ConfigError(
            f"etcd: {option} is not supported", option=option, hint="use a CA file and a key without a password"
        )
    return _read_files(tls)


def _read_files(tls: TlsOptions) -> tuple[bytes | None, bytes | None, bytes | None]:
    key = None if tls.cert_file is None else tls.key_file or tls.cert_file
    ca, private, chain = (
        None if path is None else Path(path).read_bytes() for path in (tls.ca_file, key, tls.cert_file)
    )
    return ca, private, chain
