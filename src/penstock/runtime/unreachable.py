"""Error messages for failed connections: errors of the resolver, the kernel, TLS and the event loop as text."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import Final, NamedTuple

__all__ = ["Unreachable", "rejected_by_alert", "unanswered", "unreachable"]

_CERTIFICATE_ALERTS: Final = {
    "CERTIFICATE_EXPIRED": (
        "it has expired, or is not valid yet",
        "renew the certificate if `openssl x509 -noout -dates -in FILE` shows that it ended; else check the clocks",
    ),
    "CERTIFICATE_REVOKED": ("it is revoked", "use a certificate that is not on the server's revocation list"),
    "UNKNOWN_CA": (
        "the server does not trust its authority",
        "use a certificate that an authority in the server's client_ca signed",
    ),
    "BAD_CERTIFICATE": ("it is invalid", "check the certificate: `openssl x509 -noout -text -in FILE`"),
    "UNSUPPORTED_CERTIFICATE": (
        "its type is not supported",
        "use a certificate that is valid for client authentication",
    ),
    "CERTIFICATE_UNKNOWN": ("it is not acceptable", "see the server's log for the reason"),
    "ACCESS_DENIED": ("access is denied", "see the server's log for the reason"),
}
"""TLS alerts about the client certificate [RFC 8446 section 6.2]: the reason, and what to do."""

_MISSING_CERTIFICATE: Final = "set the client certificate (--cert-file, cert_file)"


class Unreachable(NamedTuple):
    """``why`` there is no connection and what to ``do``; None: start the server, or correct the address."""

    why: str
    do: str | None = None


def rejected_by_alert(error: BaseException | None, certificate: str | None = None) -> Unreachable | None:
    """Why the server ended the connection, if ``error`` carries its TLS alert; else None.

    ``certificate`` is the file of the client certificate. With TLS 1.3 the server checks it after the client's
    handshake, so the alert arrives with the first read.
    """
    # OpenSSL puts the protocol version that introduced the alert in front, as in TLSV13_ALERT_CERTIFICATE_REQUIRED.
    alert = (getattr(error, "reason", None) or "").partition("_ALERT_")[2] if isinstance(error, ssl.SSLError) else ""
    if alert in _CERTIFICATE_ALERTS:
        reason, do = _CERTIFICATE_ALERTS[alert]
        which = "the client certificate" if certificate is None else f"the client certificate {certificate!r}"
        return Unreachable(
            f"the server rejected {which}: {reason} (TLS alert {alert.lower()})",
            do if certificate is None else do.replace("FILE", certificate),
        )
    if alert == "CERTIFICATE_REQUIRED":
        return Unreachable(
            f"the server requires a client certificate (TLS alert {alert.lower()})", _MISSING_CERTIFICATE
        )
    if alert == "HANDSHAKE_FAILURE" and certificate is None:
        return Unreachable(
            "the server refused the TLS handshake (TLS alert handshake_failure), in TLS 1.2 also for a missing client "
            "certificate",
            _MISSING_CERTIFICATE + " if the server requires one",
        )
    if alert:
        return Unreachable(
            f"the server refused the TLS connection (TLS alert {alert.lower()})", "see the server's log for the reason"
        )
    return None


def unreachable(error: OSError, host: str, *, tls: bool, certificate: str | None = None) -> Unreachable:
    """What ``error`` says of a connection to ``host`` that was tried, with TLS or without.

    ``certificate`` is the file of the client certificate, if one was given.
    """
    alert = rejected_by_alert(error, certificate)
    if alert is not None:
        return alert
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unreachable(
            f"the server's certificate was not accepted: {error.verify_message}",
            "trust its authority (ca_file, --ca-file), or connect by the name that the certificate bears",
        )
    if isinstance(error, ssl.SSLError):
        return Unreachable(
            f"TLS failed: {getattr(error, 'reason', None) or error}",
            "check that this port speaks TLS, and whether the server wants a client certificate",
        )
    if isinstance(error, socket.gaierror):
        return Unreachable(f"the host name {host!r} is not known: {error.strerror}", "correct the address")
    if isinstance(error, TimeoutError):
        return Unreachable("nobody answered in time: the host is down, or a firewall drops what is sent to it")
    if isinstance(error, ConnectionRefusedError) or _all_refused(error):
        return Unreachable("nothing listens there (connection refused)")
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return Unreachable("there is no route to that host", "correct the address, or look at the network")
    if isinstance(error, ConnectionResetError):
        return Unreachable(
            "the connection was cut as soon as it was made",
            "check that this port speaks what the address says" if tls else None,
        )
    return Unreachable(error.strerror or str(error) or type(error).__name__)


def unanswered(*, tls: bool) -> Unreachable:
    """Possible causes of a connection, with TLS or without, that the peer closed before its first answer."""
    if tls:
        # TLS 1.3 checks the client's certificate after the client's handshake, and some servers send no alert.
        return Unreachable(
            "it was ended before any answer, as by a server that wants the client's certificate",
            "give the client's certificate (--cert-file) if the server wants one",
        )
    return Unreachable(
        "it was ended before any answer, as by a port that speaks TLS or another protocol",
        "look whether the port is TubeMQ's without TLS, or connect with TLS (--tls, --ca-file)",
    )


def _all_refused(error: OSError) -> bool:
    """True if a host refused on each of its addresses: asyncio combines these errors into one."""
    return error.errno is None and "Multiple exceptions" in str(error) and "refused" in str(error).lower()
