"""Client side of enhanced authentication [MQTT 5.0 section 4.12].

SCRAM authenticates client and server to each other without sending the password. A token method sends a token, which is
read for each authentication so that a renewed file is used. Both use the Authentication Data of CONNECT and AUTH.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from penstock.errors import ConfigError, RemoteProtocolError

__all__ = ["SCRAM_METHODS", "ScramAuthentication", "TokenAuthentication"]

SCRAM_METHODS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512", "SCRAM-SHA-1")


class ScramAuthentication:
    """SCRAM [RFC 5802, RFC 7677] with a user name and a password."""

    def __init__(self, username: str, password: str, method: str = "SCRAM-SHA-256") -> None:
        if method not in SCRAM_METHODS:
            raise ConfigError(f"authentication method {method!r} is not one of {', '.join(SCRAM_METHODS)}")
        from scramp import ScramClient

        self.method = method
        self._make = partial(ScramClient, [method], username, password)
        self._client = self._make()
        self._answered = False

    def start(self) -> bytes:
        """Return the client's first message."""
        self._client = self._make()
        self._answered = False
        first: str = self._client.get_client_first()
        return first.encode()

    def answer(self, data: bytes | None) -> bytes:
        """Return the client's proof for the server's first message.

        Raises:
            RemoteProtocolError: the server's message is invalid, or does not answer the client's.
        """
        from scramp import ScramException

        if self._answered:
            raise RemoteProtocolError("mqtt: the server sent more messages than SCRAM has")
        try:
            self._client.set_server_first((data or b"").decode())
            proof: str = self._client.get_client_final()
        except (ScramException, ValueError) as e:
            raise RemoteProtocolError("mqtt: invalid SCRAM message of the server", why=str(e)) from e
        self._answered = True
        return proof.encode()

    def finish(self, data: bytes | None) -> None:
        """Verify the server's proof that it knows the password.

        Raises:
            RemoteProtocolError: the proof is missing or wrong.
        """
        from scramp import ScramException

        if not self._answered:
            raise RemoteProtocolError("mqtt: the server accepted the client without its SCRAM proof")
        try:
            self._client.set_server_final((data or b"").decode())
        except (ScramException, ValueError) as e:
            raise RemoteProtocolError(
                "mqtt: the server did not prove that it knows the password",
                why=str(e) or "its SCRAM signature is missing or wrong",
                do="check the address: this may be another server",
            ) from e


class TokenAuthentication:
    """Authentication by one message, a token from a file or a function. ``method`` is the server's name for it.

    Azure IoT Operations: method ``K8S-SAT`` with the token file of the service account.
    """

    def __init__(self, source: str | Path | Callable[[], bytes], method: str = "K8S-SAT") -> None:
        self.method = method
        self._source = source

    def start(self) -> bytes:
        """Return the token.

        Raises:
            ConfigError: the file cannot be read.
        """
        if callable(self._source):
            return self._source()
        try:
            return Path(self._source).read_bytes().strip()
        except OSError as e:
            raise ConfigError(f"mqtt: token file {str(self._source)!r} cannot be read", why=e.strerror) from e

    def answer(self, data: bytes | None) -> bytes:
        """Raise RemoteProtocolError: a token needs one message."""
        raise RemoteProtocolError(
            f"mqtt: the server sent a challenge, which {self.method} does not have",
            why=f"it sent {len(data or b'')} bytes",
        )

    def finish(self, data: bytes | None) -> None:
        """Accept: the server is authenticated by TLS only."""
