"""Authentication and authorization of TubeMQ clients: signatures, tokens, exempt clients, and rights.

A client signs ``userName + timestamp + nonce`` with HMAC-SHA1 under its key; the server has the same key. A client with
a valid signature gets a token, which any server with the same users can verify, and renews it before it expires. The
user of a client that is accepted without credentials is ``""``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from penstock.tube.codec.proto import shared_pb2

__all__ = ["AuthenticationResult", "ClientAccess", "RightsOf", "TopicRights", "sign"]

_REMEMBERED = 4096
_SIGNED_PIECES = 4  # user, timestamp, nonce, signature, as sent to brokers by Java clients
_TOKEN_PIECES = 3  # user, end, proof
_WINDOW_MS = 20_000
"""Largest accepted difference between a signature's time and the server's clock, in ms."""
_TIME = re.compile(r"[0-9]{1,19}")
_NONCE = re.compile(r"-?[0-9]{1,19}")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TopicRights(Protocol):
    """Rights of a user."""

    def may_produce(self, topic: str) -> bool:
        """Return True if the user may produce to the topic."""
        ...

    def may_consume(self, topic: str, group: str | None) -> bool:
        """Return True if the user may consume the topic as a member of the group; None: without a group, by offsets."""
        ...

    def may_administer(self, topic: str = "") -> bool:
        """Return True if the user may administer the topic; without one: the cluster, as a broker does when it
        registers."""
        ...


RightsOf = Callable[[str], TopicRights | None]
"""Rights by user name; None: unrestricted."""


def sign(user: str, key: str, timestamp_ms: int, nonce: int) -> str:
    """Return the signature of AuthenticateInfo: HMAC-SHA1 in base64, URL-encoded."""
    message = f"{user}{timestamp_ms}{nonce}".encode()
    text = base64.b64encode(hmac.new(key.encode(), message, hashlib.sha1).digest()).decode()
    return text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")


class AuthenticationResult(NamedTuple):
    """An accepted client. ``token``: a new token for the client, or blank; ``renew``: the client should sign again
    soon."""

    user: str
    token: str = ""
    renew: bool = False


class ClientAccess:
    """Users and their rights.

    ``users``: signing keys by name. ``anonymous``: clients need not sign. ``networks`` and ``groups``: clients that
    need not sign (stock Java consumers cannot). ``rights``: by default unrestricted. ``token_ms``: lifetime of a token.
    ``denied`` is called with user, permission (``Produce``, ``Consume``) and topic when rights are missing, for logs.
    """

    def __init__(
        self,
        users: Mapping[str, str],
        *,
        anonymous: bool = False,
        networks: Iterable[str] = (),
        groups: Iterable[str] = (),
        rights: RightsOf | None = None,
        token_ms: int = 3_600_000,
        denied: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self._users = dict(users)
        self._networks: list[Network] = [ipaddress.ip_network(text) for text in networks]
        self._groups = frozenset(groups)
        self._token_ms = token_ms
        self._denied = denied
        self._anonymous = anonymous
        self._known: dict[str, tuple[str, int]] = {}
        self._rights_of = rights
        self._rights: dict[str, TopicRights | None] = {}

    def change(self, users: Mapping[str, str], rights: RightsOf | None, *, anonymous: bool) -> None:
        """Replace users and rights."""
        self._users = dict(users)
        self._anonymous = anonymous
        self._rights_of = rights
        self._known.clear()
        self._rights.clear()

    def may_produce(self, user: str, topic: str) -> bool:
        """Return True if ``user`` may produce to the topic."""
        rights = self._of(user)
        return rights is None or rights.may_produce(topic) or self._deny(user, "Produce", topic)

    def may_consume(self, user: str, topic: str, group: str | None) -> bool:
        """Whether ``user`` may read the topic as a member of the group; None: without a group, by offsets."""
        rights = self._of(user)
        return rights is None or rights.may_consume(topic, group) or self._deny(user, "Consume", topic)

    def may_administer(self, user: str) -> bool:
        """Return True if ``user`` may administer the cluster."""
        rights = self._of(user)
        return rights is None or rights.may_administer()

    def still_accepts(self, user: str, topic: str, group: str) -> bool:
        """Whether a consumer that was accepted as ``user`` is still accepted after :meth:`change`."""
        return (not user or user in self._users) and self.may_consume(user, topic, group)

    def _deny(self, user: str, permission: str, topic: str) -> bool:
        if self._denied is not None:
            self._denied(user, permission, topic)
        return False

    def _of(self, user: str) -> TopicRights | None:
        if self._rights_of is None:
            return None
        if user not in self._rights:
            if len(self._rights) >= _REMEMBERED:
                self._rights.clear()
            self._rights[user] = self._rights_of(user)
        return self._rights[user]

    def admit(
        self, info: shared_pb2.MasterCertificateInfo, peer: str, group: str | None, now: int
    ) -> AuthenticationResult | None:
        """Authenticate a client of the master; None: it is rejected (415)."""
        signed = info.authInfo
        if info.HasField("authInfo") and signed.userName:
            text = f"{signed.userName} {signed.timestamp} {signed.nonce} {signed.signature}"
            user = self._signer(text.split(" "), now)
            return None if user is None else AuthenticationResult(user, self._token(user, now + self._token_ms))
        if info.authorizedToken:
            known = self._holder(info.authorizedToken, now)
            if known is not None:
                user, end = known
                return AuthenticationResult(user, renew=end - now < self._token_ms // 4)
        elif self._anonymous:
            return AuthenticationResult("")
        return AuthenticationResult("") if self._exempt(peer, group) else None

    def admit_token(self, token: str, peer: str, group: str | None, now: int) -> str | None:
        """Return the user of a broker's client, from its ``authAuthorizedToken``; None: the client is rejected."""
        if token:
            known = self._holder(token, now)
            if known is not None:
                return known[0]
        elif self._anonymous:
            return ""
        return "" if self._exempt(peer, group) else None

    def _exempt(self, peer: str, group: str | None) -> bool:
        if group is not None and group in self._groups:
            return True
        if not self._networks:
            return False
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def _holder(self, token: str, now: int) -> tuple[str, int] | None:
        """Verify a token; return its user and expiry. Verified tokens are cached, because every request has one."""
        known = self._known.get(token)
        if known is None:
            known = self._verify(token, now)
            if known is None:
                return None
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[token] = known
        return known if now < known[1] else None

    def _verify(self, token: str, now: int) -> tuple[str, int] | None:
        pieces = token.split(" ")
        if len(pieces) == _SIGNED_PIECES:
            user = self._signer(pieces, now)
            return None if user is None else (user, int(pieces[1]) + _WINDOW_MS)
        if len(pieces) != _TOKEN_PIECES or not _TIME.fullmatch(pieces[1]) or pieces[0] not in self._users:
            return None
        end = int(pieces[1])
        good = hmac.compare_digest(token.encode(), self._token(pieces[0], end).encode())
        return (pieces[0], end) if good and end <= now + self._token_ms else None

    def _signer(self, pieces: list[str], now: int) -> str | None:
        if len(pieces) != _SIGNED_PIECES:
            return None
        user, timestamp, nonce, signature = pieces
        key = self._users.get(user)
        if key is None or not _TIME.fullmatch(timestamp) or not _NONCE.fullmatch(nonce):
            return None
        good = hmac.compare_digest(signature.encode(), sign(user, key, int(timestamp), int(nonce)).encode())
        return user if good and abs(now - int(timestamp)) <= _WINDOW_MS else None

    def _token(self, user: str, end: int) -> str:
        message = f"penstock token\n{user}\n{end}".encode()
        proof = hmac.new(self._users[user].encode(), message, hashlib.sha256).digest()
        return f"{user} {end} {base64.urlsafe_b64encode(proof).decode()}"
