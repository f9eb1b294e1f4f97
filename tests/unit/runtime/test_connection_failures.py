"""Each kind of connection failure is reported with cause and remedy."""

from __future__ import annotations

import socket
import ssl

import pytest

from penstock.runtime.io.network import connection_failure, no_response


@pytest.mark.parametrize(
    ("error", "why", "hint"),
    [
        (ConnectionRefusedError(111, "refused"), "nothing listens there", None),
        (OSError("Multiple exceptions: [Errno 111] Connect call refused"), "nothing listens there", None),
        (socket.gaierror(-2, "Name or service not known"), "'plant' is not known", "correct the address"),
        (TimeoutError(), "no response in time", None),
        (OSError(113, "No route"), "no route", "check the network"),
        (ssl.SSLCertVerificationError(1, "no"), "certificate was not accepted", "--ca-file"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong"), "does not use TLS on this port", "mqtt://"),
        (ssl.SSLEOFError(8, "[SSL: UNEXPECTED_EOF_WHILE_READING] EOF"), "during the TLS handshake", "mqtt://"),
        (ConnectionResetError(104, "reset"), "as a port without TLS does", "mqtt://"),
        (OSError(5, "Input/output error"), "Input/output error", None),
    ],
)
def test_reasons(error: OSError, why: str, hint: str | None) -> None:
    if isinstance(error, ssl.SSLCertVerificationError):
        error.verify_message = "unable to get local issuer certificate"
    said = connection_failure(error, "plant", tls=True)
    assert why in said.why
    assert said.hint is None if hint is None else hint in (said.hint or "")


@pytest.mark.parametrize(
    ("code", "why", "hint"),
    [
        (9, "not valid yet", "clock"),
        (10, "has expired", "renew it"),
        (20, "does not trust the authority", "--ca-file"),
        (62, "for another name", "subjectAltName"),
    ],
)
def test_a_rejected_certificate_of_the_server_has_a_cause(code: int, why: str, hint: str) -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code = code
    said = connection_failure(error, "plant", tls=True)
    assert why in said.why
    assert hint in (said.hint or "")


def test_a_reset_without_tls_is_no_question_of_tls() -> None:
    assert connection_failure(ConnectionResetError(), "plant", tls=False).hint is None


@pytest.mark.parametrize(("tls", "hint"), [(True, "--cert-file"), (False, "--ca-file")])
def test_a_peer_that_never_answered(tls: bool, hint: str) -> None:
    said = no_response(tls=tls)
    assert "before any response" in said.why
    assert said.hint is not None
    assert hint in said.hint
