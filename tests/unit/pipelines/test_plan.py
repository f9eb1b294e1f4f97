from __future__ import annotations

from penstock.pipelines.plan import plan
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
    assert rows.dead_letters_of == {"parsed"}
    assert alarms.windowed
    assert alarms.dead_letters_of == frozenset()
    assert third.dead_letters_of == frozenset()
