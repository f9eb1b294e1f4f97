"""Changes of a pipeline since its last run, found from the state of that run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from penstock.errors import ConfigError, RefusedError
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.plan_changes import (
    ASKED,
    PlanChange,
    changes,
    check_applicable,
    check_new_sinks,
    check_table_types,
    remember,
)
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import check_shapes
from penstock.pipelines.state_dir.layout import claim, create_json
from tests.unit.pipelines.files import FILE, parse
from tests.unit.pipelines.recorded_run import RecordedRun


def ran(state: Path, text: str = FILE) -> None:
    """As after a run of ``text`` in which each sink carried out batches 0 and 1."""
    pipeline = parse(text)
    claim(state, pipeline.name)
    check_shapes(pipeline, state)
    remember(pipeline, state)
    for sink in pipeline.sinks:
        layout.checkpoint(state, sink.name).mkdir(parents=True, exist_ok=True)


def told(state: Path, text: str) -> list[tuple[str, str]]:
    return [(change.mark, change.what) for change in changes(parse(text), state) or ()]


def test_a_pipeline_that_never_ran_has_no_changes(tmp_path: Path) -> None:
    assert changes(parse(), tmp_path / "none") is None


def test_an_unchanged_file_continues(tmp_path: Path) -> None:
    ran(tmp_path)
    assert changes(parse(), tmp_path) == [
        PlanChange("=", "sink rows", "continues where it ended"),
        PlanChange("=", "sink alarms", "continues where it ended"),
    ]
    (tmp_path / "other").mkdir()
    Ledger(layout.ledger(tmp_path)).write(RecordedRun(tmp_path / "other").entries[1])
    assert changes(parse(), tmp_path)[0].text == "continues after batch 1"  # type: ignore[index]  # a run was there


def test_parts_that_came_went_or_are_others(tmp_path: Path) -> None:
    ran(tmp_path)
    text = FILE.replace("topics: [water_flow]", "topics: [water_flow, more]").replace("flow >= 0", "flow > 0")
    text = text.replace("name: rows", "name: lines").replace(
        "- name: once\n", "- name: also\n    filter: flow < 9\n  - name: once\n"
    )
    assert told(tmp_path, text) == [
        ("~", "source source"),
        ("~", "step plausible"),
        ("~", "step once"),
        ("+", "step also"),
        ("?", "sink lines"),
        ("=", "sink alarms"),
        ("-", "sink rows"),
    ]
    source, plausible, *_ = changes(parse(text), tmp_path) or []
    assert '"topics": ["water_flow", "more"]' in source.text
    assert plausible.text == "was: of parsed: filter flow >= 0; is: of parsed: filter flow > 0"


ENRICHED = FILE.replace(
    "  - name: plausible\n",
    "  - name: named\n    enrich: {key: 'names/{branch}', into: found, schema: title STRING}\n  - name: plausible\n",
)
OLD_WORDS = "by key lookup: each worker reads the distinct keys of its rows, since the key depends on the row"


def test_a_step_that_is_described_in_other_words_is_not_changed(tmp_path: Path) -> None:
    ran(tmp_path, ENRICHED)
    path = layout.plan(tmp_path)
    plan = json.loads(path.read_text())
    for version in ("this", "an older one"):
        for query in plan["queries"]:
            for step in query["steps"]:
                if version != "this":
                    # Its plans had descriptions only.
                    step.pop("definition", None)
                if step["name"] == "named":
                    method = re.search("by key lookup.*?(?=, refreshed)", step["does"])
                    assert method is not None
                    step["does"] = step["does"].replace(method[0], OLD_WORDS)
        path.write_text(json.dumps(plan))
        assert told(tmp_path, ENRICHED) == [("=", "sink rows"), ("=", "sink alarms")]
        other = ENRICHED.replace("'names/{branch}'", "'titles/{branch}'")
        assert told(tmp_path, other) == [("~", "step named"), ("=", "sink rows"), ("=", "sink alarms")]
        assert ("~", "step named") in told(tmp_path, ENRICHED.replace("title STRING", "title INT"))


def test_an_option_that_is_not_described_is_a_change(tmp_path: Path) -> None:
    ran(tmp_path)
    text = FILE.replace("lake/rows", "lake/rows, target_file_size: 64MiB")
    (change,) = [each for each in changes(parse(text), tmp_path) or () if each.mark == "~"]
    assert change.what == "sink rows"
    assert change.text.startswith("continues where it ended; other options than before, is: table ")


def test_the_stream_of_a_sink_may_be_named_or_the_default(tmp_path: Path) -> None:
    ran(tmp_path)
    alarms = "- name: alarms\n"
    named = FILE.replace(alarms, f"{alarms}    from: stretches\n")
    assert told(tmp_path, named) == [("=", "sink rows"), ("=", "sink alarms")]
    plausible = FILE.replace("from: once\n", "from: plausible\n")
    ran(tmp_path / "stateless", plausible)
    other = plausible.replace("from: plausible\n    table", "from: parsed\n    table")
    change, *_ = changes(parse(other), tmp_path / "stateless") or []
    assert change == PlanChange("~", "sink rows", "continues where it ended; read plausible; reads parsed")


def test_a_renamed_sink_is_shown_as_what_it_does(tmp_path: Path) -> None:
    table = tmp_path / "rows"
    text = FILE.replace("lake/rows", f"{table}, format: parquet")
    ran(tmp_path / "state", text)
    for batch in range(2):
        create_json(table / "_commits" / f"rows-{batch}.json", {})
    (found,) = [
        each
        for each in changes(parse(text.replace("name: rows", "name: lines")), tmp_path / "state") or ()
        if each.mark == ASKED
    ]
    assert found.what == "sink lines"
    assert found.text.endswith(
        f"{table} has 2 batches of it, and would have these rows twice; to continue, keep the name rows"
    )
    # Another table under another name is a new sink.
    other = text.replace("name: rows", "name: lines").replace(str(table), str(tmp_path / "lines"))
    assert ("+", "sink lines") in told(tmp_path / "state", other)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ("flow DOUBLE", None),
        ("flow STRING", "column 'flow' is STRING now, in"),
        ("flow INT", "it is DOUBLE"),
        ("flow DECIMAL(3, 2)", None),
    ],
)
def test_a_column_of_another_type_than_in_the_table_is_refused(given: str, refused: str | None, tmp_path: Path) -> None:
    table = tmp_path / "rows"
    text = FILE.replace("lake/rows", str(table))
    ran(tmp_path / "state", text)
    kinds = {"branch": "string", "time": "timestamp", "flow": "double", "n": {"type": "array", "elementType": "long"}}
    spark = {"type": "struct", "fields": [{"name": name, "type": kind} for name, kind in kinds.items()]}
    schema = pa.schema([], metadata={"org.apache.spark.sql.parquet.row.metadata": json.dumps(spark)})
    table.mkdir()
    pq.write_table(schema.empty_table(), table / "part.parquet")
    commit = {"writer": "rows", "batch": 0, "query": "q", "rows": 0, "files": ["part.parquet"]}
    create_json(table / "_commits" / "rows-0.json", commit)
    pipeline = parse(text.replace("flow DOUBLE", given).replace("flow >= 0", "branch > ''"))
    found = [each for each in changes(pipeline, tmp_path / "state") or () if each.mark == "!"]
    if refused is None:
        assert found == []
        check_table_types(pipeline)
        return
    assert refused in found[0].text
    with pytest.raises(ConfigError, match=refused):
        check_table_types(pipeline)


def test_a_table_that_a_sink_wrote_with_another_checkpoint_is_refused(tmp_path: Path) -> None:
    """The sink would write all rows again; a run finds it before Spark starts."""
    text, state = FILE.replace("lake/rows", str(tmp_path / "rows")), tmp_path / "state"
    create_json(
        tmp_path / "rows" / "_commits" / "rows-0.json",
        {"writer": "rows", "batch": 0, "query": "q", "rows": 0, "files": []},
    )
    ran(state, text)
    check_new_sinks(parse(text), state)
    assert told(state, text) == [("=", "sink rows"), ("=", "sink alarms")]
    layout.checkpoint(state, "rows").rmdir()
    assert told(state, text) == [("!", "sink rows"), ("=", "sink alarms")]
    for directory in (state, tmp_path / "none"):
        with pytest.raises(ConfigError, match="has batches that it wrote with another checkpoint"):
            check_new_sinks(parse(text), directory)
    check_new_sinks(parse(text.replace("name: rows", "name: lines")), state)


def test_a_table_of_late_records_has_the_checkpoint_of_its_window(tmp_path: Path) -> None:
    table, state = tmp_path / "late", tmp_path / "state"
    text = f"""
name: windows
source: {{topics: [t]}}
steps:
  - {{name: parsed, parse: {{schema: "at TIMESTAMP NOT NULL"}}}}
  - name: hours
    window: {{time: at, duration: 1 hour, watermark: 1 hour, emit: closed, aggregates: {{n: count(*)}}}}
sinks:
  - {{name: rows, table: {{path: {tmp_path}/rows}}}}
  - {{name: late, from: hours.late, table: {{path: {table}}}}}
"""
    create_json(
        table / "_commits" / "late-0.json", {"writer": "late", "batch": 0, "query": "q", "rows": 0, "files": []}
    )
    with pytest.raises(ConfigError, match="has batches that it wrote with another checkpoint"):
        check_new_sinks(parse(text), state)
    layout.checkpoint(state, "rows").mkdir(parents=True)
    check_new_sinks(parse(text), state)


def test_other_partitions_than_those_of_the_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    text = FILE.replace("path: lake/rows", f"path: {path}, partition_by: [branch]")
    DeltaTable.create(path, pa.table({"branch": ["a"], "flow": [0.5]}).schema, partition_by=["branch"])
    check_table_types(parse(text))
    other = text.replace("partition_by: [branch]", 'partition_by: ["bucket(4, branch)"]')
    with pytest.raises(
        ConfigError, match=r"partition_by: \[bucket\(4, branch\)\], the table .* is partitioned by branch"
    ):
        check_table_types(parse(other))
    ran(tmp_path / "state", text)
    refused = [each for each in changes(parse(other), tmp_path / "state") or () if each.mark == "!"]
    assert [each.what for each in refused] == ["sink rows"]


def test_changes_that_are_incompatible_with_the_checkpoint_are_reported(tmp_path: Path) -> None:
    ran(tmp_path)
    found = changes(parse(FILE.replace("duration: 3 hours", "duration: 4 hours")), tmp_path) or []
    (refused,) = [change for change in found if change.mark == "!"]
    assert refused.what == "sink alarms"
    assert refused.text.startswith("its window changed since its checkpoint was created")


def test_a_change_that_a_new_start_would_refuse_is_not_refused_with_the_advice_to_start(tmp_path: Path) -> None:
    ran(tmp_path)
    changed = FILE.replace("duration: 3 hours", "duration: 4 hours")
    with pytest.raises(RefusedError, match="sink alarms: its window changed") as refused:
        check_applicable(parse(), parse(changed), tmp_path)
    assert "give the sink a new name" in (refused.value.hint or "")
    with pytest.raises(RefusedError, match="keeps state") as refused:
        check_applicable(parse(), parse(FILE.replace("flow >= 0", "flow > 0")), tmp_path)
    assert "stop the run" in (refused.value.hint or "")


def test_state_of_a_version_that_kept_no_plan(tmp_path: Path) -> None:
    ran(tmp_path)
    layout.plan(tmp_path).unlink()
    assert told(tmp_path, FILE.replace("name: rows", "name: lines")) == [("+", "sink lines"), ("=", "sink alarms")]


JOINED = """\
name: cycles
sources:
  commands: {topics: [commands]}
  answers: {topics: [answers]}
steps:
  - name: sent
    from: commands
    parse: {schema: "machine STRING NOT NULL, command INT, at TIMESTAMP, force FLOAT"}
  - name: answered
    from: answers
    parse: {schema: "machine STRING NOT NULL, command INT, received_at TIMESTAMP, code INT"}
  - name: cycle
    from: sent
    join: {with: answered, on: [machine, command], left_time: at, right_time: received_at,
           within: {after: 1 minute}, watermark: 30 seconds, as: answer}
sinks:
  - name: cycles
    table: {path: lake/cycles}
"""


@pytest.mark.parametrize(
    ("old", "new", "column", "types"),
    [
        ("force FLOAT", "force DOUBLE", "left column force", "was: FLOAT; is: DOUBLE"),
        ("code INT", "code BIGINT", "right column code", "was: INT; is: BIGINT"),
        ("command INT", "command BIGINT", "left column command", "was: INT; is: BIGINT"),
    ],
)
def test_a_changed_type_in_the_state_of_a_join_is_refused(
    old: str, new: str, column: str, types: str, tmp_path: Path
) -> None:
    ran(tmp_path, JOINED)
    (refused,) = [change for change in changes(parse(JOINED.replace(old, new)), tmp_path) or () if change.mark == "!"]
    assert refused.what == "sink cycles"
    assert f"its join's {column} changed since" in refused.text
    with pytest.raises(ConfigError) as error:
        check_shapes(parse(JOINED.replace(old, new)), tmp_path)
    assert f"its join's {column} changed since" in error.value.what
    assert error.value.why == types
    assert [change.mark for change in changes(parse(JOINED), tmp_path) or ()] == ["="]
