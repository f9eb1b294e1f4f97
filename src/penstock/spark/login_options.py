"""Options that say who a reader or writer of a tube is, and whom it trusts: the same for source and sink."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.io.credentials import Login
from penstock.runtime.io.tls import TlsOptions
from penstock.spark import names

__all__ = ["LOGIN_OPTIONS", "parse_login"]

LOGIN_OPTIONS: Mapping[str, str] = {
    "tubemq.user": "user name, with tubemq.passwordFile (none)",
    "tubemq.passwordFile": "file whose first line is the password, on driver and executors (none)",
    "tubemq.tls": "true: connect with TLS; tubemq.master has the TLS ports (false, or true with tubemq.tlsCa)",
    "tubemq.tlsCa": "PEM file with trusted authorities, on driver and executors (those of the system)",
    "tubemq.tlsCert": "PEM file with the client certificate (none)",
    "tubemq.tlsKey": "PEM file with the private key (in tubemq.tlsCert)",
}
"""Every option, as its user writes it, with its meaning."""


def parse_login(given: Mapping[str, str]) -> Login:
    """What ``given`` (names as documented) says; no file is looked at.

    Raises:
        ConfigError: a user without a password file or the other way round, or tubemq.tls is neither true nor false.
    """
    ca, cert, key = (given.get(f"tubemq.tls{name}") or None for name in ("Ca", "Cert", "Key"))
    named = any(file is not None for file in (ca, cert, key))
    text = given.get("tubemq.tls", "true" if named else "false")
    tls = names.boolean("tubemq.tls", text, LOGIN_OPTIONS["tubemq.tls"])
    return Login(
        given.get("tubemq.user") or None,
        given.get("tubemq.passwordFile") or None,
        TlsOptions(ca, cert, key) if tls else None,
    )
