from __future__ import annotations

from penstock.pipelines.spec.pipeline import labels, plan, query_groups
from tests.unit.pipelines.files import FILE, parse


def names(text: str = FILE) -> dict[str, list[str]]:
    return {p.sink.name: [step.name for step in p.steps] for p in plan(parse(text))}


def test_each_sink_has_the_chain_of_its_own() -> None:
    assert names() == {
        "rows": ["parsed", "plausible", "once"],
        "alarms": ["parsed", "plausible", "once_in_time", "stretches"],
    }


def test_a_sink_may_read_the_source() -> None:
    text = FILE.replace("from: once\n", "from: source\n").replace("dead_letters: {path: lake/dead}\n", "")
    assert names(text)["rows"] == []


def test_the_first_sink_of_single_rows_writes_the_dead_letters() -> None:
    more = FILE + "  - name: more\n    from: plausible\n    table: {path: lake/more}\n"
    rows, alarms, third = plan(parse(more))
    assert rows.dead_letters_of == {"parsed", "plausible"}
    assert alarms.windowed
    assert alarms.dead_letters_of == {"stretches", "sink:alarms"}
    assert third.dead_letters_of == frozenset()


def test_the_dead_letters_of_steps_before_windows_alone_are_theirs() -> None:
    windows_only = FILE.replace("  - name: rows\n    from: once\n    table: {path: lake/rows}\n", "")
    (alarms,) = plan(parse(windows_only))
    assert alarms.dead_letters_of == {"parsed", "plausible", "stretches", "sink:alarms"}


GRAPH = """\
name: graph
sources:
  a: {topics: [a]}
  b: {format: rate}
steps:
  - {name: low, from: a, map: {compute: {t: now()}}}
  - {name: high, from: a, filter: now() >= date'2024-01-01'}
  - {name: both, concat: [high, low, b]}
  - {name: hours, window: {time: t, duration: 1 hour, watermark: 1 hour, aggregates: {n: count(*)}}}
sinks:
  - {name: late, from: hours.late, console: {}}
  - {name: hours, console: {}}
  - {name: lows, from: low, console: {}}
"""


def test_a_graph_has_a_way_for_each_time_that_a_source_is_met() -> None:
    hours, lows = plan(parse(GRAPH))
    assert hours.inputs == ("a", "a", "b")
    assert labels(hours.inputs) == ("a", "a#2", "b")
    assert [(node.step.name, node.reads) for node in hours.nodes] == [
        ("low", ("a",)),
        ("high", ("a",)),
        ("both", ("high", "low", "b")),
        ("hours", ("both",)),
    ]
    assert [sink.name for sink in hours.late_sinks] == ["late"]
    assert (hours.reads, lows.reads, lows.inputs) == ("hours", "low", ("a",))
    assert lows.dead_letters_of == {"low"}
    assert hours.dead_letters_of == {"high", "hours"}


def shared(text: str) -> list[list[str]]:
    return [[found.sink.name for found in group] for group in query_groups(parse(text))]


BRANCHES = """\
name: branches
sources:
  a: {topics: [a]}
  b: {topics: [b]}
  k: {format: kafka, bootstrap: ["h:1"], topics: [k]}
  ticks: {format: rate}
steps:
  - {name: low, from: a, filter: now() > date'2024-01-01'}
  - {name: both, concat: [a, low]}
  - {name: mixed, concat: [b, k]}
  - {name: timed, concat: [k, ticks]}
  - {name: once, from: a, dedupe: {within: 1 day}}
sinks:
  - {name: first, from: a, console: {}}
  - {name: other, from: b, console: {}}
  - {name: joined, from: both, console: {}}
  - {name: second, from: low, console: {}}
  - {name: deduped, from: once, console: {}}
  - {name: joined_too, from: both, console: {}}
  - {name: clock, from: ticks, console: {}}
  - {name: clock_too, from: ticks, console: {}}
  - {name: records, from: k, console: {}}
  - {name: records_too, from: k, console: {}}
  - {name: all, from: mixed, console: {}}
  - {name: all_too, from: mixed, console: {}}
  - {name: beats, from: timed, console: {}}
  - {name: beats_too, from: timed, console: {}}
"""


def test_sinks_without_state_share_a_query_if_each_record_is_one_row_for_all() -> None:
    assert shared(BRANCHES) == [
        ["first", "second"],
        ["other"],
        ["joined", "joined_too"],
        ["deduped"],
        ["clock"],
        ["clock_too"],
        ["records", "records_too"],
        ["all", "all_too"],
        ["beats"],
        ["beats_too"],
    ]
    assert shared(FILE) == [["rows"], ["alarms"]]
