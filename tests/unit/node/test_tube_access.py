"""The tube of a node with users and TLS: the node's own broker gets in, strangers do not, clients sign."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from penstock.node.config.node import TopicSection, Tube
from penstock.node.config.tube import TubeAccess, TubeTls
from penstock.node.node import Node
from tests.unit.node.test_node import config
from tests.unit.tube.broker_client import Client


async def test_tls_listeners_run_alongside_plain_ones(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    tls = TubeTls(certificate=tmp_path / "server.pem", key=tmp_path / "server.key", master_port=0, broker_port=0)
    node = Node(config(tmp_path / "data", tube=Tube(topics={"demo": TopicSection()}, tls=tls)))
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


def test_networks_are_checked() -> None:
    with pytest.raises(ValueError, match=r"10\.1\.0\.0/16"):
        TubeAccess(networks=["10.1.2.3/16"])
