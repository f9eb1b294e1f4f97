"""The section ``statestore``: what the file says becomes the store's options."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.node.config.node import NodeConfig, TopicSection, load_config
from penstock.statestore.codec.commands import Extension
from penstock.statestore.options import OPTIONAL_EXTENSIONS, PersistenceMode, StoreOptions


def load(tmp_path: Path, text: str) -> NodeConfig:
    path = tmp_path / "penstock.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, {}, {})


def test_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, "statestore: {}\n")
    options = config.statestore.options(strict_read=False)
    assert (options.dialect, options.max_keys, options.max_bytes, options.extensions) == (
        "auto",
        1_000_000,
        1 << 30,
        Extension.SCAN,
    )
    assert options.principal_share == 50
    assert options.persistence.mode is PersistenceMode.ALL
    assert not options.keeps_history
    assert StoreOptions().extensions == options.extensions
    assert config.topics() == {}


def test_a_whole_section(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
statestore:
  dialect: published
  max_keys: 5
  max_bytes: 1000
  max_waiting: 7
  scan: false
  extensions: [EXTENSIONS]
  history_changes: 10
  history_bytes: 1000
  capture_topic: changes
  persistence:
    mode: custom
    keys:
      - {keys: ["line/*"]}
      - {key_type: string, keys: ["exact*"]}
      - {key_type: binary, keys: ["AP8="]}
    property: keep
    value: "yes"
""".replace("EXTENSIONS", ", ".join(OPTIONAL_EXTENSIONS)),
    )
    options = config.statestore.options(strict_read=True)
    assert options.strict_read
    assert options.extensions == ~Extension.SCAN & ~Extension.NONE
    assert options.keeps_history
    kept = options.persistence.keys
    assert [key in kept for key in (b"line/3", b"lin", b"exact*", b"exactly", b"\x00\xff")] == [
        *(True, False, True, False, True),
    ]
    assert (options.persistence.property_name, options.persistence.property_value) == ("keep", "yes")
    assert (options.max_keys, options.max_bytes, options.max_waiting, options.dialect) == (5, 1000, 7, "published")
    assert config.topics() == {"changes": TopicSection(partitions=1)}


def test_dynamic_persistence_can_be_switched_off(tmp_path: Path) -> None:
    config = load(tmp_path, "statestore: {persistence: {mode: custom, dynamic: false}}\n")
    assert config.statestore.options(strict_read=False).persistence.property_name == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dialect: english", "dialect"),
        ("extensions: [time-travel]", "extensions"),
        ("capture_topic: 3x", "TubeMQ topic"),
        ("persistence: {keys: [{key_type: binary, keys: ['?']}]}", "base64"),
        ("max_keys: -1", "max_keys"),
    ],
)
def test_invalid_options_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, f"statestore:\n  {text}\n")
