"""The rules of TubeMQ accept a confirmation whose answer was lost, and nothing that was skipped."""

from __future__ import annotations

import pytest

from tests.histories.tube import TubeHistory
from tests.simulation.history import Violation


def history_of_three_messages() -> TubeHistory:
    history = TubeHistory()
    for number in range(3):
        history.send("p", number, "log:0")
        history.acknowledge("p", number, "log:0", number * 28)
    history.read("group", "log:0", 0, "p", 0)
    return history


def test_a_reader_may_continue_after_a_confirmation_whose_answer_was_lost() -> None:
    history = history_of_three_messages()
    history.confirm("group", "log:0", asked=True)
    history.resume("group", "log:0")
    history.read("group", "log:0", 28, "p", 1)
    history.check_end()


def test_a_reader_may_get_messages_again_whose_confirmation_was_lost() -> None:
    history = history_of_three_messages()
    history.confirm("group", "log:0", asked=True)
    history.resume("group", "log:0")
    history.read("group", "log:0", 0, "p", 0)
    history.check_end()


def test_a_reader_must_not_skip_a_message() -> None:
    history = history_of_three_messages()
    history.confirm("group", "log:0", asked=True)
    history.resume("group", "log:0")
    history.read("group", "log:0", 56, "p", 2)
    with pytest.raises(Violation, match="without offset 28"):
        history.check_end()


def test_a_reader_must_not_go_back_behind_what_was_confirmed() -> None:
    history = history_of_three_messages()
    history.confirm("group", "log:0")
    history.resume("group", "log:0")
    with pytest.raises(Violation, match="after offset 0"):
        history.read("group", "log:0", 0, "p", 0)


def test_a_confirmation_may_be_answered_after_another_member_has_resumed() -> None:
    history = history_of_three_messages()
    history.confirm("group", "log:0", 0, asked=True)
    history.resume("group", "log:0")
    history.confirm("group", "log:0", 0)
    history.read("group", "log:0", 28, "p", 1)
    history.check_end()


def test_a_confirmation_answered_late_does_not_confirm_what_another_member_has_read() -> None:
    history = history_of_three_messages()
    history.confirm("group", "log:0", 0, asked=True)
    history.resume("group", "log:0")
    history.read("group", "log:0", 28, "p", 1)
    history.confirm("group", "log:0", 28, asked=True)
    history.confirm("group", "log:0", 0)
    history.resume("group", "log:0")
    history.read("group", "log:0", 28, "p", 1)
    history.resume("group", "log:0")
    history.read("group", "log:0", 56, "p", 2)  # the second confirmation may have been stored
    history.check_end()
