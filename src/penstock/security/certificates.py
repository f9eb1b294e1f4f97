"""The name in a client certificate: what policies and sessions know its holder by."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

__all__ = ["CertificateName", "name_in_certificate"]


class CertificateName(StrEnum):
    """The part of a client certificate that names its holder."""

    COMMON_NAME = "common_name"
    """CN of the subject."""
    DNS = "dns"
    """The first DNS name of the subject alternative name."""
    URI = "uri"
    """The first URI of it, as SPIFFE has it."""
    EMAIL = "email"
    """The first e-mail address of it."""
    SUBJECT = "subject"
    """The whole subject: ``CN=press-7,O=plant``, as it is ordered in the certificate."""


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
    """The name in a verified certificate, as :meth:`ssl.SSLObject.getpeercert` gives it; None where it has none.

    A name that appears twice in the subject is none: which of them counts must not depend on the reader.
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
    """RFC 4514: what separates is written with a backslash."""
    return "".join(f"\\{c}" if c in ',+"\\<>;=' else c for c in value)


def _pairs(certificate: Mapping[str, object], name: str) -> list[tuple[str, str]]:
    """All name and value pairs of a field; those of a subject are nested one deeper."""
    found: list[tuple[str, str]] = []
    pending: list[object] = [certificate.get(name, ())]
    while pending:
        item = pending.pop(0)
        if isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item):
            found.append((str(item[0]), str(item[1])))
        elif isinstance(item, tuple):
            pending = [*item, *pending]
    return found
