"""The token file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.security.tokens import load_tokens, parse_tokens, token_of

DIGEST = hashlib.sha256(b"secret-1").hexdigest()


def test_a_token_stands_for_its_user(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(f"tokens:\n  - {{sha256: {DIGEST}, user: press, groups: [g], attributes: {{site: berlin}}}}\n")
    table = load_tokens(path)
    token = token_of(table, b"secret-1\n")
    assert token is not None
    assert (token.user, token.groups, dict(token.attributes)) == ("press", frozenset("g"), {"site": "berlin"})
    assert token_of(table, b"secret-2") is None
    assert token_of(table, b"") is None
    assert token_of(table, b"secret-1" + b" " * 20_000) is None
    assert token_of({}, b"secret-1") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tokens: [{sha256: abc, user: a}]", "sha256"),
        (f"tokens: [{{sha256: {DIGEST}}}]", "user"),
        (f"tokens: [{{sha256: {DIGEST}, user: a}}, {{sha256: {DIGEST}, user: b}}]", "twice"),
        ("token: []", "did you mean 'tokens'"),
    ],
)
def test_files_that_cannot_be_used(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_tokens(text)


def test_a_token_in_place_of_its_digest_is_not_shown() -> None:
    """`/readyz` and the log have the error of a reload."""
    with pytest.raises(ConfigError) as raised:
        parse_tokens("tokens: [{sha256: my-secret-token, user: a}]")
    assert "a value that is not shown" in str(raised.value)
    assert "my-secret-token" not in str(raised.value)


def test_an_empty_file_accepts_no_token() -> None:
    assert token_of(parse_tokens(""), b"x") is None
