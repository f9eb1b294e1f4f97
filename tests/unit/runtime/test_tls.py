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
