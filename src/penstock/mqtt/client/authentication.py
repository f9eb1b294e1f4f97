"""Methods of enhanced authentication, from the client's side [MQTT 5.0 section 4.12].

SCRAM proves both sides to each other without showing the password; its messages travel as Authentication Data. A token
method shows a token, read anew for each authentication so that a file that is renewed is used.
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
        """The client's first message."""
        self._client = self._make()
        self._answered = False
        first: str = self._client.get_client_first()
        return first.encode()

    def answer(self, data: bytes | None) -> bytes:
        """The client's proof, for the server's first message.

        Raises:
            RemoteProtocolError: the server's message is none, or not an answer to ours.
        """
        from scramp import ScramException

        if self._answered:
            raise RemoteProtocolError("mqtt: the server asks for more than SCRAM has")
        try:
            self._client.set_server_first((data or b"").decode())
            proof: str = self._client.get_client_final()
        except (ScramException, ValueError) as e:
            raise RemoteProtocolError("mqtt: the server's SCRAM message cannot be used", why=str(e)) from e
        self._answered = True
        return proof.encode()

    def finish(self, data: bytes | None) -> None:
        """Check the server's proof.

        Raises:
            RemoteProtocolError: there is none, or it is wrong: the server does not know the password either.
        """
        from scramp import ScramException

        if not self._answered:
            raise RemoteProtocolError("mqtt: the server accepted before it asked for the proof of SCRAM")
        try:
            self._client.set_server_final((data or b"").decode())
        except (ScramException, ValueError) as e:
            raise RemoteProtocolError(
                "mqtt: the server did not prove that it knows the password",
                why=str(e) or "its SCRAM signature is missing or wrong",
                do="check the address: this may be another server",
            ) from e


class TokenAuthentication:
    """One message: a token, from a file that others renew, or from a function. ``method`` is the server's name for it.

    Azure IoT Operations: method ``K8S-SAT`` with the token file of the service account.
    """

    def __init__(self, source: str | Path | Callable[[], bytes], method: str = "K8S-SAT") -> None:
        self.method = method
        self._source = source

    def start(self) -> bytes:
        """The token.

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
        """There is nothing more to show."""
        raise RemoteProtocolError(
            f"mqtt: the server asks for more than the token of {self.method}", why=f"it sent {len(data or b'')} bytes"
        )

    def finish(self, data: bytes | None) -> None:
        """A server proves nothing here; TLS does."""
