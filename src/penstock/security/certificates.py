"""Certificates: the name of the holder, the expiry, and revocation lists.

OpenSSL checks signatures, and refuses revoked certificates in the handshake. The lists are read here for connections
that are already established, and for warnings. Only the fields that are needed are parsed [RFC 5280 sections 4.1, 5.1].
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, NamedTuple

__all__ = [
    "CertificateName",
    "Revocations",
    "certificate_expiry",
    "certificate_identity",
    "name_in_certificate",
    "read_revocations",
]


class CertificateName(StrEnum):
    """The part of a client certificate that identifies its holder."""

    COMMON_NAME = "common_name"
    """CN of the subject."""
    DNS = "dns"
    """The first DNS name of the subject alternative name."""
    URI = "uri"
    """The first URI of the subject alternative name, as used by SPIFFE."""
    EMAIL = "email"
    """The first e-mail address of the subject alternative name."""
    SUBJECT = "subject"
    """The whole subject, in the order of the certificate: ``CN=press-7,O=plant``."""


_KINDS = {CertificateName.DNS: "DNS", CertificateName.URI: "URI", CertificateName.EMAIL: "email"}
_SHORT = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "localityName": "L",
    "stateOrProvinceName": "ST",
}


def name_in_certificate(certificate: Mapping[str, object] | None, which: CertificateName) -> str | None:
    """Name in a verified certificate, as returned by :meth:`ssl.SSLObject.getpeercert`; None without one.

    A name that occurs twice in the subject is ignored, so that the result does not depend on the order.
    """
    if not certificate:
        return None
    if which in _KINDS:
        return next((value for kind, value in _pairs(certificate, "subjectAltName") if kind == _KINDS[which]), None)
    subject = _pairs(certificate, "subject")
    if which is CertificateName.SUBJECT:
        return ",".join(f"{_SHORT.get(kind, kind)}={_escaped(value)}" for kind, value in subject) or None
    names = [value for kind, value in subject if kind == "commonName"]
    return names[0] if len(names) == 1 and names[0] else None


def _escaped(value: str) -> str:
    """Escape separators with a backslash [RFC 4514]."""
    return "".join(f"\\{c}" if c in ',+"\\<>;=' else c for c in value)


def _pairs(certificate: Mapping[str, object], name: str) -> list[tuple[str, str]]:
    """All name and value pairs of a field; those of a subject are nested deeper."""
    found: list[tuple[str, str]] = []
    pending: list[object] = [certificate.get(name, ())]
    while pending:
        item = pending.pop(0)
        if isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item):
            found.append((str(item[0]), str(item[1])))
        elif isinstance(item, tuple):
            pending = [*item, *pending]
    return found


_CRL = re.compile(r"-----BEGIN X509 CRL-----(.*?)-----END X509 CRL-----", re.DOTALL)
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_INTEGER: Final = 0x02
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0


class Revocations(NamedTuple):
    """The union of several revocation lists."""

    identities: frozenset[bytes]
    """Identities of the revoked certificates, see :func:`certificate_identity`."""
    next_update: float | None
    """Expiry of the first list in seconds since 1970; OpenSSL rejects every client afterwards."""


class _Element(NamedTuple):
    tag: int
    content: bytes
    whole: bytes


def certificate_identity(der: bytes) -> bytes:
    """Digest of issuer and serial number, by which revocation lists identify a certificate.

    Raises:
        ValueError: ``der`` is not a certificate.
    """
    fields = _fields_of_certificate(der)
    return _identity(fields[2].whole, fields[0].content)


def certificate_expiry(pem: str) -> float:
    """Expiry of the first certificate in ``pem``, in seconds since 1970.

    Raises:
        ValueError: ``pem`` has no certificate.
    """
    found = _CERTIFICATE.search(pem)
    if found is None:
        raise ValueError("no certificate")
    fields = _fields_of_certificate(_der(found[1]))
    validity = list(_elements(fields[3].content))
    if len(validity) != 2:
        raise ValueError("the validity does not have two times")
    return _time(validity[1])


def read_revocations(pem: str) -> Revocations:
    """Read the revocation lists in ``pem``.

    Raises:
        ValueError: there is none, or one is truncated.
    """
    identities: set[bytes] = set()
    ends: list[float] = []
    lists = _CRL.findall(pem)
    if not lists:
        raise ValueError("holds no block that begins with -----BEGIN X509 CRL-----")
    for text in lists:
        fields = list(_elements(_sequence(_sequence(_der(text)).content).content))
        if fields and fields[0].tag == _INTEGER:  # skip the version
            del fields[0]
        if len(fields) < 3:
            raise ValueError("a revocation list is truncated")
        issuer, rest = fields[1].whole, fields[3:]
        if rest and rest[0].tag in (_UTC_TIME, _GENERALIZED_TIME):
            ends.append(_time(rest.pop(0)))
        if rest and rest[0].tag == _SEQUENCE:
            for entry in _elements(rest[0].content):
                serial = next(_elements(entry.content), None)
                if serial is None or serial.tag != _INTEGER:
                    raise ValueError("an entry of a revocation list has no serial number")
                identities.add(_identity(issuer, serial.content))
    return Revocations(frozenset(identities), min(ends, default=None))


def _der(block: str) -> bytes:
    try:
        return base64.b64decode("".join(block.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def _identity(issuer: bytes, serial: bytes) -> bytes:
    return hashlib.sha256(issuer + serial).digest()


def _fields_of_certificate(der: bytes) -> list[_Element]:
    """Serial number, signature algorithm, issuer, validity and the following fields."""
    fields = list(_elements(_sequence(_sequence(der).content).content))
    if fields and fields[0].tag == _VERSION:
        del fields[0]
    if len(fields) < 4:
        raise ValueError("a certificate is truncated")
    return fields


def _sequence(data: bytes) -> _Element:
    element = next(_elements(data), None)
    if element is None or element.tag != _SEQUENCE:
        raise ValueError("expected a sequence")
    return element


def _elements(data: bytes) -> Iterator[_Element]:
    """The DER elements of ``data``, in order."""
    at = 0
    while at < len(data):
        if at + 2 > len(data):
            raise ValueError("truncated within an element")
        length, start = data[at + 1], at + 2
        if length & 0x80:
            size = length & 0x7F
            length, start = int.from_bytes(data[start : start + size]), start + size
        end = start + length
        if end > len(data):
            raise ValueError("an element is longer than its parent")
        yield _Element(data[at], data[start:end], data[at:end])
        at = end


def _time(element: _Element) -> float:
    text = element.content.decode("ascii")
    if element.tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
