"""Apache's own client (Java) against our master and broker with TLS and with users."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, load_pem_private_key, pkcs12
from cryptography.x509 import load_pem_x509_certificate

from penstock.security.tube_key import tube_key
from penstock.tube.producer import Producer
from tests.interop.tube_java.clients import JavaClients, body
from tests.unit.tube.servers import Tube, tube
from tests.unit.tube.test_visit_tokens import running

COUNT = 60
STORE = "of the stores"


class Keys:
    """An authority: contexts for our servers and clients, key stores for the Java client."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.folders = [folder / name for name in ("known", "stranger")]
        for place, issuer in zip(self.folders, (self.authority, trustme.CA()), strict=True):
            place.mkdir()
            self.authority.cert_pem.write_to_path(place / "ca.pem")
            client = issuer.issue_cert("java.client")
            key = load_pem_private_key(client.private_key_pem.bytes(), None)
            certificate = load_pem_x509_certificate(client.cert_chain_pems[0].bytes())
            secret = BestAvailableEncryption(STORE.encode())
            given = pkcs12.serialize_key_and_certificates(b"client", key, certificate, None, secret)  # type: ignore[arg-type]
            (place / "client.p12").write_bytes(given)
        self.known, self.stranger = (
            {"trust": place / "trust.jks", "keys": place / "keys.jks", "store_password": STORE}
            for place in self.folders
        )

    def server(self, *, mutual: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("127.0.0.1").configure_cert(context)
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            self.authority.configure_trust(context)
        return context

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        self.authority.issue_cert("client").configure_cert(context)
        return context


@pytest.fixture(scope="module")
def keys(java_clients: JavaClients, tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("keys"))
    for place in made.folders:
        java_clients.make_stores(place, STORE).result(30)
    return made


@pytest.fixture
async def secured(request: pytest.FixtureRequest, keys: Keys, tmp_path: Path) -> AsyncIterator[Tube]:
    """With TLS; the parameter says whether clients need a certificate."""
    async with tube(tmp_path, "demo", tls=keys.server(mutual=request.param)) as running:
        yield running


@pytest.fixture
async def with_users(java_clients: JavaClients, tmp_path: Path) -> AsyncIterator[Tube]:
    """With a user, and a group whose members need not sign."""
    assert java_clients is not None
    async with tube(tmp_path, "demo", users={"usr": "secret"}, groups=["stock"]) as running:
        yield running


async def refused(*futures: Future[Any], match: str) -> None:
    outcomes = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    assert outcomes
    for outcome in outcomes:
        assert isinstance(outcome, AssertionError)
        assert match in str(outcome)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "not checked"])
async def test_visit_tokens(java_clients: JavaClients, tmp_path: Path, *, check: bool) -> None:
    """The Java clients show the tokens that they got from the master, and are served by a broker that checks them."""
    async with running(tmp_path, check=check) as checked:
        rounds = 0
        while not checked.broker.engine.produce.messages:  # a producer begins with the brokers that it has reached
            assert rounds < 10
            sent = rounds * COUNT
            await asyncio.wrap_future(java_clients.produce(checked.masters, "demo", COUNT, from_=sent, window=20))
            rounds += 1
        found = await asyncio.wrap_future(java_clients.consume(checked.masters, "lake", "demo", rounds * COUNT))
        assert sorted(item.number for item in found) == list(range(rounds * COUNT))
        assert checked.broker.engine.checks.check_tokens == check


@pytest.mark.parametrize("secured", [False, True], indirect=True, ids=["one way", "mutual"])
async def test_tls(secured: Tube, java_clients: JavaClients, keys: Keys, request: pytest.FixtureRequest) -> None:
    masters = secured.tls_masters
    await asyncio.wrap_future(java_clients.produce(masters, "demo", COUNT, window=20, **keys.known))
    async with Producer(masters, tls=keys.client()) as producer:
        await producer.send("demo", body(COUNT))
    found = await asyncio.wrap_future(java_clients.consume(masters, "secret", "demo", COUNT + 1, **keys.known))
    assert sorted(item.number for item in found) == list(range(COUNT + 1))
    assert all(connection.tls for connection in secured.brokers[1].connections.open), (
        "a broker is reached as its master is"
    )
    if "mutual" in request.node.name:
        stranger = java_clients.produce(masters, "demo", 1, publish_attempts=1, **keys.stranger)
        await refused(stranger, match="roducer failure")
    assert secured.brokers[1].engine.produce.messages == COUNT + 1


async def test_users_and_groups_that_need_not_sign(with_users: Tube, java_clients: JavaClients) -> None:
    """The Java producer signs when it registers, and shows the token it got from then on.

    The Java consumer never signs towards a master: the rule lets its group in, and no other one. What the Java
    producer has as its password is the user's signing key (``penstock user tube-key``).
    """
    masters = with_users.masters
    login = {"user": "usr", "password": tube_key("usr", b"secret")}
    await asyncio.wrap_future(java_clients.produce(masters, "demo", COUNT, window=20, **login))
    found = await asyncio.wrap_future(java_clients.consume(masters, "stock", "demo", COUNT))
    assert sorted(item.number for item in found) == list(range(COUNT))
    strangers: list[dict[str, str]] = [
        {},
        {"user": "usr", "password": "secret"},
        {"user": "other", "password": "secret"},
    ]
    await refused(
        *(java_clients.produce(masters, "demo", 1, publish_attempts=1, **stranger) for stranger in strangers),
        match="authentication failed",
    )
    assert with_users.brokers[1].engine.produce.messages == COUNT
    consuming = java_clients.consume(masters, "other", "demo", COUNT, timeout_ms=2000, **login)
    await refused(consuming, match="Register to master failed")


async def test_a_listener_that_allows_anonymous_clients(java_clients: JavaClients, tmp_path: Path) -> None:
    """With users, and ``anonymous: allow``: clients that do not sign, and the producer that does."""
    async with tube(tmp_path, "demo", users={"usr": "secret"}, anonymous=True) as running:
        await asyncio.wrap_future(java_clients.produce(running.masters, "demo", COUNT, window=20))
        login = {"user": "usr", "password": tube_key("usr", b"secret")}
        await asyncio.wrap_future(java_clients.produce(running.masters, "demo", COUNT, from_=COUNT, window=20, **login))
        found = await asyncio.wrap_future(java_clients.consume(running.masters, "any", "demo", 2 * COUNT))
        assert sorted(item.number for item in found) == list(range(2 * COUNT))
        wrong = java_clients.produce(running.masters, "demo", 1, publish_attempts=1, user="usr", password="secret")
        await refused(wrong, match="authentication failed")
