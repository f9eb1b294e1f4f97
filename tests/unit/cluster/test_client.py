"""The client of etcd without etcd: what errors mean, and settings that cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from penstock.cluster.client import EtcdClient, EtcdDeniedError, EtcdStatus, EtcdUnavailableError, failure_of
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import ConfigError, RefusedError, UnavailableError
from penstock.runtime.io.tls import Login, TlsOptions
from tests.certificates import Authority
from tests.ports import free_port


class _Error(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        self._code = code
        self._text = text

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader"),
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: request timed out, possibly due to connection lost"),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"),
        (grpc.StatusCode.UNKNOWN, "context deadline exceeded"),
        (grpc.StatusCode.CANCELLED, "context canceled"),
    ],
)
def test_a_call_without_an_answer_may_have_been_executed(code: grpc.StatusCode, text: str) -> None:
    failure = failure_of(_Error(code, text), "etcd-1:2379", "KV/Txn")
    assert isinstance(failure, UnavailableError)
    assert failure.applied is None
    assert (failure.what, failure.why) == ("etcd etcd-1:2379: no answer to KV/Txn", text)


@pytest.mark.parametrize(
    ("code", "text", "remedy"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", "etcdctl alarm disarm"),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large", "--max-request-bytes"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "grpc: received message larger than max", "--max-request-bytes"),
        (grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", "readwrite permission"),
        (grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token", "password_file"),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: authentication failed, invalid user ID", "password_file"),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: user name is empty", "password_file"),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", "password_file"),
        (grpc.StatusCode.FAILED_PRECONDITION, "etcdserver: authentication is not enabled", "remove `cluster.user`"),
        (grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", "log of this etcd"),
    ],
)
def test_a_rejected_call_has_a_remedy(code: grpc.StatusCode, text: str, remedy: str) -> None:
    failure = failure_of(_Error(code, text), "etcd-1:2379", "KV/Txn")
    assert isinstance(failure, RefusedError)
    of_user = ("readwrite permission", "password_file", "remove `cluster.user`")
    assert isinstance(failure, EtcdDeniedError) == (remedy in of_user)
    assert failure.text == text
    assert remedy in (failure.hint or "")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("Connection refused", "the addresses of `cluster.etcd`"),
        ("last error: UNAVAILABLE: ipv4:127.0.0.1:2379: Handshake read failed (Socket closed)", "`cluster.tls.ca`"),
        ("Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED", "`cluster.tls.ca`"),
        ("Unwrap failed (TSI_DATA_CORRUPTED)", "--client-cert-auth"),
        ("Custom verification check failed: Hostname Verification Check failed.", "`server_name`"),
        ("last error: UNAVAILABLE: ipv4:127.0.0.1:2379: Socket closed", "set `cluster.tls` if the member uses TLS"),
    ],
)
def test_the_remedy_for_a_call_without_an_answer(text: str, remedy: str) -> None:
    assert remedy in (failure_of(_Error(grpc.StatusCode.UNAVAILABLE, text), "etcd-1:2379", "KV/Txn").hint or "")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("Connection refused", None),
        ("Unwrap failed (TSI_DATA_CORRUPTED)", "--client-cert-auth"),
        ("last error: UNAVAILABLE: ipv4:127.0.0.1:2379: Socket closed", "`cluster.tls`"),
    ],
)
def test_the_remedy_for_one_member_says_nothing_about_the_others(text: str, remedy: str | None) -> None:
    failure = failure_of(_Error(grpc.StatusCode.UNAVAILABLE, text), "etcd-1:2379", "KV/Txn")
    assert isinstance(failure, EtcdUnavailableError)
    assert failure.member_hint is None if remedy is None else remedy in (failure.member_hint or "")
    assert "most etcd members" not in (failure.member_hint or "")


@pytest.mark.parametrize("endpoints", [[], ["no-port"], ["127.0.0.1:2379", "::1:2379"]])
def test_endpoints_that_cannot_be_used(endpoints: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EtcdClient(endpoints)
    assert caught.value.option == "endpoints"


def test_tls_options_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ca_file"):
        EtcdClient(["127.0.0.1:1"], Login(tls=TlsOptions(tmp_path / "missing.pem")))
    authority = Authority(tmp_path)
    with pytest.raises(ConfigError, match="verify is not supported"):
        EtcdClient(["127.0.0.1:1"], Login(tls=TlsOptions(authority.file, verify=False)))


def test_endpoints_are_tried_in_turn_until_the_client_is_closed() -> None:
    client = EtcdClient([f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"])
    first = client.endpoint
    with pytest.raises(UnavailableError, match=first):
        client.once("KV/Range", pb.RangeRequest(key=b"k"), pb.RangeResponse)
    assert client.endpoint != first
    with pytest.raises(UnavailableError, match="no answer to KV/Range"):
        client.call("KV/Range", pb.RangeRequest(key=b"k"), pb.RangeResponse, within_s=0.2)
    with pytest.raises(UnavailableError, match="no answer to Lease/LeaseKeepAlive"):
        client.keep_alive(1, deadline_s=1)
    client.close()
    with pytest.raises(UnavailableError, match="is closed"):
        client.once("KV/Range", pb.RangeRequest(key=b"k"), pb.RangeResponse)


def test_a_call_is_created_once_per_endpoint_and_method(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[str] = []

    class Channel:
        def __init__(self, endpoint: str, **_: object) -> None:
            self._endpoint = endpoint

        def unary_unary(self, path: str, **_: object) -> Callable[..., pb.TxnResponse]:
            created.append(f"{self._endpoint}{path}")
            return lambda *_, **__: pb.TxnResponse(succeeded=True)

        def close(self) -> None:
            created.append("closed")

    monkeypatch.setattr(grpc, "insecure_channel", Channel)
    client = EtcdClient(["127.0.0.1:1"])
    for _ in range(3):
        assert client.once("KV/Txn", pb.TxnRequest(), pb.TxnResponse).succeeded
    client.close()
    with pytest.raises(UnavailableError, match="is closed"):
        client.once("KV/Txn", pb.TxnRequest(), pb.TxnResponse)
    assert created == ["127.0.0.1:1/etcdserverpb.KV/Txn", "closed"]


def test_grpc_prints_nothing_and_child_processes_inherit_no_variable() -> None:
    """A failed handshake is a message of gRPC at its default level."""
    script = (
        "import os, socket, threading\n"
        "from penstock.cluster.client import grpc\n"
        "print('GRPC_VERBOSITY' in os.environ)\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "def serve():\n"
        "    connection, _ = server.accept()\n"
        "    connection.sendall(b'no TLS')\n"
        "    connection.close()\n"
        "threading.Thread(target=serve, daemon=True).start()\n"
        "with grpc.secure_channel(f'127.0.0.1:{server.getsockname()[1]}', grpc.ssl_channel_credentials()) as channel:\n"
        "    try:\n"
        "        channel.unary_unary('/etcdserverpb.KV/Range')(b'', timeout=20)\n"
        "    except grpc.RpcError as error:\n"
        "        print(error.code().name)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["False", "UNAVAILABLE"], "")


@pytest.mark.parametrize(
    "expired",
    [
        (grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token"),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: revision of auth store is old"),
    ],
)
@pytest.mark.parametrize("denied", [False, True])
def test_the_status_of_a_member_after_the_token_has_expired_and_if_only_root_may_read_it(
    tmp_path: Path, denied: bool, expired: tuple[grpc.StatusCode, str]
) -> None:
    tokens = iter(["expired", "current"])

    def authenticate(_request: pb.AuthenticateRequest, _context: grpc.ServicerContext) -> pb.AuthenticateResponse:
        return pb.AuthenticateResponse(token=next(tokens))

    def status(_request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        if dict(context.invocation_metadata())["token"] != "current":
            context.abort(*expired)
        if denied:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
        return pb.StatusResponse(version="3.6.1", dbSize=7)

    server = grpc.server(ThreadPoolExecutor(1))
    for service, method, answer, request, response in (
        ("Auth", "Authenticate", authenticate, pb.AuthenticateRequest, pb.AuthenticateResponse),
        ("Maintenance", "Status", status, pb.StatusRequest, pb.StatusResponse),
    ):
        handler = grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=request.FromString, response_serializer=response.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", {method: handler})
        server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (tmp_path / "password").write_text("secret")
    client = EtcdClient([f"127.0.0.1:{port}"], Login("edge", tmp_path / "password"))
    try:
        (found,) = client.statuses()
    finally:
        client.close()
        server.stop(None).wait()
    endpoint = f"127.0.0.1:{port}"
    assert found == (EtcdStatus(endpoint) if denied else EtcdStatus(endpoint, "3.6.1", True, 7))


@pytest.mark.parametrize("by", ["call", "status", "denial"])
def test_files_of_tls_that_were_replaced_are_used_after_a_call_that_failed(tmp_path: Path, by: str) -> None:
    """As after the certificate of a node has expired, or an authority was replaced: the node need not restart. The
    name in a certificate can be the user."""
    server_authority, authority = Authority(tmp_path / "server"), Authority(tmp_path / "clients")
    stranger = authority.issue("other") if by == "denial" else Authority(tmp_path / "strangers").issue("edge")
    certificate, key = server_authority.issue("etcd", "127.0.0.1")

    def answer(_request: pb.RangeRequest, context: grpc.ServicerContext) -> pb.RangeResponse:
        if b"edge" not in context.auth_context()["x509_common_name"]:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
        return pb.RangeResponse(count=1)

    handlers = {
        "Range": grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=pb.RangeRequest.FromString,
            response_serializer=pb.RangeResponse.SerializeToString,
        )
    }
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("etcdserverpb.KV", handlers),))
    chains = [(key.read_bytes(), certificate.read_bytes())]
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials(chains, authority.file.read_bytes(), require_client_auth=True),
    )
    server.start()
    client = EtcdClient([f"127.0.0.1:{port}"], Login(tls=TlsOptions(server_authority.file, *stranger)))
    request = pb.RangeRequest(key=b"k")
    try:
        failure = EtcdDeniedError if by == "denial" else EtcdUnavailableError
        with pytest.raises(failure):
            client.once("KV/Range", request, pb.RangeResponse)
        stranger[1].write_bytes(b"")  # gRPC would end the process
        with pytest.raises(failure):
            client.once("KV/Range", request, pb.RangeResponse)
        for old, new in zip(stranger, authority.issue("edge"), strict=True):
            new.replace(old)
        if by == "denial":
            with pytest.raises(failure):
                client.once("KV/Range", request, pb.RangeResponse)
        if by == "status":
            client.statuses()
        assert client.call("KV/Range", request, pb.RangeResponse, within_s=60).count == 1
        for path in stranger:
            path.unlink()
        server.stop(None).wait()
        with pytest.raises(EtcdUnavailableError):  # not the error of a missing file
            client.once("KV/Range", request, pb.RangeResponse)
    finally:
        client.close()
        server.stop(None).wait()


def test_a_password_file_that_is_missing_for_now_is_the_answer_of_a_call(tmp_path: Path) -> None:
    """For example while it is replaced: no thread that calls etcd may end because of it."""
    client = EtcdClient(["127.0.0.1:1"], Login("edge", tmp_path / "password"))
    try:
        (found,) = client.statuses()
    finally:
        client.close()
    assert isinstance(found, RefusedError)
    assert "cannot be authenticated" in found.what
    assert "cannot be read" in (found.why or "")
