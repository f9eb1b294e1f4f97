"""TLS contexts of listeners from certificate files, with errors that name the file."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, cast

from penstock.errors import ConfigError
from penstock.runtime.io.tls import AlertingContext, certificate_problem, pair_problem
from penstock.security.certificates import CertificateName, Revocations, certificate_expiry, read_revocations

__all__ = ["ClientCertificates", "ServerTls", "TlsFiles", "certificate_of", "trust_anchor"]

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class ClientCertificates(StrEnum):
    """Whether a listener requests client certificates."""

    NONE = "none"
    OPTIONAL = "optional"
    """A certificate is verified if the client sends one."""
    REQUIRE = "require"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """TLS settings of a listener. ``certificate``: PEM, the server's certificate first, then the intermediate ones.

    ``revoked``: PEM, the revocation list of every authority that signs clients' certificates.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None
    revoked: Path | None = None
    client_certificates: ClientCertificates = ClientCertificates.NONE
    name: CertificateName = CertificateName.COMMON_NAME
    minimum_version: str = "1.2"


class ServerTls:
    """TLS context from the current content of the files; created again to reload them."""

    __slots__ = ("anchors", "context", "expiry", "files", "incoming", "outgoing", "revoked")

    def __init__(self, files: TlsFiles, *, protocol: str) -> None:
        """Read the files. ``protocol``: the ALPN protocol, ``mqtt`` or ``http/1.1``.

        Raises:
            ConfigError: a file cannot be used.
        """
        self.files = files
        context = AlertingContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[files.minimum_version]
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols([protocol])
        if protocol == "mqtt":
            # MQTT clients have one connection. OpenSSL's default of two tickets costs 8 % more per handshake.
            context.num_tickets = 1
        _load_certificate(context, files)
        self.expiry: dict[Path, float] = {}
        """Expiry in seconds since 1970, by file: the certificate, the revocation lists."""
        with suppress(ValueError):  # OpenSSL accepted the file; if it cannot be parsed here, there is no expiry warning
            self.expiry[files.certificate] = certificate_expiry(files.certificate.read_text("latin-1"))
        self.anchors: frozenset[bytes] = frozenset()
        """Digests of the trusted authorities' certificates."""
        self.revoked: frozenset[bytes] = frozenset()
        """Identities of revoked client certificates."""
        if files.client_ca is not None:
            _load_authorities(context, files.client_ca)
            self.anchors = frozenset(hashlib.sha256(der).digest() for der in context.get_ca_certs(binary_form=True))
            if files.client_certificates is not ClientCertificates.NONE:
                required = files.client_certificates is ClientCertificates.REQUIRE
                context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
                # A resumed session has no certificate chain, so the client's authority would not be known. TLS 1.2 may
                # still resume by session id: then the anchor is unknown, and the next reload closes the connection.
                context.options |= ssl.OP_NO_TICKET
                context.num_tickets = 0
        if files.revoked is not None:
            revocations = _load_revocations(context, files.revoked)
            self.revoked = revocations.identities
            if revocations.next_update is not None:
                self.expiry[files.revoked] = revocations.next_update
        self.context = context
        """The context of listeners; see :meth:`AlertingContext.replace`."""
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        """Memory BIOs that all connections share, in one thread (see :mod:`penstock.mqtt.transport.tls_transport`)."""


def trust_anchor(ssl_object: object) -> bytes | None:
    """Return the digest of the authority that verified a peer's certificate; None if it is not known."""
    chain = getattr(ssl_object, "get_verified_chain", None)
    if chain is not None:  # Python 3.13
        ders = cast("list[bytes]", chain())
        return hashlib.sha256(ders[-1]).digest() if ders else None
    inner = getattr(ssl_object, "_sslobj", None)
    certificates = inner.get_verified_chain() if inner is not None else None
    if not certificates:
        return None
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificates[-1].public_bytes())).digest()


def certificate_of(ssl_object: ssl.SSLObject) -> Mapping[str, object] | None:
    """Return the verified certificate of the peer; None if it sent none."""
    return ssl_object.getpeercert() or None


def _load_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    _readable(files.certificate, "certificate")
    _readable(files.key, "key")

    def no_prompt() -> str:
        raise _EncryptedKeyError

    try:
        context.load_cert_chain(files.certificate, files.key, no_prompt)
    except _EncryptedKeyError:
        raise ConfigError(
            f"{files.key}: the key is encrypted",
            option="key",
            where=str(files.key),
            hint="decrypt it (`openssl pkey`) and make it readable by the node's user only",
        ) from None
    except ssl.SSLError as error:
        blames_key, problem = pair_problem(files.certificate, files.key, error)
        option, path = ("key", files.key) if blames_key else ("certificate", files.certificate)
        raise ConfigError(
            f"{path}: cannot be used as the {option} of a TLS listener",
            option=option,
            where=str(path),
            why=problem.why,
            hint=problem.hint,
        ) from error


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    _readable(path, "client_ca")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{path}: contains no certificate of an authority",
            option="client_ca",
            where=str(path),
            why="a certificate in it is damaged" if (problem := certificate_problem(path)) is None else problem.why,
            hint="use a PEM file with the authorities of the client certificates",
        ) from error


def _load_revocations(context: ssl.SSLContext, path: Path) -> Revocations:
    _readable(path, "revoked")
    try:
        revocations = read_revocations(path.read_text("latin-1"))
        context.load_verify_locations(path)
    except (ValueError, ssl.SSLError) as error:
        raise ConfigError(
            f"{path}: contains no usable revocation list",
            option="revoked",
            where=str(path),
            why=str(error),
            hint="use a PEM file with the list of each authority in client_ca (`openssl crl -inform DER` makes PEM)",
        ) from error
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return revocations


def _readable(path: Path, option: str) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option}: {path} cannot be read: {error.strerror}",
            option=option,
            where=str(path),
            hint="check the path and that the node's user has read permission",
        ) from error


class _EncryptedKeyError(Exception):
    """The key needs a passphrase, for which OpenSSL would prompt on the terminal."""
