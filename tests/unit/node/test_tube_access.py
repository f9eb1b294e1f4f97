"""The tube of a node with users and TLS: the node's own broker gets in, strangers do not, clients sign."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from penstock.errors import ConfigError
from penstock.node.config import NodeConfig, Topic, Tube
from penstock.node.node import Node
from penstock.node.tube_config import TubeAccess, TubeTls
from penstock.runtime.addresses import parse_address
from penstock.runtime.clock import wall_clock_ms
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2, shared_pb2
from penstock.tube.engine.access import sign
from tests.unit.node.test_node import config
from tests.unit.tube.broker_client import Client


def users(path: Path) -> Path:
    path.write_text("usr:pw\n")
    path.chmod(0o600)
    return path


async def test_the_nodes_own_broker_is_a_user(tmp_path: Path) -> None:
    access = TubeAccess(users=users(tmp_path / "users"), groups=["legacy"])
    node = Node(config(tmp_path / "data", tube=Tube(topics={"demo": Topic()}, access=access)))
    ready = await node.start()
    try:
        client = await Client.connect(parse_address(ready.tube_master))
        request = master_pb2.RegisterRequestP2M(clientId="p", brokerCheckSum=-1, hostName="h")
        assert (await client.ask(MethodId.PRODUCER_REGISTER, request)).errCode == 415
        now = wall_clock_ms()
        request.authInfo.authInfo.CopyFrom(
            shared_pb2.AuthenticateInfo(
                userName="usr", timestamp=now, nonce=3, othParams="", signature=sign("usr", "pw", now, 3)
            )
        )
        assert (await client.ask(MethodId.PRODUCER_REGISTER, request)).authorizedInfo.authAuthorizedToken
        member = master_pb2.RegisterRequestC2M(clientId="c", groupName="legacy", hostName="h", topicList=["demo"])
        assert (await client.ask(MethodId.CONSUMER_REGISTER, member)).errCode == 200
        await client.close()
    finally:
        await node.close()


async def test_tls_listeners_beside_the_plain_ones(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    tls = TubeTls(certificate=tmp_path / "server.pem", key=tmp_path / "server.key", master_port=0, broker_port=0)
    node = Node(config(tmp_path / "data", tube=Tube(topics={"demo": Topic()}, tls=tls)))
    await node.start()
    try:
        assert node._tube_broker is not None
        bound = node._tube_broker.tls_bound
        assert bound is not None
        context = ssl.create_default_context()
        authority.configure_trust(context)
        client = await Client.connect(bound, context)
        assert (await client.answer(client.send(b"x"))).success
        await client.close()
    finally:
        await node.close()


async def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    node = Node(config(tmp_path / "data", tube=Tube(access=TubeAccess(users=tmp_path / "none"))))
    with pytest.raises(ConfigError, match="users file"):
        await node.start()
    await node.close()


def test_networks_and_known_tokens_are_checked() -> None:
    with pytest.raises(ValueError, match=r"10\.1\.0\.0/16"):
        TubeAccess(users=Path("x"), networks=["10.1.2.3/16"])
    with pytest.raises(ValueError, match="random one is made"):
        NodeConfig.model_validate({"http": {"bind": "0.0.0.0:8080"}, "tube": {"admin_token": "abc"}})
