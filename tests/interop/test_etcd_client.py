"""The client of etcd with real members: failover, TLS with client certificates, users, errors with a remedy."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from penstock.cluster.client import EtcdClient, EtcdStatus
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import RefusedError, UnavailableError
from penstock.runtime.io.tls import Login, TlsOptions
from tests.certificates import Authority
from tests.interop.etcd import EtcdCluster

DEADLINE_S = 60


@pytest.fixture
def client(three: EtcdCluster) -> Iterator[EtcdClient]:
    client = EtcdClient(three.endpoints)
    client.call("KV/Range", pb.RangeRequest(key=b"up"), pb.RangeResponse, within_s=30)
    client.prefer_leader()
    yield client
    client.close()


def put(client: EtcdClient, key: bytes, value: bytes = b"", within_s: float = 30) -> int:
    request = pb.TxnRequest(success=[pb.RequestOp(request_put=pb.PutRequest(key=key, value=value))])
    return client.call("KV/Txn", request, pb.TxnResponse, within_s=within_s).header.revision


def get(client: EtcdClient, key: bytes) -> list[bytes]:
    return [
        found.value for found in client.call("KV/Range", pb.RangeRequest(key=key), pb.RangeResponse, within_s=30).kvs
    ]


def test_members_and_their_leader(client: EtcdClient) -> None:
    def holds() -> bool:
        client.prefer_leader()
        statuses = [status for status in client.statuses() if isinstance(status, EtcdStatus) and not status.errors]
        leaders = [status.endpoint for status in statuses if status.leads]
        return len(statuses) == 3 and leaders == [client.endpoint]

    wait_until(holds)  # a member that is slow has no status, or another one is elected


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_calls_continue_at_another_member(three: EtcdCluster, client: EtcdClient, fault: str) -> None:
    leader = three.member(client.endpoint)
    put(client, b"before", b"1")
    if fault == "kill":
        three.kill(leader)
    else:
        three.pause(leader)
    try:
        put(client, b"after", b"1", within_s=DEADLINE_S)
        assert client.endpoint != three.endpoints[leader]
        assert get(client, b"before") == [b"1"]

        def failed() -> list[str]:
            return [str(status) for status in client.statuses() if not isinstance(status, EtcdStatus)]

        wait_until(lambda: len(failed()) == 1)
        assert all("most etcd members run" in text for text in failed())
    finally:
        three.start() if fault == "kill" else three.resume(leader)


def test_without_a_majority_nothing_is_answered(three: EtcdCluster, client: EtcdClient) -> None:
    left = three.member(client.endpoint)
    others = [member for member in range(3) if member != left]
    three.kill(*others)
    try:
        with pytest.raises(UnavailableError, match="no answer to KV/Txn") as caught:
            client.call(
                "KV/Txn",
                pb.TxnRequest(success=[pb.RequestOp(request_put=pb.PutRequest(key=b"k"))]),
                pb.TxnResponse,
                within_s=1.5,
            )
        assert caught.value.applied is None
    finally:
        three.start()
    put(client, b"k", within_s=DEADLINE_S)


def test_a_lease_is_kept_and_ends(client: EtcdClient) -> None:
    lease = client.call("Lease/LeaseGrant", pb.LeaseGrantRequest(TTL=60), pb.LeaseGrantResponse).ID
    assert client.keep_alive(lease, deadline_s=DEADLINE_S) == 60
    client.call("Lease/LeaseRevoke", pb.LeaseRevokeRequest(ID=lease), pb.LeaseRevokeResponse)
    assert client.keep_alive(lease, deadline_s=DEADLINE_S) <= 0


def test_a_watch_reports_a_change(client: EtcdClient) -> None:
    create = pb.WatchCreateRequest(key=b"watched", start_revision=put(client, b"other") + 1)
    watch = client.watch(iter([pb.WatchRequest(create_request=create)]))
    assert watch.endpoint == client.endpoint
    assert next(watch.responses).created
    put(client, b"watched", b"1")
    (event,) = next(watch.responses).events
    assert (event.type, event.kv.value) == (pb.Event.PUT, b"1")
    watch.cancel()
    with pytest.raises(grpc.RpcError):
        next(watch.responses)


def test_a_request_that_is_too_large_has_a_remedy(client: EtcdClient) -> None:
    with pytest.raises(RefusedError, match="request is too large") as caught:
        put(client, b"large", bytes(1_600_000))
    assert "--max-request-bytes" in (caught.value.hint or "")


STRANGER = """
from penstock.cluster.client import EtcdClient
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import UnavailableError
from penstock.runtime.io.tls import Login, TlsOptions

client = EtcdClient(["{endpoint}"], Login(tls=TlsOptions("{authority}")))
try:
    client.once("KV/Range", pb.RangeRequest(key=b"k"), pb.RangeResponse)
except UnavailableError:
    print("refused")
"""


def test_client_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("server", "127.0.0.1")
    certificate, key = authority.issue("edge")
    cluster = EtcdCluster(tmp_path, 1, tls=(*server, authority.file))
    cluster.start()
    try:
        client = EtcdClient(cluster.endpoints, Login(tls=TlsOptions(authority.file, certificate, key)))
        put(client, b"k", b"1")
        assert get(client, b"k") == [b"1"]
        client.close()
        stranger = EtcdClient(cluster.endpoints, Login(tls=TlsOptions(authority.file)))

        def refused() -> bool:
            with pytest.raises(UnavailableError) as caught:
                stranger.once("KV/Range", pb.RangeRequest(key=b"k"), pb.RangeResponse)
            found = "the TLS handshake failed" in str(caught.value)
            return found and "--client-cert-auth" in (caught.value.hint or "")

        wait_until(refused)  # without an answer in time, the reason is another one
        stranger.close()
        program = STRANGER.format(endpoint=cluster.endpoints[0], authority=str(authority.file))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("refused\n", ""), "gRPC prints nothing"
    finally:
        cluster.close()


def test_users_and_roles(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path, 1, options=["--auth-token-ttl", "1"])
    cluster.start()
    passwords = tmp_path / "password"
    passwords.write_text("secret\n", encoding="utf-8")
    try:
        with grpc.insecure_channel(cluster.endpoints[0]) as channel:
            grpc.channel_ready_future(channel).result(30)
            for user in ("root", "edge"):
                administer(channel, "UserAdd", user, "secret")
                administer(channel, "RoleAdd", user)
                administer(channel, "UserGrantRole", user, user)
            # readwrite for keys from /penstock/ up to /penstock0
            administer(channel, "RoleGrantPermission", "edge", b"\x08\x02" + fields("", b"/penstock/", b"/penstock0"))
            administer(channel, "AuthEnable")
        client = EtcdClient(cluster.endpoints, Login("edge", passwords))
        put(client, b"/penstock/a", b"1")
        with pytest.raises(RefusedError, match="permission denied") as caught:
            put(client, b"/other")
        assert "readwrite permission" in (caught.value.hint or "")
        assert client._token is not None
        client._token = "expired.1"
        assert get(client, b"/penstock/a") == [b"1"]
        client.close()
        passwords.write_text("wrong\n", encoding="utf-8")
        with pytest.raises(RefusedError, match="authentication failed") as caught:
            put(EtcdClient(cluster.endpoints, Login("edge", passwords)), b"/penstock/a")
        assert "password_file" in (caught.value.hint or "")
        with pytest.raises(RefusedError, match="user name is empty"):
            put(EtcdClient(cluster.endpoints), b"/penstock/a")
    finally:
        cluster.close()


def fields(*values: str | bytes) -> bytes:
    """Encode a message whose fields 1, 2, … are texts or bytes; empty ones are left out."""
    encoded = b""
    for number, value in enumerate(values, 1):
        data = value.encode() if isinstance(value, str) else value
        if data:
            encoded += bytes([number << 3 | 2, len(data)]) + data
    return encoded


def administer(channel: grpc.Channel, method: str, *values: str | bytes) -> None:
    """A call of etcd's service Auth that penstock itself does not make."""
    call = channel.unary_unary(f"/etcdserverpb.Auth/{method}", request_serializer=bytes, response_deserializer=bytes)
    call(fields(*values), timeout=DEADLINE_S)


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)
