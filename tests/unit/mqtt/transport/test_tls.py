"""TLS contexts: which file is wrong."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from penstock.errors import ConfigError
from penstock.mqtt.transport.tls import ClientCertificates, ServerTls, TlsFiles
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def test_contexts(authority: Authority) -> None:
    certificate, key = authority.issue("server")
    plain = ServerTls(TlsFiles(certificate=certificate, key=key), protocol="mqtt")
    assert plain.context.verify_mode is ssl.CERT_NONE
    assert plain.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert not plain.anchors
    for wanted, mode in (
        (ClientCertificates.NONE, ssl.CERT_NONE),
        (ClientCertificates.OPTIONAL, ssl.CERT_OPTIONAL),
        (ClientCertificates.REQUIRE, ssl.CERT_REQUIRED),
    ):
        files = TlsFiles(
            certificate=certificate,
            key=key,
            client_ca=authority.file,
            client_certificates=wanted,
            minimum_version="1.3",
        )
        made = ServerTls(files, protocol="mqtt")
        assert made.context.verify_mode is mode
        assert made.context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert len(made.anchors) == 1


def test_revocation_lists(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    path = tmp_path / "revoked.pem"
    authority.revoke(path, certificate)
    files = TlsFiles(certificate=certificate, key=key, client_ca=authority.file, revoked=path)
    made = ServerTls(files, protocol="mqtt")
    assert made.context.verify_flags & ssl.VERIFY_CRL_CHECK_LEAF
    assert len(made.revoked) == 1
    assert set(made.expiry) == {certificate, path}


def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("good")
    other = authority.issue("other")[1]
    text = tmp_path / "text.pem"
    text.write_text("hello\n")
    encrypted = tmp_path / "encrypted.pem"
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    encrypted.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    for wrong, words in (
        (TlsFiles(certificate=tmp_path / "none", key=key), "certificate: .*none cannot be read: No such file"),
        (TlsFiles(certificate=certificate, key=tmp_path), "key: .* cannot be read: Is a directory"),
        (TlsFiles(certificate=certificate, key=other), "it is not the key of the first certificate"),
        (
            TlsFiles(certificate=text, key=key),
            "text.pem: cannot be used as the certificate(.|\n)*no certificate in PEM form",
        ),
        (
            TlsFiles(certificate=certificate, key=text),
            "text.pem: cannot be used as the key(.|\n)*no private key in PEM",
        ),
        (TlsFiles(certificate=certificate, key=encrypted), "the key is encrypted"),
        (TlsFiles(certificate=certificate, key=key, client_ca=text), "contains no certificate of an authority"),
        (TlsFiles(certificate=certificate, key=key, client_ca=tmp_path / "no"), "client_ca: .*no cannot be read"),
        (TlsFiles(certificate=certificate, key=key, revoked=text), "text.pem: contains no usable revocation list"),
        (TlsFiles(certificate=certificate, key=key, revoked=tmp_path / "no"), "revoked: .*no cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            ServerTls(wrong, protocol="mqtt")
        assert key.read_text()[40:80] not in str(caught.value)
        assert "_ssl.c" not in str(caught.value)
        assert caught.value.hint
