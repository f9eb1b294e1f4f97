"""SCRAM-SHA-256: the client of the library, the example of the RFC, and clients that cheat."""

from __future__ import annotations

import base64

import pytest
from scramp import ScramClient, ScramMechanism

from penstock.security.passwords import Credential, ScramExchange, make_credential

USERS = {"ann": make_credential("ann", "pässword".encode()), "plain": Credential("plain", "$argon2id$")}


def exchange(nonce: str = "servernonce") -> ScramExchange:
    return ScramExchange(USERS, secret=b"s" * 32, nonce=nonce)


def test_a_client_that_knows_the_password() -> None:
    client = ScramClient(["SCRAM-SHA-256"], "ann", "pässword")
    server = exchange()
    first = server.first(client.get_client_first().encode())
    assert first is not None
    client.set_server_first(first.decode())
    final = server.final(client.get_client_final().encode())
    assert final is not None
    client.set_server_final(final.decode())
    assert server.user is USERS["ann"]


@pytest.mark.parametrize(("user", "password"), [("ann", "wrong"), ("nobody", "pässword"), ("plain", "x")])
def test_a_client_that_does_not(user: str, password: str) -> None:
    client = ScramClient(["SCRAM-SHA-256"], user, password)
    server = exchange()
    first = server.first(client.get_client_first().encode())
    assert first is not None, "a user that does not exist gets this far, too"
    client.set_server_first(first.decode())
    assert server.final(client.get_client_final().encode()) is None


def test_a_user_that_does_not_exist_looks_the_same_every_time() -> None:
    def salt() -> str:
        first = exchange().first(ScramClient(["SCRAM-SHA-256"], "nobody", "x").get_client_first().encode())
        assert first is not None
        return first.decode().split(",")[1]

    assert salt() == salt()


def test_the_example_of_rfc_7677() -> None:
    mechanism = ScramMechanism("SCRAM-SHA-256")
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    _, stored, server_key, _ = mechanism.make_auth_info("pencil", 4096, salt)
    encoded = [base64.b64encode(part).decode() for part in (salt, stored, server_key)]
    user = Credential("user", "", f"SCRAM-SHA-256$4096:{encoded[0]}${encoded[1]}:{encoded[2]}")
    server = ScramExchange({"user": user}, secret=b"", nonce="%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    assert server.first(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO") == (
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    proof = b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    final = server.final(b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0," + proof)
    assert final == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff", b"n,,", b"n,,n=ann", b"n,,r=x,n=ann", b"p=tls-unique,,n=ann,r=x", b"x" * 5000, b"n,a=x,n=ann,r=x"],
)
def test_invalid_client_first_messages_are_refused(message: bytes) -> None:
    assert exchange().first(message) is None


@pytest.mark.parametrize("message", [b"", b"\xff", b"c=biws", b"c=biws,r=cs,p=AAAA", b"c=!,r=csservernonce,p=!"])
def test_invalid_client_final_messages_are_refused(message: bytes) -> None:
    server = exchange()
    assert server.first(b"n,,n=ann,r=c") is not None
    assert server.final(message) is None


def test_out_of_order() -> None:
    assert exchange().final(b"c=biws,r=c,p=AAAA") is None
    server = exchange()
    assert server.first(b"n,,n=ann,r=c") is not None
    assert server.first(b"n,,n=ann,r=c") is None


def test_a_proof_is_good_for_one_exchange() -> None:
    client = ScramClient(["SCRAM-SHA-256"], "ann", "pässword")
    first_message = client.get_client_first().encode()
    first = exchange().first(first_message)
    assert first is not None
    client.set_server_first(first.decode())
    proof = client.get_client_final().encode()
    again = exchange(nonce="another")
    assert again.first(first_message) is not None
    assert again.final(proof) is None
