"""SCRAM-SHA-256, server side: a client proves that it knows the password without sending it.

There are two messages in each direction. The exchange with an unknown user is completed, with a salt that depends on
the name only, to reveal nothing.

Source: RFC 5802, RFC 7677; MQTT 5.0 section 4.12.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from typing import Final

from scramp import ScramException, ScramMechanism

from penstock.security.passwords import SCRAM_ITERATIONS, Credential

__all__ = ["METHOD", "ScramExchange"]

METHOD: Final = "SCRAM-SHA-256"
LONGEST_MESSAGE: Final = 4096
"""Longest client message in bytes, to allow long names."""

_MECHANISM: Final = ScramMechanism(METHOD)


class ScramExchange:
    """An authentication. ``secret``: secret of the server, for unknown users; ``nonce``: new and random.

    Call :meth:`first` with the client's first message, then :meth:`final` with the second. None means rejection;
    clients get no reason.
    """

    __slots__ = ("_server", "_users", "secret", "user")

    def __init__(self, users: Mapping[str, Credential], *, secret: bytes, nonce: str) -> None:
        self._users = users
        self.secret = secret
        self.user: Credential | None = None
        """The user; authenticated after :meth:`final` returned a message."""
        self._server = _MECHANISM.make_server(self._verifier, s_nonce=nonce)

    def first(self, message: bytes) -> bytes | None:
        """client-first-message in, server-first-message out."""
        return self._step(message, self._server.set_client_first, self._server.get_server_first)

    def final(self, message: bytes) -> bytes | None:
        """client-final-message in, server-final-message with the proof of the server out."""
        answer = self._step(message, self._server.set_client_final, self._server.get_server_final)
        return answer if self.user is not None else None

    def _step(self, message: bytes, put: Callable[[str], None], get: Callable[[], str]) -> bytes | None:
        if len(message) > LONGEST_MESSAGE:
            return None
        try:
            put(message.decode())
            return get().encode()
        except (ScramException, ValueError):
            # ValueError: not UTF-8, or invalid base64.
            return None

    def _verifier(self, name: str) -> tuple[bytes, bytes, bytes, int]:
        user = self._users.get(name)
        verifier = None if user is None else user.verifier()
        if verifier is None:
            salt = hmac.digest(self.secret, name.encode(), hashlib.sha256)[:16]
            nobody = hmac.digest(self.secret, b"stored key of " + name.encode(), hashlib.sha256)
            return salt, nobody, nobody, SCRAM_ITERATIONS
        self.user = user
        return verifier.salt, verifier.stored_key, verifier.server_key, verifier.iterations
