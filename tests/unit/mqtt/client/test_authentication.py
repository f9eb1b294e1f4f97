"""SCRAM against the library's own server, tokens from files that are renewed."""

from __future__ import annotations

from pathlib import Path

import pytest
from scramp import ScramMechanism

from penstock.errors import ConfigError, RemoteProtocolError
from penstock.mqtt.client.client import SCRAM_METHODS, ScramAuthentication, TokenAuthentication


class Server:
    """A SCRAM server that knows one password."""

    def __init__(self, method: str, password: str) -> None:
        mechanism = ScramMechanism(method)
        known = mechanism.make_auth_info(password, iteration_count=4096)
        self._server = mechanism.make_server(lambda _username: known)

    def first(self, data: bytes) -> bytes:
        self._server.set_client_first(data.decode())
        answer: str = self._server.get_server_first()
        return answer.encode()

    def final(self, data: bytes) -> bytes:
        self._server.set_client_final(data.decode())
        answer: str = self._server.get_server_final()
        return answer.encode()


@pytest.mark.parametrize("method", SCRAM_METHODS)
def test_scram_proves_both_sides_and_may_be_used_again(method: str) -> None:
    client = ScramAuthentication("pump", "sécret", method)
    for _ in range(2):
        server = Server(method, "sécret")
        client.finish(server.final(client.answer(server.first(client.start()))))


def test_scram_with_a_server_that_lies() -> None:
    client = ScramAuthentication("pump", "secret")
    client.start()
    with pytest.raises(RemoteProtocolError, match="without its SCRAM proof"):
        client.finish(b"v=AAAA")
    with pytest.raises(RemoteProtocolError, match="invalid SCRAM message"):
        client.answer(b"r=other,s=QUJD,i=4096")
    client = ScramAuthentication("pump", "secret")
    client.answer(Server("SCRAM-SHA-256", "another").first(client.start()))
    for proof in (None, b"v=AAAA"):
        with pytest.raises(RemoteProtocolError, match="did not prove"):
            client.finish(proof)
    with pytest.raises(RemoteProtocolError, match="more messages than SCRAM"):
        client.answer(b"r=x")


@pytest.mark.parametrize("iterations", [1, 4095, 10_000_001, 2**31])
def test_scram_iterations_of_the_server_are_bounded(iterations: int) -> None:
    """Few would give a false server a proof that is cheap to guess from, many would stop the event loop."""
    client = ScramAuthentication("pump", "secret")
    nonce = client.start().decode().partition("r=")[2]
    with pytest.raises(RemoteProtocolError, match="invalid SCRAM message"):
        client.answer(f"r={nonce}server,s=QUJD,i={iterations}".encode())


def test_unknown_method() -> None:
    with pytest.raises(ConfigError, match="SCRAM-SHA-256"):
        ScramAuthentication("u", "p", "PLAIN")


def test_a_token_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = TokenAuthentication(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        token.start()
    path.write_text("first\n")
    assert token.start() == b"first"
    path.write_text("second")
    assert token.start() == b"second"
    assert TokenAuthentication(lambda: b"made").start() == b"made"
    assert token.method == "K8S-SAT"
    token.finish(None)
    with pytest.raises(RemoteProtocolError):
        token.answer(b"more")
