from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from tests.unit.pipelines.files import FILE, parse


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "from: plausible",
            "from: plausibel",
            r"p.yaml:12:11: option 'steps\[3\].from': .*source, parsed, plausible, once",
        ),
        ("from: once\n", "from: twice\n", r"option 'sinks\[0\].from': got 'twice', expected a step"),
        ("from: plausible", "from: stretches", "expected a step before it"),
        ("name: once\n", "name: parsed\n", "expected a name that no other step has"),
        ("name: parsed", "name: source", "expected a name that no other step has"),
        ("name: alarms", "name: rows", "expected a name that no other sink has"),
        ("filter: flow >= 0", "sql: delete from parsed", "expected SELECT <expressions> FROM"),
        ("filter: flow >= 0", "sql: select distinct flow from parsed", "expected SELECT <expressions> FROM"),
        ("aggregates: {n:", "aggregates: {_n:", "do not start with '_'"),
        ("dedupe: {on: event}", "dedupe: {within: 1 day}", "expected `on: event` in the dedupe before it"),
        ("dedupe: {within: 1 day}", "dedupe: {on: event}", "expected a window after it"),
        ('statestore: {entries: [{key: "alarm/{branch}"}]}', "table: {path: b}", "expected rows: windows change"),
        ("path: lake/dead", "path: lake/rows", "expected a directory of its own, dead_letters writes there"),
    ],
)
def test_what_does_not_fit_together_is_named_with_its_place(old: str, new: str, message: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigError, match=message):
        parse(FILE.replace(old, new, 1))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{topics: [a], options: {startingOfsets: latest}}",
            r"p.yaml:2:\d+: .*startingOfsets.* did you mean startingOff",
        ),
        ("{topics: [a], options: {startingOffsets: soon}}", r"p.yaml:2:\d+: .*startingOffsets"),
        ("{topics: [a], options: {maxOffsetsPerTrigger: 0}}", r"p.yaml:2:\d+: .*not a number above 0"),
        ("{topics: [a], options: {endingOffsets: latest}}", r"p.yaml:2:\d+: .*no meaning for a stream"),
        ("{topics: [a], options: {Subscribe: b}}", r"p.yaml:2:\d+: .*expected source.topics"),
        ("{topics: [a], master: nowhere}", r"p.yaml:2:\d+: .*'nowhere' is not HOST:PORT"),
        ("{topics: ['']}", r"p.yaml:2:.*has an empty topic"),
    ],
)
def test_options_of_the_source_are_checked_without_spark(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(FILE.replace("{topics: [water_flow]}", source, 1))


def test_parse_reads_the_source() -> None:
    late_parse = FILE.replace("filter: flow >= 0", "parse: {schema: x INT}")
    with pytest.raises(ConfigError, match="parse is the first step"):
        parse(late_parse)


def test_only_sql_follows_a_window() -> None:
    text = FILE.replace("sinks:", "  - {name: more, filter: n > 1}\nsinks:")
    with pytest.raises(ConfigError, match="expected only sql steps after a window"):
        parse(text)


def test_dead_letters_need_a_sink_of_single_rows() -> None:
    windows_only = FILE.replace("  - name: rows\n    from: once\n    table: {path: lake/rows}\n", "")
    with pytest.raises(ConfigError, match="windows alone would lose its dead letters"):
        parse(windows_only)
    parse(windows_only.replace("dead_letters: {path: lake/dead}\n", ""))


def test_a_problem_of_a_shared_step_is_told_once() -> None:
    text = FILE.replace("filter: flow >= 0", "parse: {schema: x INT}")
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert str(error.value).count("parse is the first step") == 1
