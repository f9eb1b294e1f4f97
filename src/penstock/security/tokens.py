"""The token file: bearer tokens for enhanced authentication, and whom each stands for.

A client names the method in CONNECT (``K8S-SAT`` is what the SDKs of Azure IoT Operations use) and sends the token as
authentication data. The file holds only the SHA-256 of each: tokens are long and random, so that is as good as a slow
hash, and a copy of the file lets nobody in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from penstock.runtime.config.loader import load, parse

__all__ = ["METHOD", "Token", "TokenEntry", "TokenFile", "load_tokens", "parse_tokens", "token_digest", "token_of"]

METHOD: Final = "K8S-SAT"
LONGEST_TOKEN: Final = 16 * 1024
"""Bytes; Kubernetes' are about one thousand."""


class Token(NamedTuple):
    """Whom a token stands for."""

    user: str
    groups: frozenset[str]
    attributes: Mapping[str, str]


class TokenEntry(BaseModel):
    """One token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] = Field(
        description="SHA-256 of the token in hexadecimal digits, as `sha256sum` prints it"
    )
    user: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(description="whom it stands for")
    groups: list[str] = Field(default_factory=list, description="groups of whoever has it")
    attributes: dict[str, str] = Field(default_factory=dict, description="attributes of whoever has it")


class TokenFile(BaseModel):
    """A token file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: list[TokenEntry] = Field(default_factory=list, description="the tokens that are accepted")

    @model_validator(mode="after")
    def _once(self) -> TokenFile:
        if len({entry.sha256 for entry in self.tokens}) < len(self.tokens):
            raise ValueError("a token stands there twice: it can only be one user's")
        return self

    def table(self) -> dict[bytes, Token]:
        """Digest to whom it stands for."""
        return {
            bytes.fromhex(entry.sha256): Token(entry.user, frozenset(entry.groups), dict(entry.attributes))
            for entry in self.tokens
        }


def load_tokens(path: Path) -> dict[bytes, Token]:
    """Read the token file at ``path``.

    Raises:
        ConfigError: it cannot be read or used; file, line and column are named.
    """
    return load(path, TokenFile).table()


def parse_tokens(text: str, name: str = "tokens") -> dict[bytes, Token]:
    """As :func:`load_tokens`, from text that is already in memory."""
    return parse(text, TokenFile, name=name).table()


def token_digest(data: bytes) -> bytes:
    """By what a token stands in the table. Blanks and line ends around it are those of the file it came from."""
    return hashlib.sha256(data.strip()).digest()


def token_of(table: Mapping[bytes, Token], data: bytes) -> Token | None:
    """Whom the token that a client sent stands for.

    Looked up by digest, so the time it takes says nothing about the tokens that there are.
    """
    return table.get(token_digest(data)) if len(data) <= LONGEST_TOKEN else None
