from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipelines.ledger.dead_letters import (
    LetterState,
    LetterStatus,
    _corrected,
    _records,
    letter_states,
    letters,
    purge,
    redriven,
    redriven_copies,
    set_state,
    warning_of_copies,
)
from penstock.pipelines.ledger.reconcile import reconcile
from penstock.pipelines.spec.sources import FilesSource, TubeSource
from penstock.pipelines.spec.values import REDRIVE, REDRIVE_PARTS, REDRIVE_STEP
from penstock.pipelines.state_dir.layout import write_json
from penstock.pipelines.state_dir.replay import RecordPart, RedrivenCopy, ReplayRange, parse_point
from penstock.tube.record import Record
from tests.unit.pipelines.recorded_run import RecordedRun, letter


def test_letters_are_the_records_as_they_were(tmp_path: Path) -> None:
    RecordedRun(tmp_path)
    found = list(letters(tmp_path / "dead"))
    assert [(x.id, x.coordinates, x.key, x.value) for x in found] == [
        ("id-0", ("t", 1, 0, 0), b"k", b"{0"),
        ("id-1", ("t", 1, 0, 28), b"k", b"{1"),
    ]
    assert found[0].headers == [("id", b"id-0"), ("site", b"\xff")]
    assert list(letters(tmp_path / "none")) == []


def test_a_table_without_keys_is_read_too(tmp_path: Path) -> None:
    old = {name: value for name, value in letter(3).items() if name != "key"} | {"headers": None}
    RecordedRun(tmp_path).commit("dead", 2, [old])
    *_, last = letters(tmp_path / "dead")
    assert (last.id, last.key, last.headers) == ("id-3", None, [])


def test_a_letter_sent_again_keeps_its_id_and_counts(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    twice = [{"key": "event-time", "value": b"5"}, {"key": REDRIVE, "value": b"2"}]
    run.commit("dead", 2, [letter(7, headers=twice)])
    first, _, last = letters(tmp_path / "dead")
    step = (REDRIVE_STEP, b"parsed")
    sent = [each.as_record() for each in _records([first, last])]
    assert sent[0] == Record(b"{0", b"k", [("site", b"\xff"), (REDRIVE, b"1"), step], id="id-0")
    assert sent[1] == Record(b"{7", b"k", [(REDRIVE, b"3"), step], event_time_ms=5, id="id-7")


def test_redriven_dead_letters_are_recorded(tmp_path: Path) -> None:
    assert redriven(tmp_path) == set()
    write_json(tmp_path / "_redriven" / "1.json", {"places": [("t", 1, 0, 28)]})
    write_json(tmp_path / "_redriven" / "2.json", {"places": [("t", 1, 1, 0)]})
    assert redriven(tmp_path) == {("t", 1, 0, 28), ("t", 1, 1, 0)}


@pytest.mark.parametrize(
    ("begin", "end", "records"),
    [
        ("earliest", "latest", 2),
        ("2024-05-01", "2024-05-03T00:00:01Z", 2),
        ("2024-05-01", "2024-05-03", 0),
        ("2024-05-02", "latest", 0),
        ('{"t": {"1:0": 28}}', "latest", 1),
        ("earliest", '{"t": {"1:0": 28}}', 1),
    ],
)
def test_a_stretch_with_records_and_their_copies_is_told(tmp_path: Path, begin: str, end: str, records: int) -> None:
    RecordedRun(tmp_path)
    since_ms = 1_714_694_400_000  # 2024-05-03; the records are of 2024-05-01
    inputs = {"source": TubeSource(topics=["t"])}
    span = ReplayRange(parse_point(begin, "--from"), parse_point(end, "--to"))
    dead = tmp_path / "dead"
    assert warning_of_copies(dead, inputs, span) is None
    note = {"places": [("t", 1, 0, 0), ("t", 1, 0, 28)], "since_ms": since_ms}
    write_json(dead / "_redriven" / "1714694401000000000.json", note)
    told = warning_of_copies(dead, inputs, span)
    assert (told or "0").split()[0] == str(records)
    assert (told is None) == (records == 0)
    if told is not None:
        assert "replay --to 2024-05-03T00:00:00.000+00:00 or earlier" in told
    assert warning_of_copies(dead, {"source": FilesSource(format="files", path="in")}, span) is None


def test_the_last_change_of_a_letter_is_its_state(tmp_path: Path) -> None:
    RecordedRun(tmp_path)
    dead = tmp_path / "dead"
    first, second = letters(dead)
    assert letter_states(dead) == {}
    set_state(dead, [first], LetterState.CORRECTED, b'{"x": 1}')
    set_state(dead, [first, second], LetterState.DISCARDED)
    set_state(dead, [first], LetterState.CORRECTED, b'{"x": 2}')
    assert letter_states(dead) == {
        first.place: LetterStatus(LetterState.CORRECTED, b'{"x": 2}'),
        second.place: LetterStatus(LetterState.DISCARDED),
    }
    assert _corrected(first, letter_states(dead)).value == b'{"x": 2}'
    set_state(dead, [second], LetterState.OPEN)
    assert second.place not in letter_states(dead)
    # Redriven with the corrected payload, with which it would be redriven again.
    write_json(dead / "_redriven" / f"{10**20}.json", {"places": [first.coordinates], "copies": [["t", 1, 0, 560]]})
    assert letter_states(dead) == {first.place: LetterStatus(LetterState.REDRIVEN, b'{"x": 2}')}
    assert redriven_copies(dead) == {first.place: RedrivenCopy(("t", 1, 0, 560))}


def test_copies_that_a_replay_can_tell_are_not_warned_of(tmp_path: Path) -> None:
    RecordedRun(tmp_path)
    dead, span = tmp_path / "dead", ReplayRange("earliest", "latest")
    inputs = {"source": TubeSource(topics=["t"])}
    places = [("t", 1, 0, 0), ("t", 1, 0, 28)]
    note = {"places": places, "copies": [["t", 1, 0, 560], None], "since_ms": 1_714_694_400_000}
    write_json(dead / "_redriven" / "1714694401000000000.json", note)
    assert (warning_of_copies(dead, inputs, span) or "").startswith("1 record in this range")
    note["copies"] = [["t", 1, 0, 560], ["t", 1, 0, 588]]
    write_json(dead / "_redriven" / "1714694401000000000.json", note)
    assert warning_of_copies(dead, inputs, span) is None


def test_purged_letters_are_gone_and_accounted_for(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 1, [letter(1), letter(2, step="sink:rows")])
    run.change(1, dead=2, letters=2, duplicates=-1)
    first, second, third = letters(tmp_path / "dead")
    assert purge(tmp_path / "dead", [first, second]) == 2
    assert list(letters(tmp_path / "dead")) == [third]
    assert purge(tmp_path / "dead", [first, second]) == 0
    (account,) = reconcile(run.pipeline, run.state, lambda *_: 0)
    assert not [text for text in account.off if "dead letters" in text or "were committed" in text]


def test_parts_of_a_record_have_states_of_their_own_and_are_sent_together(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    dead = tmp_path / "dead"
    again = [{"key": REDRIVE_PARTS, "value": b"0"}, {"key": REDRIVE, "value": b"1"}]
    parts = [("1", "judged"), ("2.0", "judged"), ("3", "sink:rows")]
    run.commit(
        "dead", 2, [letter(7, headers=again) | {"part": part, "step": step, "key": b"k"} for part, step in parts]
    )
    *_, first, second, third = letters(dead)
    assert first.place == RecordPart(("t", 1, 0, 7 * 28), "1")
    sent = _records([first, second, third])
    # One record for both parts of one step: a dedupe would drop the second of two with one id.
    assert [dict(each.headers) for each in sent] == [
        {REDRIVE: b"2", REDRIVE_STEP: b"judged", REDRIVE_PARTS: b"1,2.0"},
        {REDRIVE: b"2", REDRIVE_STEP: b"sink:rows", REDRIVE_PARTS: b"3"},
    ]
    assert [each.places for each in sent] == [(first.place, second.place), (third.place,)]
    set_state(dead, [second], LetterState.CORRECTED, b"{}")
    assert letter_states(dead) == {second.place: LetterStatus(LetterState.CORRECTED, b"{}")}
    corrected = [_corrected(each, letter_states(dead)) for each in (first, second)]
    assert [each.letter.value for each in _records(corrected)] == [first.value, b"{}"]
    places = [["t", 1, 0, 7 * 28, "1"], ["t", 1, 0, 7 * 28, "2.0"]]
    note = {"places": places, "copies": [["t", 1, 0, 560]] * 2, "steps": ["judged"] * 2}
    write_json(dead / "_redriven" / f"{10**20}.json", note)
    copy = RedrivenCopy(("t", 1, 0, 560), "judged")
    assert redriven_copies(dead) == {first.place: copy, second.place: copy}
    assert redriven(dead) == {first.coordinates}
    assert letter_states(dead).keys() == {first.place, second.place}
    assert purge(dead, [first]) == 1
    assert [each.part for each in letters(dead)] == [None, None, "2.0", "3"]


@pytest.mark.parametrize(
    ("before", "failed", "redriven"),
    [
        (b"1,2.0", None, b"1,2.0"),
        (b"1,2.0", "2", b"2.0"),
        (b"1,2.0", "2.0", b"2.0"),
        (b"1,20.0", "2", b"2"),
        (b"1", "1.3", b"1.3"),
        (None, "2", b"2"),
        (None, None, None),
    ],
)
def test_a_part_that_fails_again_makes_no_other_rows(
    tmp_path: Path, before: bytes | None, failed: str | None, redriven: bytes | None
) -> None:
    """Also if it fails before the explode step that makes it: the other parts have been written."""
    run = RecordedRun(tmp_path)
    headers = [] if before is None else [{"key": REDRIVE_PARTS, "value": before}]
    run.commit("dead", 2, [letter(7, headers=headers) | {"part": failed}])
    (sent,) = _records([list(letters(tmp_path / "dead"))[-1]])
    assert dict(sent.headers).get(REDRIVE_PARTS) == redriven
