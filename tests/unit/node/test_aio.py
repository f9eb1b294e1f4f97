"""The profile aio: its settings, and the files that a node creates for it."""

from __future__ import annotations

import hashlib
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from penstock.errors import ConfigError, StorageError, UnavailableError
from penstock.node.aio import prepare
from penstock.node.config.node import NodeConfig, load_config
from penstock.node.config.profiles import AioFiles
from penstock.node.data_dir import DataDirectory

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def configured(text: str = "", **flags: str) -> NodeConfig:
    Path("penstock.yaml").write_text(f"profile: aio\n{text}", encoding="utf-8")
    return load_config(None, flags, {})


def test_an_application_connects_with_tls_and_a_token_and_commands_without() -> None:
    config = configured()
    listener = config.mqtt.listeners["aio"]
    assert str(listener.bind) == "127.0.0.1:18883"
    assert listener.transport.encrypted
    assert listener.authentication == ["token"]
    assert config.mqtt.authentication == ["anonymous"]
    assert config.mqtt.limits.max_packet_size == 256 * 1024 * 1024  # type: ignore[attr-defined]
    assert config.security.tokens == AioFiles(config.data_dir).tokens
    assert load_config(None, {}, {"PENSTOCK_PROFILE": "aio"}) == config


def test_settings_override_the_profile() -> None:
    config = configured("data_dir: data\nmqtt: 127.0.0.1:1\n", **{"data-dir": "other"})
    assert str(config.mqtt.bind) == "127.0.0.1:1"
    assert config.security.tokens == Path("other/aio/tokens.yaml")
    config = configured(
        "security: {passwords: users, tokens: mine}\n"
        "mqtt: {limits: {max_packet_size: 2048}, listeners: {aio: {bind: 127.0.0.1:2}}}\n"
    )
    assert config.security.tokens == Path("mine")
    assert config.mqtt.authentication is None, "with users, the default listener asks for passwords"
    assert config.mqtt.limits.max_packet_size == 2048  # type: ignore[attr-defined]
    assert str(config.mqtt.listeners["aio"].bind) == "127.0.0.1:2"
    assert config.mqtt.listeners["aio"].authentication == ["token"]


def test_short_forms_of_addresses() -> None:
    config = configured("mqtt: {bind: 127.0.0.1:1, listeners: {aio: 127.0.0.1:2}}\n")
    assert [str(config.mqtt.bind), str(config.mqtt.listeners["aio"].bind)] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert config.mqtt.listeners["aio"].transport.encrypted


@pytest.mark.parametrize("text", ["mqtt: [1]", "mqtt: {limits: 5}", "mqtt: {listeners: [aio]}", "security: mine"])
def test_sections_of_a_wrong_type_are_not_replaced(text: str) -> None:
    with pytest.raises(ConfigError, match=r"penstock.yaml:2:"):
        configured(f"{text}\n")


def test_refused_settings() -> None:
    Path("penstock.yaml").write_text("profile: azure\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="profile"):
        load_config(None, {}, {})
    with pytest.raises(ConfigError, match="certificates of one node"):
        configured("cluster: {name: a, node: b, etcd: ['127.0.0.1:2379']}\n")


def test_the_files_are_created_once() -> None:
    config = configured()
    states = [config.creates_files]
    files = prepare(config, NOW)
    assert [*states, config.creates_files] == [True, False]
    digest = hashlib.sha256(files.token.read_bytes()).hexdigest()
    assert f"{{sha256: {digest}, user: default}}" in files.tokens.read_text()
    for path in (files.token, files.tokens, files.authority_key, files.key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ssl.create_default_context(cafile=files.authority).load_cert_chain(files.certificate, files.key)
    before = {path: path.read_bytes() for path in files.directory.iterdir()}
    prepare(config, NOW + timedelta(days=300))
    assert {path: path.read_bytes() for path in files.directory.iterdir()} == before


def test_the_server_certificate_is_renewed_and_the_authority_stays() -> None:
    config = configured()
    files = prepare(config, NOW)
    authority, token, first = files.authority.read_bytes(), files.token.read_bytes(), files.certificate.read_bytes()
    prepare(config, NOW + timedelta(days=340))
    renewed = files.certificate.read_bytes()
    assert renewed != first, "it expires within 30 days"
    prepare(configured("mqtt: {listeners: {aio: {advertise: edge-1:18883}}}\n"), NOW + timedelta(days=340))
    found = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "edge-1" in names.get_values_for_type(x509.DNSName)
    issuer = x509.load_pem_x509_certificate(authority)
    found.verify_directly_issued_by(issuer)
    assert (files.authority.read_bytes(), files.token.read_bytes()) == (authority, token)


def test_a_key_or_an_authority_that_does_not_fit_the_certificate_leads_to_a_new_certificate() -> None:
    config = configured()
    files = prepare(config, NOW)
    first, key = files.certificate.read_bytes(), files.key.read_bytes()
    files.key.write_bytes(_new_key())  # as after a crash between the writes of key and certificate
    prepare(config, NOW)
    ssl.create_default_context(cafile=files.authority).load_cert_chain(files.certificate, files.key)
    second = files.certificate.read_bytes()
    assert second != first
    files.authority.unlink()  # another authority, with the same name
    prepare(config, NOW)
    assert files.certificate.read_bytes() != second
    assert files.key.read_bytes() != key
    found, authority = map(
        x509.load_pem_x509_certificate, (files.certificate.read_bytes(), files.authority.read_bytes())
    )
    found.verify_directly_issued_by(authority)


def _new_key() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def test_a_token_that_was_replaced_is_the_one_that_counts() -> None:
    config = configured()
    files = prepare(config, NOW)
    files.token.write_text("another\n")
    prepare(config, NOW)
    assert hashlib.sha256(b"another").hexdigest() in files.tokens.read_text()


def test_damaged_files_and_a_directory_in_use() -> None:
    config = configured()
    files = prepare(config, NOW)
    token = files.token.read_bytes()
    for path, content, why in (
        (files.authority_key, b"nothing", "PEM"),
        (files.authority_key, _new_key(), "is not the key of"),
        (files.token, b"\n", "is empty"),
    ):
        path.write_bytes(content)
        with pytest.raises(StorageError, match="files of the profile aio") as raised:
            prepare(config, NOW)
        assert why in (raised.value.why or "")
        assert str(files.directory) in (raised.value.hint or "")
    files.token.write_bytes(token)
    with DataDirectory(config.data_dir), pytest.raises(UnavailableError):
        prepare(config, NOW)
