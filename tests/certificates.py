"""Certificates for tests, made anew in each run: an authority, a server, clients."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = ["Authority"]


class Authority:
    """A certificate authority whose files lie in ``directory``: ``ca.pem``, and for each name ``.pem`` and ``.key``."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._ca = trustme.CA(organization_name=f"Test {name}")
        self.file = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, name: str, *identities: str, until: datetime | None = None) -> tuple[Path, Path]:
        """A certificate with the common name ``name``, chain in one file, and its key."""
        issued = self._ca.issue_cert(*(identities or (name,)), common_name=name, not_after=until)
        certificate, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        certificate.write_bytes(chain)
        issued.private_key_pem.write_to_path(key)
        return certificate, key

    def revoke(self, path: Path, *certificates: Path, lasts: timedelta = timedelta(days=1)) -> None:
        """Write the authority's revocation list: these certificates, and until when the list counts."""
        authority = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(key, EllipticCurvePrivateKey)
        now = datetime.now(UTC)
        made = x509.CertificateRevocationListBuilder(authority.subject, now - timedelta(days=30), now + lasts)
        for certificate in certificates:
            serial = x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number
            entry = x509.RevokedCertificateBuilder(serial, now - timedelta(days=30)).build()
            made = made.add_revoked_certificate(entry)
        path.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def client_context(self, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """What a client of a server of this authority needs, with a certificate and key to show."""
        context = ssl.create_default_context(cafile=self.file)
        if shown is not None:
            context.load_cert_chain(shown[0], shown[1])
        return context
