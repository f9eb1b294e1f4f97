"""What a topic can be after changes whose outcome is known or not."""

from __future__ import annotations

import pytest

from tests.simulation.history import Violation
from tests.simulation.http_client import Change, TopicRegister, TopicState

SMALL, LARGE = TopicState(1, "delete,24h"), TopicState(4, "delete,24h")
ADD: Change = ("add", SMALL)
GROW: Change = ("grow", LARGE)


def test_an_answered_change_is_seen() -> None:
    register = TopicRegister()
    register.seen(None)
    register.changed(GROW, 401)
    register.changed(ADD, 200)
    register.seen(SMALL)
    register.changed(ADD, 402)
    register.changed(GROW, 200)
    register.changed(GROW, 201)
    register.changed(("grow", SMALL), 407)
    register.power_lost()
    with pytest.raises(Violation, match="it was seen as None; it can only be TopicState"):
        register.seen(None)


def test_a_refusal_without_a_reason_is_found() -> None:
    register = TopicRegister()
    with pytest.raises(Violation, match="answered with 402; it can only be None"):
        register.changed(ADD, 402)


def test_an_unanswered_change_may_be_carried_out_later_but_once() -> None:
    register = TopicRegister()
    register.unknown(ADD)
    register.seen(None)
    register.changed(ADD, 402)  # the first one is being stored
    register.seen(SMALL)
    register.unknown(GROW)
    register.seen(SMALL)
    register.seen(LARGE)
    with pytest.raises(Violation):
        register.seen(SMALL)


def test_a_change_that_was_not_carried_out_before_a_power_loss_never_is() -> None:
    register = TopicRegister()
    register.unknown(ADD)
    register.power_lost()
    register.seen(None)
    with pytest.raises(Violation):
        register.seen(SMALL)
