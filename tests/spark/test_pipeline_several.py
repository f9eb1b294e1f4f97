"""Several pipelines in one application, against a real node."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.run import application
from penstock.pipelines.run.lease import lease_holder
from penstock.pipelines.run.run import RunOptions
from penstock.pipelines.spec import loader
from penstock.pipelines.state_dir import layout
from penstock.tube.record import Record
from tests.spark.node import Node
from tests.spark.pipelines import Shared

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL"}}
  - name: computed
    sql: SELECT n, {expression} AS made FROM parsed
sinks:
  - name: rows
    table: {{path: "{lake}/{name}"}}
"""
pytestmark = pytest.mark.timeout(600)


def test_pipelines_with_the_same_names_of_steps_and_one_that_fails(
    spark: SparkSession, node: Node, new_topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "pipeline_session", lambda *_args, **_options: Shared(spark))
    topic = new_topic(1)
    node.append(topic, [(0, Record(json.dumps({"n": n}).encode(), id=f"m{n}")) for n in range(50)])
    expressions = {f"{topic}-a": "n * 2", f"{topic}-b": "n + 1000", f"{topic}-c": "no_such_function(n)"}
    members = []
    for name, expression in expressions.items():
        text = FILE.format(
            name=name, topic=topic, expression=expression, master=node.master, broker=node.mqtt, lake=tmp_path / "lake"
        )
        members.append(application.Member(loader.parse(text, name=f"{name}.yaml"), tmp_path / "state" / name))
    events: list[dict[str, Any]] = []
    errors = application.run_all(
        members, options=RunOptions(available_now=True), emit=events.append, stop=threading.Event()
    )
    first, second, broken = expressions
    assert list(errors) == [broken]
    assert "no_such_function" in str(errors[broken])
    assert {event["pipeline"] for event in events} == set(expressions)
    assert [event["pipeline"] for event in events if event["event"] == "failed"] == [broken]
    for name, made in ((first, [n * 2 for n in range(50)]), (second, [n + 1000 for n in range(50)])):
        rows = pa.table(DeltaTable(tmp_path / "lake" / name).to_pyarrow_table())
        assert sorted(str(value) for value in rows["made"].to_pylist()) == sorted(map(str, made))
        assert Ledger(layout.ledger(tmp_path / "state" / name)).counts("rows").out == 50
        # The lease is that of the pipeline, and free again.
        holder = lease_holder(node.mqtt, name, 10.0)
        assert holder.run is None
        assert holder.record is not None
        assert holder.record.state == "stopped"
