from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.errors import ConfigError, DataLossError
from penstock.pipelines.ledger import dead_letters
from penstock.pipelines.ledger.dead_letters import (
    DeadLetter,
    _check_parts,
    _check_steps,
    _corrected,
    _records,
    failed_again,
    letters,
    of_same_records,
    purge,
    redrive,
    redriven,
    redriven_copies,
    warning_of_copies,
)
from penstock.pipelines.ledger.letter_states import (
    LetterState,
    LetterStatus,
    letter_states,
    places_as_json,
    set_state,
    status_of,
)
from penstock.pipelines.ledger.reconcile import reconcile
from penstock.pipelines.spec.pipeline import steps_after
from penstock.pipelines.spec.sources import FilesSource, TubeSource
from penstock.pipelines.spec.values import REDRIVE, REDRIVE_ID, REDRIVE_PARTS, REDRIVE_STEP
from penstock.pipelines.state_dir.layout import read_json, write_json
from penstock.pipelines.state_dir.replay import RecordPart, RedrivenCopy, ReplayRange, parse_point
from penstock.runtime.kafka.client import KafkaTopic
from penstock.spark.files.object_storage import storage_path
from penstock.spark.kafka.writes import AppendedRecord
from penstock.tube.record import Record
from tests.unit.pipelines.files import FILE, parse
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
    sent = [each.as_record() for each in _records([first, last], {})]
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
    assert {status_of(letter_states(dead), each).state for each in (first, second)} == {LetterState.OPEN}
    set_state(dead, [first], LetterState.CORRECTED, b'{"x": 1}')
    set_state(dead, [first, second], LetterState.DISCARDED)
    set_state(dead, [first], LetterState.CORRECTED, b'{"x": 2}')
    assert status_of(letter_states(dead), first) == LetterStatus(LetterState.CORRECTED, b'{"x": 2}')
    assert status_of(letter_states(dead), second) == LetterStatus(LetterState.DISCARDED)
    assert _corrected(first, letter_states(dead)).value == b'{"x": 2}'
    set_state(dead, [second], LetterState.OPEN)
    assert status_of(letter_states(dead), second) == LetterStatus(LetterState.OPEN)
    # Redriven with the corrected payload, with which it would be redriven again.
    write_json(dead / "_redriven" / f"{10**20}.json", {"places": [first.coordinates], "copies": [["t", 1, 0, 560]]})
    assert status_of(letter_states(dead), first) == LetterStatus(LetterState.REDRIVEN, b'{"x": 2}')
    assert status_of(letter_states(dead), second) == LetterStatus(LetterState.OPEN)
    assert redriven_copies(dead) == {RecordPart(first.coordinates): RedrivenCopy(("t", 1, 0, 560))}


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
    again = [{"key": REDRIVE_PARTS, "value": b"each.0"}, {"key": REDRIVE, "value": b"1"}]
    parts = [("each.1", "judged"), ("each.2.inner.0", "judged"), ("each.3", "sink:rows")]
    run.commit(
        "dead", 2, [letter(7, headers=again) | {"part": part, "step": step, "key": b"k"} for part, step in parts]
    )
    *_, first, second, third = letters(dead)
    assert first.place == RecordPart(("t", 1, 0, 7 * 28), "each.1", "source", 1_714_521_600_000_000)
    sent = _records([first, second, third], {})
    # One record for both parts of one step: a dedupe would drop the second of two with one id.
    assert [dict(each.headers) for each in sent] == [
        {REDRIVE: b"2", REDRIVE_STEP: b"judged", REDRIVE_PARTS: b"each.1,each.2.inner.0"},
        {REDRIVE: b"2", REDRIVE_STEP: b"sink:rows", REDRIVE_PARTS: b"each.3"},
    ]
    assert [each.places for each in sent] == [(first.place, second.place), (third.place,)]
    set_state(dead, [second], LetterState.CORRECTED, b"{}")
    states = letter_states(dead)
    assert [status_of(states, each) for each in (first, second, third)] == [
        LetterStatus(LetterState.OPEN),
        LetterStatus(LetterState.CORRECTED, b"{}"),
        LetterStatus(LetterState.OPEN),
    ]
    corrected = [_corrected(each, letter_states(dead)) for each in (first, second)]
    assert [each.letter.value for each in _records(corrected, {})] == [first.value, b"{}"]
    places = [["t", 1, 0, 7 * 28, "each.1"], ["t", 1, 0, 7 * 28, "each.2.inner.0"]]
    note = {
        "places": places,
        "sources": ["source"] * 2,
        "times_us": [1_714_521_600_000_000] * 2,
        "copies": [["t", 1, 0, 560]] * 2,
        "steps": ["judged"] * 2,
    }
    write_json(dead / "_redriven" / f"{10**20}.json", note)
    copy = RedrivenCopy(("t", 1, 0, 560), "judged")
    assert redriven_copies(dead) == {first.place: copy, second.place: copy}
    assert redriven(dead) == {first.coordinates}
    states = letter_states(dead)
    assert [status_of(states, each).state for each in (first, second, third)] == [
        LetterState.REDRIVEN,
        LetterState.REDRIVEN,
        LetterState.OPEN,
    ]
    assert purge(dead, [first]) == 1
    assert [each.part for each in letters(dead)] == [None, None, "each.2.inner.0", "each.3"]


@pytest.mark.parametrize(
    ("before", "failed", "redriven"),
    [
        (b"a.1,a.2.b.0", None, b"a.1,a.2.b.0"),
        (b"a.1,a.2.b.0", "a.2", b"a.2.b.0"),
        (b"a.1,a.2.b.0", "a.2.b.0", b"a.2.b.0"),
        (b"a.1,a.20.b.0", "a.2", b"a.2"),
        (b"a.1", "a.1.b.3", b"a.1.b.3"),
        (None, "a.2", b"a.2"),
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
    (sent,) = _records([list(letters(tmp_path / "dead"))[-1]], {})
    assert dict(sent.headers).get(REDRIVE_PARTS) == redriven


BRANCHES = """\
name: plain
source: {topics: [t]}
steps:
  - {name: parsed, parse: {schema: "a ARRAY<STRING>, b ARRAY<STRING>"}}
  - {name: first, from: parsed, explode: {column: a}}
  - {name: one, map: {compute: {a: CAST(a AS INT)}}}
  - {name: second, from: parsed, explode: {column: b}}
  - {name: two, map: {compute: {b: CAST(b AS INT)}}}
sinks:
  - {name: ones, from: one, statestore: {entries: [{key: "{a}", value: [a]}]}}
  - {name: twos, from: two, statestore: {entries: [{key: "{b}", value: [b]}]}}
"""


def test_steps_after_a_step_are_those_of_its_queries() -> None:
    ones, twos = {"first", "one", "sink:ones"}, {"second", "two", "sink:twos"}
    assert steps_after(parse(BRANCHES)) == {
        "source": {"parsed"} | ones | twos,
        "parsed": ones | twos,
        "first": ones - {"first"},
        "one": {"sink:ones"},
        "second": twos - {"second"},
        "two": {"sink:twos"},
    }


def test_a_record_that_several_steps_rejected_is_sent_once(tmp_path: Path) -> None:
    """With two copies each sink would write both, and a dedupe would drop the second one."""
    run = RecordedRun(tmp_path)
    rejected = [
        (None, "sink:ones"),
        (None, "sink:twos"),
        ("first.0", "one"),
        ("first.0", "sink:ones"),
        ("first.1", "one"),
    ]
    run.commit("dead", 2, [letter(7, step=step) | {"part": part} for part, step in rejected])
    sent = [dict(each.headers) for each in _records(list(letters(tmp_path / "dead"))[2:], {})]
    assert [(each[REDRIVE_STEP], each.get(REDRIVE_PARTS)) for each in sent] == [
        (b"sink:ones,sink:twos", None),
        (b"one,sink:ones", b"first.0"),
        (b"one", b"first.1"),
    ]


@pytest.mark.parametrize(
    ("step", "steps"),
    [("parsed", b"parsed,one,two"), ("first", b"first,one"), ("one", b"one"), ("sink:twos", b"sink:twos")],
)
def test_a_record_that_fails_earlier_than_before_is_still_awaited_by_the_steps_that_rejected_it(
    tmp_path: Path, step: str, steps: bytes
) -> None:
    """Otherwise the dedupes before these steps would drop it as a duplicate."""
    after = steps_after(parse(BRANCHES))
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(7, step=step, headers=[{"key": REDRIVE_STEP, "value": b"one,two"}])])
    (sent,) = _records([list(letters(tmp_path / "dead"))[-1]], after)
    assert dict(sent.headers)[REDRIVE_STEP] == steps


ONCE = """\
name: plain
source: {topics: [t]}
steps:
  - {name: parsed, parse: {schema: a STRING}}
  - {name: once, dedupe: {within: 1 day}}
  - {name: judged, filter: a > 1}
sinks: [{name: rows, table: {path: rows}}]
"""


@pytest.mark.parametrize(
    ("step", "code", "text", "is_refused"),
    [
        ("checked", "expression.failed", ONCE, True),
        ("checked", "expression.failed", ONCE.replace("dedupe: {within: 1 day}", "map: {compute: {b: a}}"), False),
        ("judged", "expression.failed", ONCE, False),
        ("read", "parse.not_json", ONCE, False),
        ("read", "schema.mismatch", ONCE, False),
        # That of a Python step after the dedupe.
        ("checked", "schema.null", ONCE, True),
        ("parsed", "schema.null", ONCE, False),
        ("sink:former", "sink.key", ONCE, False),
    ],
)
def test_a_letter_of_a_renamed_step_is_not_sent_if_a_dedupe_would_drop_its_record(
    tmp_path: Path, step: str, code: str, text: str, is_refused: bool
) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(7, step=step) | {"code": code}])
    chosen = list(letters(tmp_path / "dead"))[-1:]
    with pytest.raises(ConfigError, match="'checked' of a dead letter is not in") if is_refused else nullcontext():
        _check_steps(chosen, parse(text), steps_after(parse(text)))


@pytest.mark.parametrize(("source", "is_refused"), [("left", True), ("right", False)])
def test_only_a_dedupe_of_the_records_of_its_source_may_drop_them(
    tmp_path: Path, source: str, is_refused: bool
) -> None:
    text = """\
name: plain
sources: {left: {topics: [l]}, right: {topics: [r]}}
steps:
  - {name: l, from: left, parse: {schema: a STRING}}
  - {name: once, dedupe: {within: 1 day}}
  - {name: r, from: right, parse: {schema: a STRING}}
sinks:
  - {name: ls, from: once, table: {path: ls}}
  - {name: rs, from: r, table: {path: rs}}
"""
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(7, step="checked", source=source) | {"code": "expression.failed"}])
    chosen = list(letters(tmp_path / "dead"))[-1:]
    refused = pytest.raises(ConfigError, match="dedupe step 'once' may have seen the record 'id-7'")
    with refused if is_refused else nullcontext():
        _check_steps(chosen, parse(text), steps_after(parse(text)))


@pytest.mark.parametrize(
    ("step", "rejected_by", "is_refused"),
    [
        ("parsed", b"parsed,checked", True),
        ("parsed", b"parsed,judged", False),
        ("parsed", b"sink:former", False),
        ("judged", b"checked", False),
        ("sink:rows", b"checked", False),
    ],
)
def test_a_renamed_step_that_waits_for_a_record_is_refused(
    tmp_path: Path, step: str, rejected_by: bytes, is_refused: bool
) -> None:
    """The redriven record failed before the step; the dedupe between them would drop it."""
    run = RecordedRun(tmp_path)
    headers = [{"key": REDRIVE_STEP, "value": rejected_by}, {"key": REDRIVE, "value": b"1"}]
    run.commit("dead", 2, [letter(7, step=step, headers=headers)])
    chosen = list(letters(tmp_path / "dead"))[-1:]
    with pytest.raises(ConfigError, match="'checked' of a dead letter is not in") if is_refused else nullcontext():
        _check_steps(chosen, parse(ONCE), steps_after(parse(ONCE)))


def test_the_refusal_names_the_letter_that_a_refused_one_is_redriven_with(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    rejected = [("sink:rows", "sink.key"), ("checked", "expression.failed")]
    run.commit("dead", 2, [letter(7, step=step) | {"code": code} for step, code in rejected])
    chosen = list(letters(tmp_path / "dead"))[-2:]
    with pytest.raises(
        ConfigError, match="with the letter of 'sink:rows', which belongs to the same record"
    ) as refused:
        _check_steps(chosen, parse(ONCE), steps_after(parse(ONCE)))
    assert "resolve --step checked --id id-7" in str(refused.value.hint)


def test_a_part_of_an_unknown_explode_step_is_not_sent(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(7) | {"part": part} for part in ("first.0", "second.1.first.0", "former.2")])
    *_, first, nested, former = letters(tmp_path / "dead")
    pipeline = parse(BRANCHES)
    _check_parts([first, nested], pipeline)
    with pytest.raises(ConfigError, match="the explode step 'former' of a dead letter is not in the file") as caught:
        asyncio.run(redrive(tmp_path / "dead", [first, former], pipeline, tmp_path))
    assert "it made the part former.2 of the record 'id-7'" in str(caught.value)


def test_a_letter_of_a_file_is_not_written_to_an_inbox_in_a_bucket(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    files = parse(FILE.replace("{topics: [water_flow]}", f"{{format: files, path: {tmp_path}/drop}}"))
    chosen = list(letters(run.root / "dead"))
    with pytest.raises(ConfigError, match="the source 'source' reads files, and the state directory 's3://lake/s'"):
        asyncio.run(redrive(tmp_path / "dead", chosen, files, storage_path("s3://lake/s")))
    assert redriven(tmp_path / "dead") == set()


@pytest.mark.parametrize("part", ["0", "12", "2.0"])
def test_a_part_of_an_earlier_version_is_not_sent(tmp_path: Path, part: str) -> None:
    """All explode steps would count its record as filtered."""
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(7) | {"part": part}])
    chosen = [list(letters(tmp_path / "dead"))[-1]]
    with pytest.raises(ConfigError, match=f"the part {part} of a dead letter does not name its explode step"):
        asyncio.run(redrive(tmp_path / "dead", chosen, parse(BRANCHES), tmp_path))
    assert not list((tmp_path / "dead").rglob("_redriven*/*.json"))


class Topic:
    """The topic `t`, without a broker: its records, of which the first has the offset 100."""

    def __init__(self) -> None:
        self.records: list[AppendedRecord] = []
        self.room = 100
        """Number of records until a crash."""
        self.deleted: set[tuple[str, int]] = set()
        self.id = "first"
        self.policy: str | None = "delete"

    def __call__(self, _options: object) -> Topic:
        return self

    def __enter__(self) -> Topic:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def bounds(self) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
        return {"t": {"0": 0}}, {"t": {"0": 100 + len(self.records)}}

    def topic_ids(self) -> dict[str, str]:
        return {"t": self.id}

    def setting(self, topic: str, name: str) -> str | None:
        assert (topic, name) == ("t", "cleanup.policy")
        return self.policy

    def find(
        self, start: Mapping[str, Mapping[str, int]], header: str
    ) -> tuple[dict[bytes, tuple[str, int, int]], set[tuple[str, int]]]:
        assert {topic: list(places) for topic, places in start.items()} == {"t": ["0"]}
        numbers = range(start["t"]["0"] - 100, 0 if self.deleted else len(self.records))
        return {dict(self.records[n].headers)[header]: ("t", 0, 100 + n) for n in numbers}, self.deleted

    def without_value(self, places: Iterable[tuple[str, int, int]]) -> set[tuple[str, int, int]]:
        return {place for place in places if place[2] % 2}

    def crash(self, *_: object) -> None:
        raise KeyboardInterrupt

    def append(self, target: KafkaTopic, records: Sequence[AppendedRecord]) -> list[int]:
        assert target.topic == "t"
        first = len(self.records)
        self.records += records[: self.room - first]
        if len(records) > self.room - first:
            raise KeyboardInterrupt
        return [100 + n for n in range(first, len(self.records))]


KAFKA = FILE.replace("{topics: [water_flow]}", "{format: kafka, bootstrap: ['h:1'], topics: [t], redrive: true}")


def kafka_topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    topic = Topic()
    monkeypatch.setattr(dead_letters, "KafkaLog", topic)
    monkeypatch.setattr(dead_letters, "append_records", topic.append)
    return topic


@pytest.mark.parametrize("crash", ["before", "between", "unlisted", "listed", None])
def test_a_letter_of_kafka_is_sent_once_whenever_a_redrive_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str | None
) -> None:
    RecordedRun(tmp_path)
    topic, path, text = kafka_topic(monkeypatch), tmp_path / "dead", KAFKA
    chosen = list(letters(path))
    span = ReplayRange(parse_point("earliest", "--from"), parse_point("latest", "--to"))

    def run() -> int:
        return asyncio.run(redrive(path, chosen, parse(text), tmp_path))

    if crash is not None:
        topic.room = {"before": 0, "between": 1}.get(crash, 100)
        with monkeypatch.context() as patches:
            if crash in ("unlisted", "listed"):
                step = "_list_redriven" if crash == "unlisted" else "_forget_sending"
                patches.setattr(dead_letters, step, topic.crash)
            with pytest.raises(KeyboardInterrupt):
                run()
        assert "was interrupted" in str(warning_of_copies(path, parse(text).inputs, span))
        topic.room = 100
    assert run() == 2
    assert [(each.value, each.timestamp_ms) for each in topic.records] == [
        (letter.value, 1_714_521_600_000)
        for letter in chosen  # 2024-05-01
    ]
    headers = [dict(each.headers) for each in topic.records]
    assert [(each["id"], each[REDRIVE], each[REDRIVE_STEP]) for each in headers] == [
        (letter.id.encode(), b"1", b"parsed") for letter in chosen
    ]
    assert len({each[REDRIVE_ID] for each in headers}) == 2
    states = letter_states(path)
    assert {status_of(states, letter).state for letter in chosen} == {LetterState.REDRIVEN}
    assert redriven_copies(path) == {
        letter.place: RedrivenCopy(("t", 0, 0, 100 + n), "parsed", "first") for n, letter in enumerate(chosen)
    }
    assert warning_of_copies(path, parse(text).inputs, span) is None
    # With --repeat: nothing is taken for a copy of before.
    assert run() == 2
    assert len(topic.records) == 4


def test_a_source_of_kafka_is_written_to_only_if_it_permits_it(tmp_path: Path) -> None:
    RecordedRun(tmp_path)
    pipeline = parse(FILE.replace("{topics: [water_flow]}", "{format: kafka, bootstrap: ['h:1'], topics: [t]}"))
    with pytest.raises(ConfigError, match="it does not permit writing to its topics") as refused:
        asyncio.run(redrive(tmp_path / "dead", list(letters(tmp_path / "dead")), pipeline, tmp_path))
    assert "set redrive: true" in str(refused.value.hint)


def test_a_copy_has_no_value_if_its_record_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike one with an empty value, also if the user has given it."""
    RecordedRun(tmp_path)
    topic, path = kafka_topic(monkeypatch), tmp_path / "dead"
    first, *_ = letters(path)
    chosen = [first._replace(id=f"id-{n}", offset=n, value=b"x" if n > 4 else b"") for n in range(1, 6)]
    set_state(path, chosen[2:], LetterState.CORRECTED, b"")
    assert asyncio.run(redrive(path, chosen, parse(KAFKA), tmp_path)) == 5
    assert [each.value for each in topic.records] == [None, b"", None, b"", b""]


def test_what_was_decided_after_an_interrupted_redrive_stays_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(2), letter(3)])
    topic, path, pipeline = kafka_topic(monkeypatch), tmp_path / "dead", parse(KAFKA)
    corrected, discarded, opened, sent = chosen = list(letters(path))
    set_state(path, [opened, sent], LetterState.CORRECTED, b'{"x": 1}')
    with monkeypatch.context() as patches:
        patches.setattr(dead_letters, "_list_redriven", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(redrive(path, chosen, pipeline, tmp_path))
    set_state(path, [corrected], LetterState.CORRECTED, b'{"x": 2}')
    set_state(path, [discarded], LetterState.DISCARDED)
    set_state(path, [opened], LetterState.OPEN)
    assert asyncio.run(redrive(path, [corrected, opened, sent], pipeline, tmp_path)) == 3
    values = [each.value for each in topic.records]
    assert values == [corrected.value, discarded.value, b'{"x": 1}', b'{"x": 1}', b'{"x": 2}']
    states = letter_states(path)
    assert [status_of(states, each).state for each in chosen] == [
        LetterState.REDRIVEN,
        LetterState.DISCARDED,
        LetterState.REDRIVEN,
        LetterState.REDRIVEN,
    ]
    # Of the corrected one the newest copy.
    assert [redriven_copies(path)[each.place].record[3] for each in chosen] == [104, 101, 102, 103]


@pytest.mark.parametrize("loss", ["deleted", "created again"])
def test_a_letter_is_not_sent_again_if_its_copy_may_have_been_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    RecordedRun(tmp_path)
    topic, path, pipeline = kafka_topic(monkeypatch), tmp_path / "dead", parse(KAFKA)
    first, second = chosen = list(letters(path))

    def run(*wanted: DeadLetter) -> int:
        return asyncio.run(redrive(path, wanted, pipeline, tmp_path))

    topic.room = 1
    with pytest.raises(KeyboardInterrupt):
        run(*chosen)
    topic.room = 100
    if loss == "deleted":
        topic.deleted = {("t", 0)}
    else:
        topic.id, topic.records = "second", []
    kept = len(topic.records)
    for wanted in chosen, [first], []:
        with pytest.raises(DataLossError, match="has sent 'id-0' and 1 more") as unknown:
            run(*wanted)
    assert "dead-letter correct --id ID" in str(unknown.value.hint)
    set_state(path, [first], LetterState.RESOLVED)
    with pytest.raises(DataLossError, match=r"has sent 'id-1'\n"):
        run(second)
    assert len(topic.records) == kept
    set_state(path, [second], LetterState.CORRECTED, second.value)
    assert run(second) == 1
    assert [each.value for each in topic.records[kept:]] == [second.value]
    states = letter_states(path)
    assert [status_of(states, each).state for each in chosen] == [LetterState.RESOLVED, LetterState.REDRIVEN]


def test_a_redrive_that_was_listed_is_ended_without_the_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No letter is left to be chosen, and retention may have deleted the copies."""
    RecordedRun(tmp_path)
    topic, path, pipeline = kafka_topic(monkeypatch), tmp_path / "dead", parse(KAFKA)
    with monkeypatch.context() as patches:
        patches.setattr(dead_letters, "_forget_sending", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(redrive(path, list(letters(path)), pipeline, tmp_path))
    topic.deleted = {("t", 0)}
    assert asyncio.run(redrive(path, [], pipeline, tmp_path)) == 0
    assert not list((path / "_sending").iterdir())
    assert len(topic.records) == len(redriven_copies(path)) == 2


def test_topics_that_may_lose_copies_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(2, topic="former"), letter(3, partition=7)])
    topic, path, pipeline = kafka_topic(monkeypatch), tmp_path / "dead", parse(KAFKA)
    first, _, former, lost = letters(path)
    told: list[str] = []

    def redriven_to(chosen: DeadLetter) -> int:
        return asyncio.run(redrive(path, [chosen], pipeline, tmp_path, told.append))

    with pytest.raises(ConfigError, match="the source 'source' does not read it"):
        redriven_to(former)
    with pytest.raises(ConfigError, match="to the partition 7 of topic 't'"):
        redriven_to(lost)
    topic.policy = "compact,delete"
    with pytest.raises(ConfigError, match=r"its cleanup\.policy is compact,delete"):
        redriven_to(first)
    assert (topic.records, told, list(path.rglob("_sending/*"))) == ([], [], [])
    topic.policy = None
    assert redriven_to(first) == 1
    assert "lacks the permission DescribeConfigs" in told[0]


def test_a_record_without_a_time_is_redriven_and_purged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(2, timestamp=None)])
    topic, path = kafka_topic(monkeypatch), tmp_path / "dead"
    chosen = list(letters(path))[-1]
    assert chosen.timestamp is None
    assert asyncio.run(redrive(path, [chosen], parse(KAFKA), tmp_path)) == 1
    assert topic.records[0].timestamp_ms == 0
    assert purge(path, [chosen]) == 1


def test_sources_with_topics_of_the_same_name_have_letters_of_their_own(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(2, source=source) for source in ("a", "b", "")])
    path = tmp_path / "dead"
    a, b, unnamed = list(letters(path))[2:]

    def states() -> list[LetterState]:
        found = letter_states(path)
        return [status_of(found, each).state for each in (a, b, unnamed)]

    set_state(path, [a], LetterState.RESOLVED)
    assert states() == [LetterState.RESOLVED, LetterState.OPEN, LetterState.OPEN]
    # An older version stores no source: its changes are those of all records with the coordinates.
    write_json(path / "_states" / f"{10**20}.json", {"state": "discarded", "places": [list(a.coordinates)]})
    assert states() == [LetterState.DISCARDED] * 3
    note = {"state": "open", "places": [list(b.coordinates)], "sources": ["b"]}
    write_json(path / "_states" / f"{10**20 + 1}.json", note)
    assert states() == [LetterState.DISCARDED, LetterState.OPEN, LetterState.DISCARDED]
    assert purge(path, [b]) == 1
    assert [each.source for each in letters(path)] == ["source", "source", "a", ""]


def test_a_record_of_a_topic_that_was_created_again_has_a_letter_of_its_own(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(0, timestamp=datetime(2024, 5, 2, tzinfo=UTC))])
    path = tmp_path / "dead"
    before, _, after = letters(path)
    assert before.coordinates == after.coordinates

    def states() -> list[LetterState]:
        found = letter_states(path)
        return [status_of(found, each).state for each in (before, after)]

    assert len(_records([before, after], {})) == 2
    set_state(path, [before], LetterState.RESOLVED)
    assert states() == [LetterState.RESOLVED, LetterState.OPEN]
    # An older version stores no time.
    note = {"state": "discarded", "places": [list(before.coordinates)], "sources": ["source"]}
    write_json(path / "_states" / f"{10**20}.json", note)
    assert states() == [LetterState.DISCARDED] * 2
    note = {"state": "open", **places_as_json([after.place])}
    write_json(path / "_states" / f"{10**20 + 1}.json", note)
    assert states() == [LetterState.DISCARDED, LetterState.OPEN]
    assert purge(path, [before]) == 1
    assert [each.place for each in letters(path)][-1] == after.place


def without_times(path: Path) -> None:
    """Let the file of an interrupted redrive be that of an older version."""
    intent = path / "_sending" / "source.json"
    write_json(intent, {name: value for name, value in read_json(intent).items() if name != "times_us"})


def test_letters_that_an_older_version_was_sending_are_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not store the times of their records."""
    RecordedRun(tmp_path)
    topic, path = kafka_topic(monkeypatch), tmp_path / "dead"
    chosen = list(letters(path))
    with monkeypatch.context() as patches:
        patches.setattr(dead_letters, "_list_redriven", topic.crash)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(redrive(path, chosen, parse(KAFKA), tmp_path))
    without_times(path)
    assert asyncio.run(redrive(path, chosen, parse(KAFKA), tmp_path)) == 2
    assert len(topic.records) == 2
    assert {status_of(letter_states(path), each).state for each in chosen} == {LetterState.REDRIVEN}


@pytest.mark.parametrize("are_deleted", [False, True])
def test_what_was_decided_after_a_redrive_of_an_older_version_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_deleted: bool
) -> None:
    RecordedRun(tmp_path)
    topic, path, pipeline = kafka_topic(monkeypatch), tmp_path / "dead", parse(KAFKA)
    first, second = chosen = list(letters(path))
    with monkeypatch.context() as patches:
        patches.setattr(dead_letters, "_list_redriven", topic.crash)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(redrive(path, chosen, pipeline, tmp_path))
    without_times(path)
    if are_deleted:
        topic.deleted = {("t", 0)}
    set_state(path, [first], LetterState.RESOLVED)
    set_state(path, [second], LetterState.CORRECTED, b"corrected")
    assert asyncio.run(redrive(path, [second], pipeline, tmp_path)) == 1
    assert [each.value for each in topic.records] == [first.value, second.value, b"corrected"]
    states = letter_states(path)
    assert [status_of(states, each).state for each in chosen] == [LetterState.RESOLVED, LetterState.REDRIVEN]


def test_letters_of_one_record_have_states_of_their_own_and_are_redriven_together(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(7, step=step) for step in ("sink:ones", "sink:twos")])
    dead = tmp_path / "dead"
    *others, ones, twos = letters(dead)

    def states() -> list[LetterState]:
        found = letter_states(dead)
        return [status_of(found, each).state for each in (ones, twos)]

    set_state(dead, [ones], LetterState.DISCARDED)
    assert states() == [LetterState.DISCARDED, LetterState.OPEN]
    set_state(dead, [ones], LetterState.OPEN)
    assert states() == [LetterState.OPEN, LetterState.OPEN]
    assert of_same_records([ones], [*others, ones, twos]) == [ones, twos]
    # Older versions store no step: their changes are those of all letters of the record.
    write_json(dead / "_states" / f"{10**20}.json", {"state": "resolved", "places": [list(ones.coordinates)]})
    assert states() == [LetterState.RESOLVED, LetterState.RESOLVED]
    note = {"state": "open", **places_as_json([twos.place]), "steps": [twos.step]}
    write_json(dead / "_states" / f"{10**20 + 1}.json", note)
    assert states() == [LetterState.RESOLVED, LetterState.OPEN]
    note = places_as_json([twos.place]) | {"steps": [twos.step], "by_step": True}
    write_json(dead / "_redriven" / f"{10**20 + 2}.json", note)
    assert states() == [LetterState.RESOLVED, LetterState.REDRIVEN]
    # They redrove all of them with the step of one.
    write_json(dead / "_redriven" / f"{10**20 + 3}.json", places_as_json([twos.place]) | {"steps": [twos.step]})
    assert states() == [LetterState.REDRIVEN, LetterState.REDRIVEN]


def test_a_redrive_changes_only_the_letters_that_it_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not those that are written later: a sink may fail while others continue, or be new."""
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(7, step=step) for step in ("sink:rows", "sink:panel")])
    topic, dead = kafka_topic(monkeypatch), tmp_path / "dead"
    rows, panel = list(letters(dead))[2:]
    set_state(dead, [panel], LetterState.DISCARDED)
    assert asyncio.run(redrive(dead, [rows], parse(KAFKA), tmp_path)) == 1
    run.commit("dead", 3, [letter(7, step="sink:new")])
    *_, new = letters(dead)

    def states() -> list[LetterState]:
        found = letter_states(dead)
        return [status_of(found, each).state for each in (rows, panel, new)]

    assert states() == [LetterState.REDRIVEN, LetterState.DISCARDED, LetterState.OPEN]
    assert asyncio.run(redrive(dead, [new], parse(KAFKA), tmp_path)) == 1
    assert states() == [LetterState.REDRIVEN, LetterState.DISCARDED, LetterState.REDRIVEN]
    assert [dict(each.headers)[REDRIVE_STEP] for each in topic.records] == [b"sink:rows", b"sink:new"]


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("is_old", [False, True])
def test_an_interrupted_redrive_has_sent_only_its_own_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool, is_old: bool
) -> None:
    """That of an older version has sent all letters of the record."""
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(7, step="sink:rows")])
    topic, dead = kafka_topic(monkeypatch), tmp_path / "dead"
    *_, rows = letters(dead)
    with monkeypatch.context() as patches:
        patches.setattr(dead_letters, "_forget_sending" if is_listed else "_list_redriven", topic.crash)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(redrive(dead, [rows], parse(KAFKA), tmp_path))
    for path in dead.rglob("_[rs]e*/*.json") if is_old else ():
        write_json(path, {name: value for name, value in read_json(path).items() if name != "by_step"})
    run.commit("dead", 3, [letter(7, step="sink:panel")])
    *_, panel = letters(dead)
    assert asyncio.run(redrive(dead, [rows, panel], parse(KAFKA), tmp_path)) == 2
    sent = [dict(each.headers)[REDRIVE_STEP] for each in topic.records]
    assert sent == [b"sink:rows", *([] if is_old else [b"sink:panel"])]
    assert {status_of(letter_states(dead), each).state for each in (rows, panel)} == {LetterState.REDRIVEN}


@pytest.mark.parametrize("order", [1, -1])
def test_a_record_is_redriven_with_the_newest_correction_of_its_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(7, step=step) for step in ("sink:a", "sink:b", "sink:c", "sink:d")][::order])
    topic, dead = kafka_topic(monkeypatch), tmp_path / "dead"
    a, b, c, d = sorted(list(letters(dead))[2:], key=lambda each: each.step)
    set_state(dead, [b, c, d], LetterState.CORRECTED, b"first")
    set_state(dead, [a, b], LetterState.CORRECTED, b"second")
    set_state(dead, [d], LetterState.CORRECTED, b"third")
    set_state(dead, [d], LetterState.DISCARDED)
    assert asyncio.run(redrive(dead, [c, b][::order], parse(KAFKA), tmp_path)) == 2
    set_state(dead, [a], LetterState.OPEN)
    assert asyncio.run(redrive(dead, [a], parse(KAFKA), tmp_path)) == 1
    set_state(dead, [b, c], LetterState.OPEN)
    assert asyncio.run(redrive(dead, [a], parse(KAFKA), tmp_path)) == 1
    assert [each.value for each in topic.records] == [b"second", b"second", a.value]


@pytest.mark.parametrize(
    ("part", "newer", "older"),
    [
        (None, None, [7]),
        (None, "a.1", [7]),
        ("a.1", None, [7]),
        ("a.1", "a.1", [7]),
        ("a.1", "a.1.b.0", [7]),
        ("a.1", "a.10", []),
        ("a.1.b.0", "a.1", [7]),
        ("a.1", "a.2", []),
    ],
)
def test_a_letter_whose_record_was_redriven_and_failed_again_is_known(
    tmp_path: Path, part: str | None, newer: str | None, older: list[int]
) -> None:
    run = RecordedRun(tmp_path)
    again = [{"key": "id", "value": b"id-7"}, {"key": REDRIVE, "value": b"1"}]
    rows = [letter(7) | {"part": part}, letter(9, headers=again) | {"part": newer, "id": "id-7"}]
    run.commit("dead", 2, rows)
    dead = tmp_path / "dead"
    assert failed_again(letters(dead), {}) == {
        (each.place, each.step) for each in letters(dead) if each.offset in [number * 28 for number in older]
    }


@pytest.mark.parametrize(
    ("step", "newer", "is_older"),
    [
        ("one", "one", True),
        ("one", "parsed", True),
        ("sink:ones", "first", True),
        ("sink:ones", "sink:ones", True),
        ("one", "two", False),
        ("sink:ones", "sink:twos", False),
        ("parsed", "one", False),
        ("former", "former", True),
        ("one", "former", False),
    ],
)
def test_a_letter_is_older_than_one_of_the_same_step_or_of_one_before_it(
    tmp_path: Path, step: str, newer: str, is_older: bool
) -> None:
    """The step has accepted the redriven record otherwise."""
    run = RecordedRun(tmp_path)
    again = [{"key": "id", "value": b"id-7"}, {"key": REDRIVE, "value": b"1"}]
    run.commit("dead", 2, [letter(7, step=step), letter(9, step=newer, headers=again) | {"id": "id-7"}])
    found = list(letters(tmp_path / "dead"))
    older = failed_again(found, steps_after(parse(BRANCHES)))
    assert older == ({(found[2].place, step)} if is_older else set())


def test_many_letters_of_one_record_are_compared_in_linear_time(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.commit("dead", 2, [letter(7, step="one")])
    *_, whole = letters(tmp_path / "dead")
    redrives = [(name, value) for name, value in whole.headers if name != REDRIVE]

    def calls(count: int) -> int:
        """Return the number of calls for ``count`` parts, of which each second one failed again."""
        old = [whole._replace(part=f"first.{n}") for n in range(count)]
        new = [
            whole._replace(part=f"first.{n}", offset=n, headers=[*redrives, (REDRIVE, b"1")])
            for n in range(0, count, 2)
        ]
        counted = 0

        def count_call(_frame: object, event: str, _argument: object) -> None:
            nonlocal counted
            counted += event in {"call", "c_call"}

        sys.setprofile(count_call)
        try:
            older = failed_again([*old, *new], {})
        finally:
            sys.setprofile(None)
        assert older == {(each.place, "one") for each in old[::2]}
        return counted

    assert calls(800) < 3 * calls(400)
