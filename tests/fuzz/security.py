"""Target of credentials: password files, SCRAM messages, tokens, certificates, revocation lists."""

from __future__ import annotations

import base64
import contextlib
from pathlib import Path
from typing import cast

from penstock.errors import ConfigError
from penstock.security.certificates import certificate_expiry, certificate_identity, read_revocations
from penstock.security.passwords import Credential, ScramExchange, read_passwords
from penstock.security.tokens import token_of
from tests.fuzz.data_provider import head

_KEY = base64.b64encode(b"k" * 32).decode()
VERIFIER = f"SCRAM-SHA-256$4096:c2FsdHNhbHRzYWx0c2FsdA==${_KEY}:{_KEY}"
"""Keys that no password has: no proof is right."""


class _File:
    """A path whose content is given."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_bytes(self) -> bytes:
        return self._content

    def __str__(self) -> str:
        return "passwords"


def fuzz_credentials(data: bytes) -> object:
    """Kind (1 byte) and content: a password file, two SCRAM messages (with a line end between), DER or PEM."""
    (kind,), content = head(data, 1)
    match kind % 4:
        case 0:
            try:
                users = read_passwords(cast(Path, _File(content)))
            except ConfigError as error:
                return str(error)
            return [(user.name, user.verifier()) for user in users.values()]
        case 1:
            first, _, final = content.partition(b"\n")
            users = {"u": Credential("u", "", VERIFIER)}
            exchange = ScramExchange(users, secret=b"secret", nonce="nonce")
            asked = exchange.first(first)
            if asked is None:
                return None
            answered = exchange.final(final.replace(b"NONCE", b"nonce"))
            assert answered is None, "a proof was accepted"
            return asked
        case 2:
            found: object = None
            with contextlib.suppress(ValueError):
                found = certificate_identity(content)
            pem = base64.b64encode(content).decode()
            with contextlib.suppress(ValueError):
                found = found, read_revocations(f"-----BEGIN X509 CRL-----\n{pem}\n-----END X509 CRL-----\n")
            with contextlib.suppress(ValueError):
                found = (
                    found,
                    certificate_expiry(f"-----BEGIN CERTIFICATE-----\n{pem}\n-----END CERTIFICATE-----\n"),
                )
            return repr(found)
        case _:
            text = content.decode("utf-8", "replace")
            for read in (read_revocations, certificate_expiry):
                with contextlib.suppress(ValueError):
                    read(text)
            return token_of({}, content)
