"""The rules accept what a correct store may answer, and nothing else."""

from __future__ import annotations

import pytest

from penstock.statestore.hlc import Hlc
from tests.simulation.history import DEL, GET, SET, History, Operation, Violation

OK = b"+OK\r\n"
NOTHING = b"$-1\r\n"


def version(ms: int) -> Hlc:
    return Hlc(ms, 0, "store")


def sent(history: History, now_ms: int, kind: str, value: bytes = b"", *, px: int = 0, key: bytes = b"k") -> Operation:
    operation = Operation(kind, key, value, px)
    history.sent(operation, now_ms)
    return operation


def history_with_a() -> History:
    history = History()
    history.answer(sent(history, 1, SET, b"a"), OK, version(2), 3)
    return history


def test_an_acknowledged_set_is_read_until_a_deletion_may_have_begun() -> None:
    history = history_with_a()
    history.answer(sent(history, 4, GET), b"$1\r\na\r\n", version(2), 5)
    with pytest.raises(Violation, match="found nothing"):
        history.answer(sent(history, 6, GET), NOTHING, None, 7)
    sent(history, 8, DEL)  # its answer is lost: it was carried out, or not
    history.answer(sent(history, 9, GET), NOTHING, None, 10)
    history.answer(sent(history, 11, GET), b"$1\r\na\r\n", version(2), 12)


def test_a_deletion_that_ended_before_the_set_began_removed_nothing() -> None:
    history = History()
    history.answer(sent(history, 1, DEL), b":1\r\n", None, 2)
    history.answer(sent(history, 3, SET, b"a"), OK, version(4), 5)
    with pytest.raises(Violation, match="found nothing"):
        history.answer(sent(history, 6, GET), NOTHING, None, 7)


def test_a_read_that_began_before_the_answer_may_miss_it() -> None:
    history = History()
    write, read = sent(history, 1, SET, b"a"), sent(history, 1, GET)
    history.answer(write, OK, version(2), 3)
    history.answer(read, NOTHING, None, 4)


def test_an_older_value_is_not_read_again() -> None:
    history = history_with_a()
    history.answer(sent(history, 4, SET, b"b"), OK, version(5), 6)
    with pytest.raises(Violation, match="sent after"):
        history.answer(sent(history, 7, GET), b"$1\r\na\r\n", version(2), 8)


def test_versions_rise_over_all_keys_and_belong_to_one_value() -> None:
    history = history_with_a()
    concurrent = sent(history, 3, SET, b"c", key=b"other")
    with pytest.raises(Violation, match="got version"):
        history.answer(sent(history, 4, SET, b"b", key=b"other"), OK, version(2), 5)
    concurrent.newest = None
    with pytest.raises(Violation, match="is the version of"):
        history.answer(concurrent, OK, version(2), 6)
    with pytest.raises(Violation, match="and now"):
        history.answer(sent(history, 7, GET), b"$1\r\na\r\n", version(9), 8)
    with pytest.raises(Violation, match="nobody wrote"):
        history.answer(sent(history, 9, GET), b"$1\r\nx\r\n", version(9), 10)


def test_a_key_expires_when_its_time_has_passed() -> None:
    history = History()
    history.answer(sent(history, 1, SET, b"a", px=10), OK, version(2), 3)
    with pytest.raises(Violation, match="found nothing"):
        history.answer(sent(history, 4, GET), NOTHING, None, 10)
    history.answer(sent(history, 5, GET), NOTHING, None, 11)


def test_notifications_come_in_the_order_of_versions_and_show_what_is_durable() -> None:
    history = History()
    sent(history, 1, SET, b"a")
    history.notification(b"k", b"a", version(2), None, 3)
    with pytest.raises(Violation, match="after"):
        history.notification(b"k", b"a", version(2), version(2), 3)
    with pytest.raises(Violation, match="found nothing"):
        history.answer(sent(history, 4, GET), NOTHING, None, 5)


def test_events_are_part_of_the_trace() -> None:
    assert history_with_a().trace == history_with_a().trace != History().trace
