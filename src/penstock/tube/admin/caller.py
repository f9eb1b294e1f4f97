"""The sender of an administration request, and what its credentials permit."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["UNAUTHORIZED", "UNKNOWN", "Caller"]

UNAUTHORIZED = "illegal access, unauthorized request!"
"""Error of a request without the required credentials, as in the reference."""

MAX_TOKEN = 128
_TOKEN = "confModAuthToken"  # noqa: S105 - the name of the parameter


class Caller(NamedTuple):
    """The sender of a request. ``user``: name of the authenticated user, blank for none; ``address``: of the peer.

    ``reads``: whether queries are answered. ``administers``: whether changes and message bodies are allowed.
    ``identified``: whether it has shown any credential; client ids are hidden from others.
    """

    user: str = ""
    address: str = ""
    reads: bool = True
    administers: bool = False
    token: bool = False
    """Whether the request had the administration token."""

    @property
    def identified(self) -> bool:
        """Whether the request had a valid credential."""
        return self.token or bool(self.user)

    @property
    def credential(self) -> str:
        """Credentials of the request, for the audit trail."""
        shown = [f"user {self.user}"] if self.user else []
        if self.token:
            shown.append("administration token")
        return ", ".join(shown) or "none"

    def showing(self, params: Mapping[str, str], token: str | None) -> Caller:
        """The caller with the rights of the administration ``token`` (None: there is none) if the request has it."""
        given = params.get(_TOKEN, "")[: MAX_TOKEN + 1]
        if token is None or not hmac.compare_digest(given.encode(), token.encode()):
            return self
        return self._replace(token=True, reads=True, administers=True)


UNKNOWN = Caller()
"""A caller without credentials on a server without users."""
