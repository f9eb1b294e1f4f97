"""The principal: identity of the client of a connection."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["ANONYMOUS", "Principal"]

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

ANONYMOUS: Final = "anonymous"
"""Name of all clients without credentials."""


class Principal:
    """Identity of a connected client, immutable.

    ``user`` was authenticated by password, SCRAM or token, ``certificate`` by a client certificate; None if not. A user
    name without authentication is in neither. ``client_id`` was chosen by the client or assigned by the broker.
    """

    __slots__ = ("attributes", "certificate", "client_id", "groups", "user")

    def __init__(
        self,
        client_id: str,
        *,
        user: str | None = None,
        certificate: str | None = None,
        groups: frozenset[str] = frozenset(),
        attributes: Mapping[str, str] = _NOTHING,
    ) -> None:
        self.client_id = client_id
        self.user = user
        self.certificate = certificate
        self.groups = groups
        self.attributes = attributes

    @property
    def proved(self) -> str | None:
        """Value of ``{user}``: the user, else the name in the certificate."""
        return self.certificate if self.user is None else self.user

    @property
    def anonymous(self) -> bool:
        """True if the client has neither a user nor a certificate."""
        return self.user is None and self.certificate is None

    @property
    def name(self) -> str:
        """Owner of a session; connections with the same owner may resume each other's sessions."""
        if self.user is not None:
            return f"user:{self.user}"
        if self.certificate is not None:
            return f"certificate:{self.certificate}"
        return ANONYMOUS

    def __repr__(self) -> str:
        return f"<Principal {self.name!r} as {self.client_id!r}>"
