"""The section ``statestore``: dialect, quotas, extensions, persistence in memory mode, change capture."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from penstock.node.config.listeners import Section
from penstock.statestore.codec.commands import Extension
from penstock.statestore.options import (
    MAX_BYTES,
    MAX_KEYS,
    OPTIONAL_EXTENSIONS,
    PRINCIPAL_SHARE,
    KeyPersistence,
    KeySelection,
    KeyType,
    PersistenceMode,
    StoreOptions,
    extensions_named,
    optional_extension,
)
from penstock.tube.codec.strings import valid_topic

__all__ = ["ExtensionName", "KeyResource", "PersistenceConfig", "StateStoreSection"]


ExtensionName = Annotated[
    str, AfterValidator(optional_extension), Field(json_schema_extra={"enum": list[JsonValue](OPTIONAL_EXTENSIONS)})
]
"""Name of an extension of the published protocol; SCAN is enabled by a separate option."""


def _topic(value: str | None) -> str | None:
    if value is not None and not valid_topic(value):
        raise ValueError("expected a TubeMQ topic: a letter, then letters, digits and _, 2 to 64 in all")
    return value


class KeyResource(Section):
    """Keys that are stored on disk."""

    key_type: KeyType = Field(
        default=KeyType.PATTERN, description="format of `keys`: globs, exact text, or exact bytes in base64"
    )
    keys: list[str] = Field(description="list of keys")

    def names(self) -> list[bytes]:
        """The keys as bytes.

        Raises:
            ValueError: not base64.
        """
        if self.key_type is not KeyType.BINARY:
            return [key.encode() for key in self.keys]
        try:
            return [base64.b64decode(key, validate=True) for key in self.keys]
        except binascii.Error:
            raise ValueError("expected base64 with key_type binary") from None


def _usable(resources: list[KeyResource]) -> list[KeyResource]:
    for resource in resources:
        resource.names()
    return resources


class PersistenceConfig(Section):
    """Keys that are written to disk with `durability: memory`. With other durabilities all keys are."""

    mode: PersistenceMode = Field(
        default=PersistenceMode.ALL,
        description="`all`: all keys, asynchronously; `none`: no keys; `custom`: `keys`, and keys whose "
        "SET requests it",
    )
    keys: Annotated[list[KeyResource], AfterValidator(_usable)] = Field(
        default_factory=list, description="keys that are stored in mode `custom`"
    )
    dynamic: bool = Field(default=True, description="in mode `custom`, also store keys whose SET requests it")
    property: str = Field(
        default="aio-persistence", min_length=1, description="user property of a SET that requests it"
    )
    value: str = Field(default="true", description="value of that user property")

    def as_options(self) -> KeyPersistence:
        """Settings of the store."""
        patterns = [name for r in self.keys if r.key_type is KeyType.PATTERN for name in r.names()]
        names = [name for r in self.keys if r.key_type is not KeyType.PATTERN for name in r.names()]
        return KeyPersistence(
            self.mode,
            KeySelection(tuple(patterns), tuple(names)),
            self.property if self.dynamic else "",
            self.value,
        )


class StateStoreSection(Section):
    """State store."""

    dialect: Literal["auto", "sdk", "published", "older"] = Field(
        default="auto", description="form of responses and notifications; `auto`: as the request"
    )
    max_keys: int = Field(default=MAX_KEYS, ge=0, description="maximum number of keys; 0: no limit")
    max_bytes: int = Field(
        default=MAX_BYTES, ge=0, description="maximum size of keys and values plus 260 bytes per key; 0: no limit"
    )
    principal_share: int = Field(
        default=PRINCIPAL_SHARE,
        ge=1,
        le=100,
        description="percentage of both quotas for the keys of one principal, if users are configured. "
        "All anonymous clients are one principal",
    )
    max_waiting: int = Field(
        default=100_000,
        ge=1,
        description="maximum number of requests that wait for the disk; beyond it PUBACK 0x97 (Quota exceeded)",
    )
    scan: bool = Field(default=True, description="enable SCAN, which lists keys")
    extensions: list[ExtensionName] = Field(default_factory=list, description="extensions of the protocol to enable")
    history_changes: int = Field(
        default=100_000, ge=1, description="number of changes in the history for `resume` and `as-of`"
    )
    history_bytes: int = Field(default=64 << 20, ge=1, description="size of this history in bytes")
    persistence: PersistenceConfig = Field(
        default_factory=PersistenceConfig, description="keys that are written to disk with `durability: memory`"
    )
    capture_topic: Annotated[str | None, AfterValidator(_topic)] = Field(
        default=None, description="TubeMQ topic for change capture; created if it does not exist"
    )

    def options(self, *, strict_read: bool) -> StoreOptions:
        """Options of the store."""
        return StoreOptions(
            dialect=self.dialect,
            max_keys=self.max_keys,
            max_bytes=self.max_bytes,
            principal_share=self.principal_share,
            strict_read=strict_read,
            extensions=extensions_named(self.extensions) & ~(Extension.NONE if self.scan else Extension.SCAN),
            history_changes=self.history_changes,
            history_bytes=self.history_bytes,
            persistence=self.persistence.as_options(),
            max_waiting=self.max_waiting,
        )
