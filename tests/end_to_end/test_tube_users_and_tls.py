"""A node whose tube has users and TLS: clients, commands, range readers and Spark's view of it, with and without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.pipelines.ledger.dead_letters import DeadLetter, redrive
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.spec.sources import Options, TubeSource
from penstock.runtime.io.tls import ANONYMOUS_LOGIN, Login, TlsOptions
from penstock.security.passwords import edit_passwords, make_credential
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.tube_client import TubeClient
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from penstock.tube.reader import RangeReader, partitions
from tests.end_to_end.nodes import RunningNode
from tests.ports import free_ports

CONFIG = """
security: {{passwords: users}}
tube:
  topics: [water]
  access: {{groups: [legacy]}}
  tls: {{certificate: server.pem, key: server.key, client_ca: ca.pem, master_port: {}, broker_port: {}}}
"""


class Secured(RunningNode):
    """With TLS that asks for a certificate (on ports of its own) and the user edge."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(directory / "ca.pem")
        server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("edge")
        server.cert_chain_pems[0].write_to_path(directory / "server.pem")
        server.private_key_pem.write_to_path(directory / "server.key")
        client.private_key_and_cert_chain_pem.write_to_path(directory / "client.pem")
        edit_passwords(directory / "users", lambda _: {"edge": make_credential("edge", b"secret")})
        for name in ("secret", "wrong"):
            (directory / name).write_text(f"{name}\n", encoding="utf-8")
        self.ports = free_ports(2)
        super().__init__(directory, CONFIG.format(*self.ports))

    @property
    def masters(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def user(self) -> list[str]:
        return ["--username", "edge", "--password-file", str(self.directory / "secret")]

    @property
    def tls(self) -> list[str]:
        files = ["--ca-file", str(self.directory / "ca.pem"), "--cert-file", str(self.directory / "client.pem")]
        return [*files, "--tube-master", self.masters]

    def login(self, password: str = "secret") -> Login:
        files = TlsOptions(self.directory / "ca.pem", self.directory / "client.pem")
        return Login("edge", self.directory / password, files)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    secured = Secured(tmp_path_factory.mktemp("node"))
    with secured:
        yield secured


def test_clients_and_range_readers(node: Secured) -> None:
    client = node.login().client()

    async def through() -> list[bytes]:
        async with asyncio.timeout(60), Producer(node.masters, **client) as producer:
            for n in range(3):
                await producer.send("water", b"%d" % n, partition=0)
            async with Consumer(node.masters, "lake", ["water"], start="earliest", **client) as consumer:
                return [(await anext(consumer)).data for _ in range(3)]

    assert asyncio.run(through()) == [b"0", b"1", b"2"]
    found = partitions(node.masters, "water", **client)
    assert {(part.host, part.port) for part in found} == {("127.0.0.1", node.ports[1])}
    with RangeReader(found[0].host, found[0].port, **client) as source:
        low, high = source.bounds("water", 0)
        assert [data for batch in source.read("water", 0, low, high) for data in batch.payloads] == [b"0", b"1", b"2"]
    options = {"tubemq.user": "edge", "tubemq.passwordFile": str(node.directory / "secret")}
    options |= {"tubemq.tlsCa": str(node.directory / "ca.pem"), "tubemq.tlsCert": str(node.directory / "client.pem")}
    checked = SourceOptions.parse({"tubemq.master": node.masters, "subscribe": "water"} | options)
    with TubeClient.from_options(checked, timeout_ms=10_000) as tube:
        bounds = tube.bounds(tube.partitions(["water"]))
        assert sum(bound.end - bound.oldest for bound in bounds.values()) > 0


def test_strangers_read_nothing(node: Secured) -> None:
    plain = str(node.ready["tube_master"])
    host, port = str(node.ready["tube_broker"]).split(":")
    with RangeReader(host, int(port)) as source, pytest.raises(RefusedError, match="authentication failed") as told:
        source.bounds("water", 0)
    assert told.value.code == 415
    for login in (ANONYMOUS_LOGIN, Login("edge", node.directory / "wrong")):
        with pytest.raises(RefusedError, match="authentication"):
            partitions(plain, "water", **login.client())
        with RangeReader(host, int(port), **login.client()) as source, pytest.raises(RefusedError) as refused:
            next(source.read("water", 0, 0, 28))
        assert refused.value.code == 415
    # Without the certificate that the listener asks for, or without trust in its own.
    for tls in (TlsOptions(node.directory / "ca.pem"), TlsOptions()):
        stranger = Login("edge", node.directory / "secret", tls).client()
        with pytest.raises(UnavailableError) as blocking:
            partitions(node.masters, "water", **stranger)
        with pytest.raises(PenstockError) as asynchronous:
            asyncio.run(Producer(node.masters, **stranger).start())
        assert all("certificate" in str(told.value.why) for told in (blocking, asynchronous))
    # A TLS port without TLS.
    with pytest.raises(UnavailableError, match="connect with TLS"):
        partitions(node.masters, "water")
    with pytest.raises(UnavailableError, match="connect with TLS"):
        asyncio.run(Producer(node.masters).start())


def test_commands(node: Secured) -> None:
    node.out("tube", "topic", "create", "round")
    node.out("tube", "produce", "round", "a", "b", "--partition", "0", *node.user, *node.tls)
    assert [row["value"] for row in node.rows("tube", "consume", "round", *node.user, *node.tls)] == ["a", "b"]
    # Over the plain port the user alone does.
    grouped = node.rows("tube", "consume", "round", "--group", "shore", "--count", "2", *node.user)
    assert sorted(row["value"] for row in grouped) == ["a", "b"]
    # The master says where the broker's administration is, and its TLS port.
    tls = [*node.user, *node.tls[:4]]
    node.out("tube", "offset", "reset", "shore", "--to", "1d", *tls)
    behind = node.rows("tube", "group", "lag", "shore", *tls)
    assert sum(row["messages"] for row in behind) == 2
    for args in (
        ["tube", "consume", "round"],
        ["tube", "produce", "round", "x"],
        ["tube", "group", "lag", "shore"],
        ["tube", "consume", "round", "--username", "edge", "--password-file", str(node.directory / "wrong")],
    ):
        done = node.penstock(*args)
        assert (done.returncode, done.stdout) == (1, b""), json.dumps(args)
        assert b"authentication failed" in done.stderr
        assert b"--username" in done.stderr
    # A group that need not sign may read without.
    assert len(node.rows("tube", "consume", "round", "--group", "legacy", "--count", "2")) == 2
    done = node.penstock("tube", "consume", "round", "--username", "edge")
    assert done.returncode == 2
    assert b"--username is set without --password-file" in done.stderr


def test_dead_letters_are_sent_again_with_the_credentials_of_the_source(node: Secured, tmp_path: Path) -> None:
    node.out("tube", "topic", "create", "mended")
    at = datetime(2024, 5, 1, tzinfo=UTC)
    letter = DeadLetter("p", "parse.not_json", "why", "id-1", "", "mended", 1, 0, 0, at, b"k", [], b"nope")
    options: Options = {"tubemq.user": "edge", "tubemq.passwordFile": str(node.directory / "secret")}
    master = str(node.ready["tube_master"])
    sinks = [Sink.model_validate({"name": "shown", "console": {}})]
    nobody = Pipeline(name="p", source=TubeSource(topics=["mended"], master=master), sinks=sinks)
    with pytest.raises(RefusedError, match="authentication failed"):
        asyncio.run(redrive(tmp_path, [letter], nobody, tmp_path))
    source = TubeSource(topics=["mended"], master=master, options=options)
    somebody = nobody.model_copy(update={"source": source})
    assert asyncio.run(redrive(tmp_path, [letter], somebody, tmp_path)) == 1
    assert [row["value"] for row in node.rows("tube", "consume", "mended", *node.user)] == ["nope"]
