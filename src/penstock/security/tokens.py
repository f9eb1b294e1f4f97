"""The token file: bearer tokens for enhanced authentication, and their users.

A client sends the method in CONNECT (``K8S-SAT`` is used by the SDKs of Azure IoT Operations) and the token as
authentication data. The file has only the SHA-256 of each token: tokens are long and random, so a fast hash is
sufficient, and a copy of the file permits no access.
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
"""Longest token in bytes; tokens of Kubernetes have about one thousand."""


class Token(NamedTuple):
    """User, groups and attributes of a token."""

    user: str
    groups: frozenset[str]
    attributes: Mapping[str, str]


class TokenEntry(BaseModel):
    """One token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] = Field(
        description="SHA-256 of the token in hexadecimal digits, as `sha256sum` prints it"
    )
    user: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(description="user of the token")
    groups: list[str] = Field(default_factory=list, description="groups of the user")
    attributes: dict[str, str] = Field(default_factory=dict, description="attributes of the user")


class TokenFile(BaseModel):
    """A token file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: list[TokenEntry] = Field(default_factory=list, description="the tokens that are accepted")

    @model_validator(mode="after")
    def _once(self) -> TokenFile:
        if len({entry.sha256 for entry in self.tokens}) < len(self.tokens):
            raise ValueError("a token is listed twice: it can have one user only")
        return self

    def table(self) -> dict[bytes, Token]:
        """Tokens by digest."""
        return {
            bytes.fromhex(entry.sha256): Token(entry.user, frozenset(entry.groups), dict(entry.attributes))
            for entry in self.tokens
        }


def load_tokens(path: Path) -> dict[bytes, Token]:
    """Read the token file at ``path``.

    Raises:
        ConfigError: it is invalid; the error has file, line and column.
    """
    return load(path, TokenFile).table()


def parse_tokens(text: str) -> dict[bytes, Token]:
    """Parse a token file that is already in memory."""
    return parse(text, TokenFile, name="tokens").table()


def token_digest(data: bytes) -> bytes:
    """Digest of a token, by which it is looked up. Surrounding blanks and line ends are ignored."""
    return hashlib.sha256(data.strip()).digest()


def token_of(table: Mapping[bytes, Token], data: bytes) -> Token | None:
    """Look up the token of a client.

    The lookup by digest takes the same time for every token.
    """
    return table.get(token_digest(data)) if len(data) <= LONGEST_TOKEN else None
