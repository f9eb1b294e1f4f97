"""Files of the profile ``aio``: a certificate authority, a server certificate and a token of a service account.

They are created at the first start in the directory ``aio`` of the data directory, and stay the same, so that
applications keep their settings. The server certificate is renewed at a start within 30 days of its end, or if the node
has other names.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.errors import StorageError
from penstock.node.config.node import NodeConfig
from penstock.node.config.profiles import AIO_LISTENER, AioFiles
from penstock.node.data_dir import DataDirectory
from penstock.runtime.io.files import DirectFiles, replace_file

__all__ = ["SERVICE_ACCOUNT", "prepare"]

SERVICE_ACCOUNT = "default"
"""User of the token, as Kubernetes names the service account of a pod that has none of its own."""

_NAMES = ("localhost", "aio-broker", "aio-broker.azure-iot-operations", "127.0.0.1", "::1")
"""Names in the server certificate: this machine, and the service of the broker in a cluster, which a container may map
to this machine."""
_AUTHORITY_DAYS = 3650
_SERVER_DAYS = 365
_RENEW_DAYS = 30


def prepare(config: NodeConfig, now: datetime | None = None) -> AioFiles:
    """Create the files that are missing or expire. ``now``: current time; None: that of the system.

    Raises:
        StorageError: the data directory cannot be used, or a file cannot be read or written.
        UnavailableError: a node uses the data directory.
    """
    files = AioFiles(config.data_dir)
    now = datetime.now(UTC) if now is None else now
    listener = config.mqtt.listeners[AIO_LISTENER]
    hosts = [address.host for address in (listener.bind, listener.advertise) if address and not address.is_wildcard]
    names = list(dict.fromkeys((*_NAMES, socket.gethostname(), *hosts)))
    with DataDirectory(config.data_dir):
        try:
            DirectFiles().make_dir(files.directory)
            _prepare_token(files)
            authority, key = _authority(files, now)
            if not _is_current(files, authority, names, now):
                _issue(files, authority, key, names, now)
        except (OSError, ValueError) as error:
            raise StorageError(
                f"the files of the profile aio in {files.directory} cannot be used",
                path=str(files.directory),
                why=str(error),
                hint=f"delete {files.directory}: the next start creates it again, with another authority and token",
            ) from error
    return files


def _prepare_token(files: AioFiles) -> None:
    if not files.token.exists():
        replace_file(files.token, secrets.token_urlsafe(48).encode(), mode=0o600)
    token = files.token.read_bytes().strip()
    if not token:
        raise ValueError(f"{files.token} is empty")
    digest = hashlib.sha256(token).hexdigest()
    wanted = f"tokens:\n  - {{sha256: {digest}, user: {SERVICE_ACCOUNT}}}\n".encode()
    if not files.tokens.exists() or files.tokens.read_bytes() != wanted:
        replace_file(files.tokens, wanted, mode=0o600)


def _authority(files: AioFiles, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Read the authority, or create it."""
    if files.authority.exists():
        found = serialization.load_pem_private_key(files.authority_key.read_bytes(), None)
        authority = x509.load_pem_x509_certificate(files.authority.read_bytes())
        if not isinstance(found, ec.EllipticCurvePrivateKey) or found.public_key() != authority.public_key():
            raise ValueError(f"{files.authority_key} is not the key of {files.authority}")
        return authority, found
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("penstock aio")
    certificate = (
        _builder(name, name, key, now, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    replace_file(files.authority_key, _pem(key), mode=0o600)
    replace_file(files.authority, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return certificate, key


def _is_current(files: AioFiles, authority: x509.Certificate, names: Sequence[str], now: datetime) -> bool:
    """Whether the server certificate is of this authority and its key, for these names, and does not expire soon."""
    if not (files.certificate.exists() and files.key.exists()):
        return False
    found = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    try:
        found.verify_directly_issued_by(authority)  # their names do not differ
    except (InvalidSignature, ValueError):
        return False
    alternative = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return (
        # A crash between the two writes of `_issue` leaves a new key with the previous certificate.
        found.public_key() == key.public_key()
        and alternative == _alternative(names)
        and found.not_valid_after_utc > now + timedelta(days=_RENEW_DAYS)
    )


def _issue(
    files: AioFiles,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    now: datetime,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name(names[0]), authority.subject, key, now, _SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_alternative(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    replace_file(files.key, _pem(key), mode=0o600)
    replace_file(files.certificate, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of containers may be behind
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(names: Sequence[str]) -> x509.SubjectAlternativeName:
    found: list[x509.GeneralName] = []
    for name in names:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return x509.SubjectAlternativeName(found)


def _key_usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
