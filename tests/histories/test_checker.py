"""The checkers accept histories that a correct server can have, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.histories import mqtt, tube
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
