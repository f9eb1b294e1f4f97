"""Whom a client trusts: files that can and cannot be used."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from penstock.errors import ConfigError
from penstock.runtime.io.tls import TlsOptions


def test_files(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca, cert = tmp_path / "ca.pem", tmp_path / "client.pem"
    authority.cert_pem.write_to_path(str(ca))
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(str(cert))
    context = TlsOptions(ca, cert).context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert TlsOptions(verify=False).context().verify_mode is ssl.CERT_NONE
    garbage = tmp_path / "garbage"
    garbage.write_text("none")
    for options, named in (
        (TlsOptions(garbage), "ca_file"),
        (TlsOptions(tmp_path / "missing"), "ca_file"),
        (TlsOptions(ca, garbage), "cert_file"),
        (TlsOptions(ca, ca), "cert_file"),
        (TlsOptions(ca, key_file=cert), "key_file"),
    ):
        with pytest.raises(ConfigError) as caught:
            options.context()
        assert caught.value.option == named


def test_an_unusable_file_is_explained_without_openssls_words(tmp_path: Path) -> None:
    authority = trustme.CA()
    leaf, other = authority.issue_cert("client"), authority.issue_cert("other")
    cert, key, wrong, text = (tmp_path / name for name in ("cert.pem", "key.pem", "wrong.pem", "text.pem"))
    leaf.cert_chain_pems[0].write_to_path(str(cert))
    leaf.private_key_pem.write_to_path(str(key))
    other.private_key_pem.write_to_path(str(wrong))
    text.write_text("none")
    der = tmp_path / "cert.der"
    der.write_bytes(ssl.PEM_cert_to_DER_cert(cert.read_text()))
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n")
    for options, option, why in (
        (TlsOptions(text), "ca_file", "no certificate in PEM form"),
        (TlsOptions(der), "ca_file", "in DER form"),
        (TlsOptions(tmp_path / "none"), "ca_file", "No such file"),
        (TlsOptions(None, text, key), "cert_file", "no certificate in PEM form"),
        (TlsOptions(None, cert), "cert_file", "no private key in PEM form"),
        (TlsOptions(None, cert, wrong), "key_file", "not the key of the first certificate"),
        (TlsOptions(None, cert, text), "key_file", "no private key in PEM form"),
        (TlsOptions(None, cert, tmp_path / "none"), "key_file", "No such file"),
        (TlsOptions(None, damaged, key), "cert_file", "damaged"),
    ):
        with pytest.raises(ConfigError) as caught:
            options.context()
        assert caught.value.option == option
        assert why in (caught.value.why or "")
        assert caught.value.hint
        assert "_ssl.c" not in str(caught.value)
