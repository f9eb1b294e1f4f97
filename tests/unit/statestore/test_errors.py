"""Refusals as typed errors: every text of the table, the unknown ones, and statuses."""

from __future__ import annotations

import pytest

from penstock.errors import RefusedError
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.errors import (
    ClockSkewError,
    FencingError,
    InvalidRequestError,
    NotAuthorizedError,
    QuotaExceededError,
    RequestStatusError,
    StateStoreError,
    UnknownStoreError,
    as_text,
    refusal,
    status_refusal,
)
from penstock.statestore.hlc import Hlc

TOKEN = Hlc(1, 2, "n")


@pytest.mark.parametrize("error", StoreError)
def test_every_text_of_the_table_has_a_type_and_a_remedy(error: StoreError) -> None:
    refused = refusal("SET", b"k", error.value)
    assert isinstance(refused, StateStoreError)
    assert isinstance(refused, RefusedError)
    assert not isinstance(refused, UnknownStoreError)
    assert (refused.error, refused.text, refused.key) == (error, error.value, b"k")
    assert refused.hint
    assert str(refused).startswith(f"state store refused SET 'k': {error.value}\n")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StoreError.TIMESTAMP_TOO_FAR_AHEAD, ClockSkewError),
        (StoreError.FENCE_TOO_FAR_AHEAD, ClockSkewError),
        (StoreError.FENCE_LOWER, FencingError),
        (StoreError.FENCE_REQUIRED, FencingError),
        (StoreError.NOT_AUTHORIZED, NotAuthorizedError),
        (StoreError.QUOTA, QuotaExceededError),
        (StoreError.UNKNOWN_COMMAND, InvalidRequestError),
    ],
)
def test_the_type_says_what_can_be_done(error: StoreError, kind: type[StateStoreError]) -> None:
    assert type(refusal("SET", b"k", error.value)) is kind


def test_a_missing_permission_is_named() -> None:
    end = "on 'k' to this client in the policy file of the server, then SIGHUP"
    text = StoreError.NOT_AUTHORIZED.value
    assert refusal("KEYNOTIFY", b"k", text).hint == f"grant Read {end}"
    assert refusal("DEL", b"k", text).hint == f"grant Write (with security.strict_read also Read) {end}"
    assert (refusal("BATCH", b"k", text).hint or "").startswith("grant Read or Write on the key")


def test_the_published_spelling_of_the_lower_token_is_known() -> None:
    text = "the request fencing token is a lower version that the fencing token protecting the resource"
    refused = refusal("DEL", b"k", text, token=TOKEN)
    assert isinstance(refused, FencingError)
    assert (refused.error, refused.text, refused.token) == (StoreError.FENCE_LOWER, text, TOKEN)
    assert refused.why == "the token was 1:2:n"


def test_an_unknown_text_is_an_error_that_carries_it() -> None:
    refused = refusal("SET", b"\xff", "the moon is full")
    assert type(refused) is UnknownStoreError
    assert (refused.text, refused.error) == ("the moon is full", None)
    assert refused.what == "state store refused SET '\\\\xff': the moon is full"


def test_a_clock_that_is_ahead_carries_by_how_much() -> None:
    refused = refusal("SET", b"k", StoreError.TIMESTAMP_TOO_FAR_AHEAD.value, why="because", skew_ms=90_000)
    assert isinstance(refused, ClockSkewError)
    assert (refused.skew_ms, refused.why) == (90_000, "because")


@pytest.mark.parametrize(
    ("status", "message", "field", "code", "what"),
    [
        ("505", "too new", None, 505, "state store refused GET 'k': too new"),
        ("400", "missing", "Correlation Data", 400, "state store refused GET 'k': missing"),
        ("500", None, None, 500, "state store refused GET 'k': status 500"),
        ("x", None, None, 0, "state store refused GET 'k': status x"),
        (None, None, None, 0, "state store: the response to GET 'k' has no status"),
    ],
)
def test_statuses(status: str | None, message: str | None, field: str | None, code: int, what: str) -> None:
    refused = status_refusal("GET", b"k", status, message, field)
    assert isinstance(refused, RequestStatusError)
    assert (refused.code, refused.what) == (code, what)
    assert refused.why == ("invalid property: 'Correlation Data'" if field else refused.why)


def test_keys_are_quoted_in_messages() -> None:
    assert as_text(b"a'b") == '"a\'b"'
    assert as_text("é\n".encode()) == "'é\\n'"
