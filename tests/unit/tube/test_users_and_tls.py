"""Users and TLS of real servers: signatures and tokens on the wire, certificates of one side and of both."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import trustme

from penstock.tube.broker.broker import TubeBroker
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2, shared_pb2
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.engine.access import ClientAccess, sign
from penstock.tube.engine.client.consumer_state import Membership
from penstock.tube.master.master import TubeMaster
from tests.unit.tube.broker_client import Client
from tests.unit.tube.servers import keys_of, until

USERS = {"usr": "pw", "broker": "other"}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA, *, mutual: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        authority.configure_trust(context)
    return context


def client_context(authority: trustme.CA, *, certificate: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if certificate:
        authority.issue_cert("client@example.org").configure_cert(context)
    return context


class Cluster:
    def __init__(self, path: Path) -> None:
        self.master = TubeMaster(path / "master", access=ClientAccess(keys_of(USERS)))
        self.path = path

    async def start(self) -> None:
        self.address = await self.master.start("127.0.0.1", 0)
        masters = [f"127.0.0.1:{self.address[1]}"]
        self.broker = TubeBroker(
            self.path,
            masters=masters,
            heartbeat_s=0.05,
            access=ClientAccess(keys_of(USERS)),
            master_user=("broker", "other"),
        )
        self.broker_address = await self.broker.start("127.0.0.1", 0)
        await self.master.create_topic("demo", ready_s=60)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    running = Cluster(tmp_path)
    await running.start()
    yield running
    await running.broker.close()
    await running.master.close()


async def token_of(cluster: Cluster) -> str:
    client = await Client.connect(cluster.address)
    request = pb.RegisterRequestP2M(clientId="p", brokerCheckSum=-1, hostName="h")
    assert (await client.ask(MethodId.PRODUCER_REGISTER, request)).errCode == 415
    now = cluster.broker.clock()
    request.authInfo.authInfo.CopyFrom(
        shared_pb2.AuthenticateInfo(
            userName="usr", timestamp=now, nonce=1, othParams="", signature=sign("usr", keys_of(USERS)["usr"], now, 1)
        )
    )
    answer = await client.ask(MethodId.PRODUCER_REGISTER, request)
    await client.close()
    return str(answer.authorizedInfo.authAuthorizedToken)


async def test_a_token_of_the_master_opens_the_broker(cluster: Cluster) -> None:
    token = await token_of(cluster)
    client = await Client.connect(cluster.broker_address)
    assert (await client.answer(client.send(b"x"))).errCode == 415
    request = broker_pb2.SendMessageRequestP2B(
        clientId="p", topicName="demo", partitionId=0, data=b"x", flag=0, checkSum=-1, sentAddr=0
    )
    request.authInfo.visitAuthorizedToken = -2
    request.authInfo.authAuthorizedToken = token
    for _ in range(2):
        assert (await client.ask(MethodId.SEND_MESSAGE, request)).errCode == 200
    assert (await client.register()).errCode == 415
    register = broker_pb2.RegisterRequestC2B(
        opType=31, clientId="c", groupName="group", topicName="demo", partitionId=0, readStatus=0
    )
    register.authInfo.visitAuthorizedToken = -2
    register.authInfo.authAuthorizedToken = token
    assert (await client.ask(MethodId.PARTITION_REGISTER, register)).errCode == 200
    assert len((await client.get()).messages) == 2
    beat = broker_pb2.HeartBeatRequestC2B(clientId="c", groupName="group", readStatus=0)
    answer = await client.ask(MethodId.PARTITION_HEARTBEAT, beat)
    assert (answer.errCode, answer.requireAuth) == (415, True)
    await client.close()


async def test_a_broker_that_cannot_sign_is_not_taken(cluster: Cluster, tmp_path: Path) -> None:
    masters = [f"127.0.0.1:{cluster.address[1]}"]
    stranger = TubeBroker(tmp_path / "stranger", broker_id=9, masters=masters, master_user=("broker", "wrong"))
    await stranger.start("127.0.0.1", 0)
    requests = cluster.master.engine.requests
    await until(lambda: cluster.master.engine.requests > requests)
    assert 9 not in cluster.master.engine.cluster.brokers
    await stranger.close()


async def send_to(address: tuple[str, int], tls: ssl.SSLContext) -> None:
    client = await Client.connect(address, tls)
    try:
        await client.answer(client.send(b"x"))
    finally:
        with suppress(ssl.SSLError):
            await client.close()


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_of_one_side_and_of_both(tmp_path: Path, authority: trustme.CA, mutual: bool) -> None:
    context = server_context(authority, mutual=mutual)
    master = TubeMaster(tmp_path / "master")
    plain = await master.start("127.0.0.1", 0, tls=context, tls_port=0)
    broker = TubeBroker(tmp_path, masters=[f"127.0.0.1:{plain[1]}"], heartbeat_s=0.05)
    await broker.start("127.0.0.1", 0, tls=context, tls_port=0)
    await master.create_topic("demo", ready_s=60)
    assert master.tls_bound is not None
    assert broker.tls_bound is not None
    trusting = client_context(authority, certificate=mutual)
    client = await Client.connect(master.tls_bound, trusting)
    request = pb.RegisterRequestP2M(clientId="p", brokerCheckSum=-1, hostName="h")
    found = await client.ask(MethodId.PRODUCER_REGISTER, request)
    assert list(found.brokerInfos) == [f"1:127.0.0.1:{broker.tls_bound[1]}"]
    # A consumer's partitions name that port too, and what it reports is understood.
    member = Membership("c", "h", "lake", ["demo"], {}, 0)
    await client.ask(MethodId.CONSUMER_REGISTER, member.register())
    beat = pb.HeartRequestC2M(clientId="c", groupName="lake", reportSubscribeInfo=False)
    event = (await client.ask(MethodId.CONSUMER_HEARTBEAT, beat)).event
    assert all(f"1:127.0.0.1:{broker.tls_bound[1]}#demo" in text for text in event.subscribeInfo)
    beat = pb.HeartRequestC2M(
        clientId="c", groupName="lake", reportSubscribeInfo=True, event=event, subscribeInfo=event.subscribeInfo
    )
    assert not (await client.ask(MethodId.CONSUMER_HEARTBEAT, beat)).HasField("event")
    assert set(master.engine.groups["lake"].owned.values()) == {"c"}
    await client.close()
    sending = await Client.connect(broker.tls_bound, trusting)
    assert (await sending.answer(sending.send(bytes(100_000)))).success
    await sending.close()
    if mutual:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await send_to(broker.tls_bound, client_context(authority, certificate=False))
    await broker.close()
    await master.close()


async def test_flow_rules_of_the_master_limit_readers(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path / "master", admin_token="secret")
    address = await master.start("127.0.0.1", 0)
    broker = TubeBroker(tmp_path, masters=[f"127.0.0.1:{address[1]}"], heartbeat_s=0.02)
    await broker.start("127.0.0.1", 0)
    rules = '[{"type":0,"rule":[{"start":"00:00","end":"24:00","dltInM":21,"limitInM":0,"freqInMs":700}]}]'
    params = {"method": "admin_set_cluster_default_setting", "modifyUser": "me", "confModAuthToken": "secret"}
    assert (await master.webapi({**params, "flowCtrlEnable": "true", "flowCtrlInfo": rules}))["result"]
    await until(lambda: broker.engine.fetch.rules.limits)
    assert (await master.webapi({**params, "flowCtrlEnable": "false"}))["result"]
    await until(lambda: not broker.engine.fetch.rules.limits)
    await broker.close()
    await master.close()


async def test_a_removed_topic_leaves_the_brokers_and_the_master(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path / "master", admin_token="secret")
    address = await master.start("127.0.0.1", 0)
    broker = TubeBroker(tmp_path, masters=[f"127.0.0.1:{address[1]}"], heartbeat_s=0.02)
    client = await Client.connect(await broker.start("127.0.0.1", 0))
    await master.create_topic("demo", ready_s=60)
    assert (await client.answer(client.send(b"x"))).success
    users = {"modifyUser": "me", "confModAuthToken": "secret", "topicName": "demo"}
    for method, more in [
        ("admin_modify_topic_info", {"acceptPublish": "false", "acceptSubscribe": "false"}),
        ("admin_delete_topic_info", {}),
        ("admin_remove_topic_info", {}),
    ]:
        answer = await master.webapi({"method": method, **users, **more})
        assert answer["data"][0]["success"], answer
    await until(lambda: not master.topics())
    log = tmp_path / "tube" / "broker-1" / "log" / "demo-0"
    await until(lambda: not list(log.iterdir()))
    await master.create_topic("demo", ready_s=60)  # the name is free again
    found = await client.answer(client.send(b"new"))
    assert (found.success, found.appendOffset) == (True, 0)
    await client.close()
    await broker.close()
    await master.close()
