"""Credentials of a client: its signature first, then the token that the master issued for it.

A token expires: the master reports that (``requireAuth``) or refuses (415), and the next request is signed again.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.tube.codec.proto import shared_pb2
from penstock.tube.engine.access import sign

__all__ = ["ClientCredentials"]


class ClientCredentials:
    """Credentials of one client, which signs with ``key``.

    ``now`` (ms since 1970) and ``nonce`` (31 random bits) are called for each signature.
    """

    def __init__(self, user: str, key: str, now: Callable[[], int], nonce: Callable[[], int]) -> None:
        self._user = user
        self._key = key
        self._now = now
        self._nonce = nonce
        self._token = ""

    def certificate(self) -> shared_pb2.MasterCertificateInfo:
        """authInfo of a request to the master."""
        if self._token:
            return shared_pb2.MasterCertificateInfo(authorizedToken=self._token)
        now, nonce = self._now(), self._nonce()
        info = shared_pb2.AuthenticateInfo(
            userName=self._user,
            timestamp=now,
            nonce=nonce,
            othParams="",
            signature=sign(self._user, self._key, now, nonce),
        )
        return shared_pb2.MasterCertificateInfo(authInfo=info)

    def broker_token(self) -> str:
        """authAuthorizedToken of a request to a broker; a signature where the master gives no tokens (Apache's)."""
        if self._token:
            return self._token
        now, nonce = self._now(), self._nonce()
        return f"{self._user} {now} {nonce} {sign(self._user, self._key, now, nonce)}"

    def take(self, info: shared_pb2.MasterAuthorizedInfo, *, again: bool) -> None:
        """An answer of the master: a new token, or (``again``) the wish for a new signature."""
        if info.authAuthorizedToken:
            self._token = info.authAuthorizedToken
        elif again:
            self._token = ""

    def refused(self) -> None:
        """415: sign again."""
        self._token = ""
