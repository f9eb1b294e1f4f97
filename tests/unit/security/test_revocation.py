"""Revocation lists and ends of certificates, against another implementation's reading of the same bytes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from ssl import PEM_cert_to_DER_cert

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from penstock.security.certificates import certificate_expiry, certificate_identity, read_revocations
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("crl"))


def identity(certificate: Path) -> bytes:
    return certificate_identity(PEM_cert_to_DER_cert(certificate.read_text()))


def test_revocation_lists_return_identities_and_their_next_update(authority: Authority, tmp_path: Path) -> None:
    gone, here = authority.issue("gone")[0], authority.issue("here")[0]
    path, empty = tmp_path / "crl.pem", tmp_path / "empty.pem"
    authority.revoke(path, gone)
    authority.revoke(empty, lasts=timedelta(hours=1))
    found = read_revocations(path.read_text())
    assert identity(gone) in found.identities
    assert identity(here) not in found.identities
    both = read_revocations("of two authorities\n" + path.read_text() + empty.read_text())
    assert both.identities == found.identities
    ends = x509.load_pem_x509_crl(empty.read_bytes()).next_update_utc
    assert ends is not None
    assert both.next_update == ends.timestamp(), "the list that ends first"


def test_equal_serial_numbers_of_two_authorities_are_two(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    path = tmp_path / "crl.pem"
    gone = authority.issue("gone")[0]
    other.revoke(path, gone)
    assert identity(gone) not in read_revocations(path.read_text()).identities


@pytest.mark.parametrize("year", [2030, 2049, 2050, 9999])
def test_the_end_of_a_certificate_is_read(authority: Authority, year: int) -> None:
    """UTCTime has two digits of the year, up to 2049; then there is GeneralizedTime."""
    until = datetime(year, 12, 31, 23, 59, 59, tzinfo=UTC)
    certificate = authority.issue(f"until-{year}", until=until)[0]
    assert certificate_expiry(certificate.read_text()) == until.timestamp()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "BEGIN X509 CRL"),
        ("-----BEGIN X509 CRL-----\n!\n-----END X509 CRL-----", "not base64"),
        ("-----BEGIN X509 CRL-----\nMAA=\n-----END X509 CRL-----", "expected a sequence"),
        ("-----BEGIN X509 CRL-----\nMAIwAA==\n-----END X509 CRL-----", "truncated"),
        ("-----BEGIN X509 CRL-----\nMIL//w==\n-----END X509 CRL-----", "longer than its parent"),
    ],
)
def test_invalid_revocation_lists_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_revocations(text)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_certificate(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with them
        certificate_identity(b"\x30\x82" + data)
