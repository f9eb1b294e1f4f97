"""TLS contexts of listeners, and errors that say which file is wrong."""

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
from penstock.runtime.io.tls import AlertingContext
from penstock.security.certificates import CertificateName, Revocations, certificate_expiry, read_revocations

__all__ = ["ClientCertificates", "ServerTls", "TlsFiles", "certificate_of", "trust_anchor"]

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class ClientCertificates(StrEnum):
    """What a listener asks of its clients."""

    NONE = "none"
    OPTIONAL = "optional"
    """One that is shown must be valid."""
    REQUIRE = "require"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The settings of one listener. ``certificate``: PEM, the server's own first, then the intermediate ones.

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
    """A context made from the files as they are now; made anew to read them again."""

    __slots__ = ("anchors", "context", "expiry", "files", "revoked")

    def __init__(self, files: TlsFiles, *, protocol: str) -> None:
        """Read the files. ``protocol`` is what ALPN says: ``mqtt`` or ``http/1.1``.

        Raises:
            ConfigError: one of them cannot be used; it is named.
        """
        self.files = files
        context = AlertingContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[files.minimum_version]
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols([protocol])
        _load_certificate(context, files)
        self.expiry: dict[Path, float] = {}
        """Files that count for nothing from a time on, in seconds since 1970: the certificate, the revocation lists."""
        with suppress(ValueError):  # OpenSSL has taken it: one in a form that is not read here has no warning
            self.expiry[files.certificate] = certificate_expiry(files.certificate.read_text("latin-1"))
        self.anchors: frozenset[bytes] = frozenset()
        """Digests of the certificates that clients' are trusted by."""
        self.revoked: frozenset[bytes] = frozenset()
        """Identities of clients' certificates that count no more."""
        if files.client_ca is not None:
            _load_authorities(context, files.client_ca)
            self.anchors = frozenset(hashlib.sha256(der).digest() for der in context.get_ca_certs(binary_form=True))
            if files.client_certificates is not ClientCertificates.NONE:
                required = files.client_certificates is ClientCertificates.REQUIRE
                context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
                # A resumed session shows no chain, so who vouches for the client would not be known. TLS 1.2 may still
                # resume by session id: then the anchor is unknown, and the next reload ends the connection.
                context.options |= ssl.OP_NO_TICKET
                context.num_tickets = 0
        if files.revoked is not None:
            revocations = _load_revocations(context, files.revoked)
            self.revoked = revocations.identities
            if revocations.next_update is not None:
                self.expiry[files.revoked] = revocations.next_update
        self.context = context


def trust_anchor(ssl_object: object) -> bytes | None:
    """Digest of the authority by which a peer's certificate was found valid; None where that is not known."""
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
    """What the peer's certificate says, verified; None where it showed none."""
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
            do="decrypt it (`openssl pkey`) and let only the node's user read it",
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{files.key}: the key is not that of {files.certificate}",
                option="key",
                where=str(files.key),
                why="the certificate file begins with the certificate of another key",
                do="put the server's own certificate first and the intermediate ones after it",
            ) from error
        raise ConfigError(
            f"{files.certificate}, {files.key}: cannot be used together",
            option="certificate",
            where=str(files.certificate),
            why=error.reason or str(error),
            do="both must be PEM: a certificate chain, and its private key",
        ) from error


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    _readable(path, "client_ca")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{path}: holds no certificate of an authority",
            option="client_ca",
            where=str(path),
            why=error.reason or str(error),
            do="give a PEM file with the certificates that clients' are signed by",
        ) from error


def _load_revocations(context: ssl.SSLContext, path: Path) -> Revocations:
    _readable(path, "revoked")
    try:
        revocations = read_revocations(path.read_text("latin-1"))
        context.load_verify_locations(path)
    except (ValueError, ssl.SSLError) as error:
        raise ConfigError(
            f"{path}: holds no revocation list that can be used",
            option="revoked",
            where=str(path),
            why=str(error),
            do="give a PEM file with the list of each authority in client_ca (`openssl crl -inform DER` makes PEM)",
        ) from error
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return revocations


def _readable(path: Path, option: str) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}",
            option=option,
            where=str(path),
            do="check the path, and that the node's user may read the file",
        ) from error


class _EncryptedKeyError(Exception):
    """Asked for a passphrase; OpenSSL would ask at the terminal."""
