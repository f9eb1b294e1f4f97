"""Addresses of the form HOST:PORT, and error messages for listeners and connections that fail."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from typing import Final, NamedTuple

from penstock.errors import PenstockError, UnavailableError

__all__ = [
    "Address",
    "ConnectionFailure",
    "accept",
    "bind_error",
    "connection_failure",
    "in_use",
    "is_host",
    "no_response",
    "parse_address",
    "tls_alert_failure",
    "without_secret",
]


_ACCEPTED: Final[dict[int, type[socket.socket]]] = {
    family: type("AcceptedSocket", (socket.socket,), {"__slots__": (), "family": family, "type": socket.SOCK_STREAM})
    for family in (socket.AF_INET, socket.AF_INET6)
}
"""Classes of accepted sockets, by family. A :class:`socket.socket` converts its family and type to enums at each
access: five times for a new connection, which took as long as the system calls."""


def accept(listening: socket.socket, family: int) -> tuple[socket.socket, str, int]:
    """Accept a connection of a listening TCP socket of ``family``, an IP family, without blocking.

    Returns its socket, and address and port of the peer.

    Raises:
        OSError: as :meth:`socket.socket.accept`.
    """
    descriptor, peer = listening._accept()  # type: ignore[attr-defined] # noqa: SLF001 - accept() without conversions
    accepted = _ACCEPTED[family](family, socket.SOCK_STREAM, socket.IPPROTO_TCP, descriptor)
    accepted.settimeout(0)
    return accepted, peer[0], peer[1]


class Address(NamedTuple):
    """Host (name or address, IPv6 without brackets) and port; port 0 selects a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """True for a wildcard address, to which no client can connect."""
        return self.host in {"0.0.0.0", "::", ""}  # noqa: S104 - a comparison, nothing is bound here

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect to it. Host names other than ``localhost`` count as reachable from
        other machines."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """Parse ``HOST:PORT`` or ``[IPv6]:PORT``.

    Raises:
        ValueError: it is invalid; the message has the accepted format, for the caller to add the option.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("expected an IPv6 address in brackets: [::1]:1883")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise ValueError("expected HOST:PORT, as in 127.0.0.1:1883")
    if any(character.isspace() or character in "/@" for character in host):
        raise ValueError("expected a host name or address before the port, without a scheme or a path")
    if not is_host(host):
        raise ValueError("expected a host name whose parts between dots have 1 to 63 characters")
    if int(port) > 65535:
        raise ValueError("expected a port from 0 to 65535")
    return Address(host, int(port))


def is_host(host: str) -> bool:
    """True if ``host`` has the form of a host name; for other text the resolver raises an error that is not an
    ``OSError``."""
    if host.isascii():  # as the codec decides, whose import takes longer
        return all(0 < len(label) < 64 for label in host.removesuffix(".").split("."))
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def without_secret(url: str) -> str:
    """Replace user and password in ``url``."""
    scheme, colon, rest = url.partition("://") if "://" in url else ("", "", url)
    return f"{scheme}{colon}***@{rest.rpartition('@')[2]}" if "@" in rest else url


def bind_error(error: OSError, option: str, address: Address) -> PenstockError:
    """Error for an ``address`` of the setting ``option`` on which the process cannot listen."""
    why = error.strerror or str(error)
    hint = f"choose another address: --{option} HOST:PORT"
    if error.errno == errno.EADDRINUSE:
        why = "another process listens there"
        hint = f"stop it, or choose another port: --{option} {Address(address.host, 0)} takes a free one"
    elif error.errno == errno.EACCES:
        why = "this user may not use that port"
        hint = f"choose a port above 1023: --{option} HOST:PORT"
    elif error.errno == errno.EADDRNOTAVAIL:
        why = "this machine has no such address"
    elif isinstance(error, socket.gaierror):
        why = "the host name is unknown"
    failure = UnavailableError(f"{option}: cannot listen on {address}", applied=False, why=why, hint=hint)
    failure.__cause__ = error
    return failure


def in_use(address: Address) -> bool:
    """True if another process listens on ``address``, found by an attempt to bind it."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


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
"""TLS alerts about the client certificate [RFC 8446 section 6.2]: the reason and the action to take."""

_MISSING_CERTIFICATE: Final = "set the client certificate (--cert-file, cert_file)"


class ConnectionFailure(NamedTuple):
    """Reason of a failed connection; ``hint`` None: start the server, or correct the address."""

    why: str
    hint: str | None = None


def tls_alert_failure(error: BaseException | None, certificate: str | None = None) -> ConnectionFailure | None:
    """Reason of the closed connection if ``error`` has a TLS alert of the server; else None.

    ``certificate`` is the file of the client certificate. With TLS 1.3 the server checks it after the client's
    handshake, so the alert arrives with the first read.
    """
    # OpenSSL prefixes the protocol version that introduced the alert, as in TLSV13_ALERT_CERTIFICATE_REQUIRED.
    alert = (getattr(error, "reason", None) or "").partition("_ALERT_")[2] if isinstance(error, ssl.SSLError) else ""
    if alert in _CERTIFICATE_ALERTS:
        reason, hint = _CERTIFICATE_ALERTS[alert]
        which = "the client certificate" if certificate is None else f"the client certificate {certificate!r}"
        return ConnectionFailure(
            f"the server rejected {which}: {reason} (TLS alert {alert.lower()})",
            hint if certificate is None else hint.replace("FILE", certificate),
        )
    if alert == "CERTIFICATE_REQUIRED":
        return ConnectionFailure(
            f"the server requires a client certificate (TLS alert {alert.lower()})", _MISSING_CERTIFICATE
        )
    if alert == "HANDSHAKE_FAILURE" and certificate is None:
        return ConnectionFailure(
            "the server refused the TLS handshake (TLS alert handshake_failure), in TLS 1.2 also for a missing client "
            "certificate",
            _MISSING_CERTIFICATE + " if the server requires one",
        )
    if alert:
        return ConnectionFailure(
            f"the server refused the TLS connection (TLS alert {alert.lower()})", "see the server's log for the reason"
        )
    return None


_UNTRUSTED: Final = ConnectionFailure(
    "this client does not trust the authority that signed the server's certificate",
    "set the file with the certificate of the server's authority (--ca-file, ca_file)",
)
_OTHER_NAME: Final = ConnectionFailure(
    "the server's certificate is for another name",
    "connect to a name in the certificate, or issue one with this name (subjectAltName)",
)
_VERIFICATION: Final = {
    9: ConnectionFailure(
        "the server's certificate is not valid yet", "correct the clock of this machine or the server"
    ),
    10: ConnectionFailure(
        "the server's certificate has expired", "renew it on the server; if it is valid, correct this machine's clock"
    ),
    18: _UNTRUSTED,
    19: _UNTRUSTED,
    20: _UNTRUSTED,
    21: _UNTRUSTED,
    23: ConnectionFailure("the server's certificate is revoked", "replace it on the server"),
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}
"""Failures by OpenSSL's verification code (X509_V_ERR_...)."""

_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""OpenSSL's error codes for an answer that is not TLS."""

_WITHOUT_TLS: Final = (
    "use the port with TLS (MQTT: 8883, TubeMQ master: 8716), or connect without TLS (mqtt://, http://, --no-tls)"
)
_CUT_HANDSHAKE: Final = ConnectionFailure(
    "the server closed the connection during the TLS handshake, as a port without TLS does", _WITHOUT_TLS
)


def connection_failure(error: OSError, host: str, *, tls: bool, certificate: str | None = None) -> ConnectionFailure:
    """Reason of a failed connection to ``host``, with TLS or without.

    ``certificate`` is the file of the client certificate, if any.
    """
    alert = tls_alert_failure(error, certificate)
    if alert is not None:
        return alert
    if isinstance(error, ssl.SSLCertVerificationError):
        return _VERIFICATION.get(
            getattr(error, "verify_code", 0),
            ConnectionFailure(
                f"the server's certificate was not accepted: {getattr(error, 'verify_message', error)}",
                "trust its authority (ca_file, --ca-file), or connect to the name in the certificate",
            ),
        )
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or str(error)
        if any(name in reason for name in _NO_TLS):
            return ConnectionFailure("the server does not use TLS on this port", _WITHOUT_TLS)
        if isinstance(error, ssl.SSLEOFError) or "EOF" in reason:
            return _CUT_HANDSHAKE
        return ConnectionFailure(
            f"TLS failed: {reason.lower().replace('_', ' ')}",
            "check that this port uses TLS, and whether the server requires a client certificate",
        )
    if isinstance(error, socket.gaierror):
        return ConnectionFailure(f"the host name {host!r} is not known: {error.strerror}", "correct the address")
    if isinstance(error, TimeoutError):
        return ConnectionFailure("no response in time: the host is down, or a firewall drops the packets")
    if isinstance(error, ConnectionRefusedError) or _all_refused(error):
        return ConnectionFailure("nothing listens there (connection refused)")
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return ConnectionFailure("there is no route to the host", "correct the address, or check the network")
    if isinstance(error, ConnectionResetError):
        return _CUT_HANDSHAKE if tls else ConnectionFailure("the connection was closed immediately")
    return ConnectionFailure(error.strerror or str(error) or type(error).__name__)


def no_response(*, tls: bool) -> ConnectionFailure:
    """Likely cause if the peer closed a connection, with TLS or without, before its first answer."""
    if tls:
        # TLS 1.3 checks the client's certificate after the client's handshake, and some servers send no alert.
        return ConnectionFailure(
            "it was closed before any response, as by a server that requires a client certificate",
            "set the client certificate (--cert-file) if the server requires one",
        )
    return ConnectionFailure(
        "it was closed before any response, as by a port with TLS or another protocol",
        "check that it is the TubeMQ port without TLS, or connect with TLS (--tls, --ca-file)",
    )


def _all_refused(error: OSError) -> bool:
    """True if a host refused on each of its addresses: asyncio combines these errors into one."""
    return error.errno is None and "Multiple exceptions" in str(error) and "refused" in str(error).lower()
