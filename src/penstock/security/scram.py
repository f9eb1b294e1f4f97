"""SCRAM-SHA-256 on the server's side: the client proves that it knows the password, and never sends it.

Two messages each way. A user that does not exist is played to the end, with a salt that is always the same for the
same name, so that nobody learns who exists.

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
"""Bytes of a message of the client; a name may be long, nothing else is."""

_MECHANISM: Final = ScramMechanism(METHOD)


class ScramExchange:
    """One authentication. ``secret`` is the server's own, for users that do not exist; ``nonce`` fresh and random.

    Call :meth:`first` with the client's first message, then :meth:`final` with its second. None is a refusal, for
    whatever reason: a client that cannot authenticate is told no more.
    """

    __slots__ = ("_server", "_users", "secret", "user")

    def __init__(self, users: Mapping[str, Credential], *, secret: bytes, nonce: str) -> None:
        self._users = users
        self.secret = secret
        self.user: Credential | None = None
        """The user; verified once :meth:`final` returned an answer."""
        self._server = _MECHANISM.make_server(self._verifier, s_nonce=nonce)

    def first(self, message: bytes) -> bytes | None:
        """client-first-message in, server-first-message out."""
        return self._step(message, self._server.set_client_first, self._server.get_server_first)

    def final(self, message: bytes) -> bytes | None:
        """client-final-message in, server-final-message out: the proof that the server knows the password, too."""
        answer = self._step(message, self._server.set_client_final, self._server.get_server_final)
        return answer if self.user is not None else None

    def _step(self, message: bytes, put: Callable[[str], None], get: Callable[[], str]) -> bytes | None:
        if len(message) > LONGEST_MESSAGE:
            return None
        try:
            put(message.decode())
            return get().encode()
        except (ScramException, ValueError):
            # ValueError: not UTF-8, or base64 that is none.
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
