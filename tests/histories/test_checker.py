"""The checkers accept histories that a correct server can have, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.statestore.hlc import Hlc
from tests.histories import lock_load, mqtt, tube
from tests.histories.lock_load import Held, Written
from tests.histories.porcupine import check
from tests.simulation.history import Violation

VECTORS = Path(__file__).parents[1] / "vectors" / "histories"


def histories(kind: str, *, legal: bool) -> pytest.MarkDecorator:
    """The legal or the doctored histories of one kind, as parameters."""
    paths = [path for path in sorted((VECTORS / kind).glob("*.jsonl")) if path.stem.startswith("ok-") == legal]
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


# What an answer was, or for versions over all keys another message.
REFUSALS = {
    "version-falls-over-keys": "the version does not rise",
    "one-version-twice": "two writes have one version",
}


@histories("statestore", legal=True)
def test_legal_histories_of_the_state_store_are_accepted(path: Path) -> None:
    assert check(path).startswith("ok ")


@histories("statestore", legal=False)
def test_doctored_histories_of_the_state_store_are_refused(path: Path, tmp_path: Path) -> None:
    refusal = REFUSALS.get(path.stem, "no order of the operations on key")
    with pytest.raises(AssertionError, match=refusal):
        check(path, tmp_path)
    assert (tmp_path / "history.html").exists() == (path.stem not in REFUSALS)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "unexpected end"),
        ('{"client": 0, "words": ["SET", "k"], "call": 1}', "SET without a value"),
        ('{"client": 0, "words": ["SCAN", "*"], "call": 1}', 'verb "SCAN"'),
        ('{"client": 0, "words": ["GET", "k"], "call": 2, "return": 1, "answer": "$-1"}', "a time after the call"),
    ],
)
def test_unreadable_histories_are_refused(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(AssertionError, match=problem):
        check(path)


def test_requests_without_an_answer_do_not_prevent_a_decision() -> None:
    """If each of them may have taken effect, there are so many orders that it takes ten seconds."""
    line = check(VECTORS / "statestore" / "ok-many-unanswered-writes.jsonl")
    assert float(line.rpartition("seconds=")[2]) < 3


@histories("mqtt", legal=True)
def test_legal_histories_of_mqtt_are_accepted(path: Path) -> None:
    assert mqtt.check(path).startswith("ok ")


@histories("mqtt", legal=False)
def test_doctored_histories_of_mqtt_are_refused(path: Path) -> None:
    with pytest.raises(Violation):
        mqtt.check(path)


@histories("tubemq", legal=True)
def test_legal_histories_of_tubemq_are_accepted(path: Path) -> None:
    assert tube.check(path).startswith("ok ")


@histories("tubemq", legal=False)
def test_doctored_histories_of_tubemq_are_refused(path: Path) -> None:
    with pytest.raises(Violation):
        tube.check(path, "r")


def test_histories_of_locks_with_two_holders_or_a_late_write_are_refused() -> None:
    first, second = Hlc(1, 0, "s"), Hlc(2, 0, "s")
    held = [Held(3.0, 4.0, second), Held(1.0, 2.0, first)]
    written = [Written(Hlc(4, 0, "s"), second), Written(Hlc(3, 0, "s"), first)]
    assert lock_load.check(held, written) == "ok held=2 written=2"
    with pytest.raises(Violation, match="two holders at the same time"):
        lock_load.check([held[0], Held(1.0, 3.5, first)], written)
    with pytest.raises(Violation, match="the token of a later holder is not greater"):
        lock_load.check([held[0], Held(1.0, 2.0, second)], written)
    with pytest.raises(Violation, match="was accepted after"):
        lock_load.check(held, [*written, Written(Hlc(5, 0, "s"), first)])
