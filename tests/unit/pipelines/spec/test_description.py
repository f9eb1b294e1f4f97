from __future__ import annotations

import json

import pytest

from penstock.pipelines.spec.description import as_data, as_text
from penstock.pipelines.spec.steps import LOOKUP_BYTES, LOOKUP_VALUES
from penstock.spark.statestore import lookup
from tests.unit.pipelines.files import FILE, parse

MORE = """\
  - name: out
    from: once
    tubemq: {topic: "flow_{branch}", key: "{branch}", when: flow > 9}
  - name: seen
    from: source
    console: {}
"""


def test_each_query_says_what_it_does_and_what_it_leaves() -> None:
    rows, alarms, out, seen = as_data(parse(FILE + MORE))["queries"]
    assert [step["name"] for step in rows["steps"]] == ["parsed", "plausible", "once"]
    assert rows["steps"][0]["leaves"] == {"invalid records": "counted as dead, kept as dead letters by this query"}
    assert out["steps"][0]["leaves"] == {"invalid records": "counted as dead, kept as dead letters by another query"}
    assert alarms["steps"][-1]["does"] == (
        "tumbling, 3 hours, in time by branch: n = count(*); emitted whenever they change; watermark 6 hours, "
        "max_ahead 1 day"
    )
    assert alarms["steps"][-1]["leaves"] == {
        "events that cannot be aggregated": "counted as dead, kept as dead letters by this query",
        "late records": "counted as late",
    }
    assert out["does"] == "127.0.0.1:8715: topic flow_{branch}, key {branch}"
    assert out["leaves"] == {
        "rows for which flow > 9 is not true": "counted as filtered by sink:out",
        "rows that cannot be sent": "counted as dead, kept as dead letters by this query",
    }
    assert seen["steps"] == []


@pytest.mark.parametrize(
    ("sink", "leaves"),
    [
        ('statestore: {entries: [{key: "{branch}", value: [flow]}]}', "rows whose key or value cannot be written"),
        (
            "table: {path: t, mode: merge, keys: [branch], order_by: _offset, delete_when: flow < 0}",
            "rows on which delete_when fails",
        ),
        ("table: {path: t, partition_by: [branch]}", "rows whose value cannot be a partition"),
        ("table: {path: t}", None),
    ],
)
def test_the_plan_says_which_rows_a_sink_refuses(sink: str, leaves: str | None) -> None:
    *_, last = as_data(parse(FILE + f"  - {{name: last, from: plausible, {sink}}}\n"))["queries"]
    fate = "counted as dead, kept as dead letters by this query"
    assert last["leaves"] == ({} if leaves is None else {leaves: fate})


def test_the_plan_says_which_sinks_share_a_query() -> None:
    found = parse(FILE + MORE.replace("from: once", "from: plausible"))
    shares = {query["sink"]: query["shares_with"] for query in as_data(found)["queries"]}
    # The others have a dedupe or a window.
    assert shares == {"rows": [], "alarms": [], "out": ["seen"], "seen": ["out"]}
    assert "shared: reads and parses each record once for this sink and seen" in as_text(found)


@pytest.mark.parametrize(
    ("enrich", "method", "bound"),
    [
        (
            'key: "limits/{branch}"',
            "by key lookup: each worker reads the distinct keys of its rows, since the key depends on the row",
            "it caches up to 100,000 values of together 64 MiB",
        ),
        (
            "key: limits",
            "by key lookup: each worker reads the key once, since all rows have the same key",
            "it keeps one value",
        ),
        (
            "key: branches, match: {id: branch}",
            "by an index of the dataset in each worker, since one key has all objects and a row needs one",
            "the dataset must fit in the memory of a worker",
        ),
        (
            'key: "branches/{branch}", match: {id: branch}',
            "by an index of each dataset in each worker, since the key depends on the row and a row needs one object",
            "a worker keeps the last 64 datasets",
        ),
        (
            'key: "limits/{branch}", as_of: {time: time, topic: changes}',
            "by as-of join, since rows need earlier values: each worker has the changes in changes",
            "all changes are kept",
        ),
    ],
)
def test_the_plan_says_how_values_reach_the_rows_and_what_bounds_the_memory(
    enrich: str, method: str, bound: str
) -> None:
    step = f"  - name: limited\n    from: plausible\n    enrich: {{{enrich}, as: limits, schema: low DOUBLE}}\nsinks:\n"
    found = as_data(parse(FILE.replace("sinks:\n", step, 1) + "  - {name: new, from: limited, console: {}}\n"))
    (does,) = (step["does"] for step in found["queries"][-1]["steps"] if step["name"] == "limited")
    assert method in does
    assert does[does.index(method) :].split("; ")[1].startswith(bound)


def test_the_plan_has_the_limits_of_the_lookups() -> None:
    assert (LOOKUP_VALUES, LOOKUP_BYTES) == (lookup._CACHED, lookup._CACHED_BYTES)


def test_passwords_are_not_shown() -> None:
    sink = '  - name: out\n    from: once\n    mqtt: {topic: a, broker: "mqtts://ann:hush@b"}\n'
    found = parse('statestore: {broker: "mqtt://ann:hush@a:1883"}\n' + FILE + sink)
    assert found.statestore.broker == "mqtt://ann:hush@a:1883"
    for text in (as_text(found), json.dumps(as_data(found))):
        assert "mqtt://***@a:1883" in text
        assert "mqtts://***@b" in text
        assert "hush" not in text


def test_without_a_table_dead_letters_are_only_counted() -> None:
    text = as_text(parse(FILE.replace("dead_letters: {path: lake/dead}\n", "")))
    assert "dead letters: counted, not kept" in text
    assert "invalid records: counted as dead, not kept" in text


def test_the_text_names_every_part() -> None:
    text = as_text(parse((FILE + MORE).replace("duration: 3 hours", "duration: 3 hours, slide: 1 hour")))
    assert "query alarms: source -> parsed -> plausible -> once_in_time -> stretches -> sink" in text
    assert "sliding, 3 hours every 1 hour" in text
    assert "delivery: exactly once with penstock's brokers; at least once with others" in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_text_fits_into_a_terminal() -> None:
    found = parse(FILE + MORE)
    text = as_text(found, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.split() == as_text(found).split()
    assert "\n      a run that lost its lease:" in text
    continued = text[text.index("      a run that lost its lease:") :].splitlines()[1]
    assert continued.startswith(" " * 10)
