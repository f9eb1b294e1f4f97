"""Names in client certificates."""

from __future__ import annotations

import pytest

from penstock.security.certificates import CertificateName, name_in_certificate

CERTIFICATE = {
    "subject": (
        (("countryName", "DE"),),
        (("organizationName", "Plant, North"),),
        (("commonName", "press-7"),),
    ),
    "subjectAltName": (
        ("DNS", "press-7.plant"),
        ("DNS", "other"),
        ("URI", "spiffe://plant/press-7"),
        ("email", "a@b"),
    ),
}


@pytest.mark.parametrize(
    ("which", "name"),
    [
        (CertificateName.COMMON_NAME, "press-7"),
        (CertificateName.DNS, "press-7.plant"),
        (CertificateName.URI, "spiffe://plant/press-7"),
        (CertificateName.EMAIL, "a@b"),
        (CertificateName.SUBJECT, "C=DE,O=Plant\\, North,CN=press-7"),
    ],
)
def test_the_name(which: CertificateName, name: str) -> None:
    assert name_in_certificate(CERTIFICATE, which) == name
    assert name_in_certificate({}, which) is None
    assert name_in_certificate(None, which) is None


def test_two_common_names_are_none() -> None:
    twice = {"subject": ((("commonName", "a"), ("commonName", "b")),)}
    assert name_in_certificate(twice, CertificateName.COMMON_NAME) is None
