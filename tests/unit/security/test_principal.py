"""Ownership of a session."""

from __future__ import annotations

import pytest

from penstock.security.policy import Principal


@pytest.mark.parametrize(
    ("principal", "name"),
    [
        (Principal("c"), "anonymous"),
        (Principal("c", user="a"), "user:a"),
        (Principal("c", certificate="a"), "certificate:a"),
        (Principal("c", user="a", certificate="b"), "user:a"),
    ],
)
def test_names_of_different_kinds_differ(principal: Principal, name: str) -> None:
    assert principal.name == name
    assert repr(principal) == f"<Principal {name!r} as 'c'>"
