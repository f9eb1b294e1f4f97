"""Files of JSON and CSV for other programs, in whole pipelines."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.files import write_lines
from penstock.pipelines.spec.sinks import FilesSink
from penstock.spark.files.object_storage import ObjectPath, storage_path
from tests.object_storage import ObjectStorage
from tests.spark.pipelines import Setup

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: 4}}}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: "{lake}/dead"}}
trigger: 50 milliseconds
steps:
  - name: rows
    parse: {{schema: "n INT NOT NULL, at TIMESTAMP, text STRING, tags ARRAY<STRING>"}}
sinks:
  - name: json
    files: {{path: "{lake}/json"}}
  - name: csv
    files: {{path: "{lake}/csv", format: csv, columns: [text, n, at], order_by: n, compression: gzip, delimiter: ";"}}
"""
TEXTS = ['a "quoted" one', "two\nlines", "", None, "semi;colon", "\\back", "ü", " spaces "]


def test_each_batch_is_a_file_that_other_programs_read(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of(FILE, 1)
    rows = [{"n": -n, "at": f"2026-01-05T10:00:00.00000{n}Z", "text": t, "tags": [str(n)]} for n, t in enumerate(TEXTS)]
    setup.send(*(json.dumps(row).encode() for row in rows[:5]), b"nope")
    setup.send(*(json.dumps(row).encode() for row in rows[5:]))
    setup.run()

    files = sorted((setup.lake / "json").glob("*.json"))
    query = setup.state / "checkpoints" / "json" / "metadata"
    short = json.loads(query.read_text())["id"][:8]
    name = setup.pipeline.name
    assert [file.name for file in files] == [f"{name}-json-{short}-{batch:010}.json" for batch in range(len(files))]
    assert len(files) > 1
    read = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert sorted(read, key=lambda row: -row["n"]) == rows

    packed = sorted((setup.lake / "csv").glob("*.csv.gz"))
    fields: list[list[str]] = []
    for file in packed:
        with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
            header, *found = csv.reader(lines, delimiter=";")
        assert header == ["text", "n", "at"]
        numbers = [int(row[1]) for row in found]
        assert numbers == sorted(numbers)
        fields += found
    expected = [[row["text"] or "", str(row["n"]), row["at"]] for row in rows]
    assert sorted(fields, key=lambda row: -int(row[1])) == expected
    # An empty text is quoted, and a missing one is not.
    first = gzip.decompress(packed[0].read_bytes()).decode()
    assert '"";-2;' in first
    assert "\n;-3;" in first

    # As after a crash between the sink and the commit, when a program has taken the files away.
    for file in (*files, *packed):
        file.unlink()
    setup.forget_the_last_data("json")
    setup.run()
    assert list((setup.lake / "json").glob("*.json")) == []
    accounts = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert [account.off for account in accounts] == [(), ()]
    sums = [setup.ledger.counts(sink) for sink in ("json", "csv")]
    assert [(s.read, s.out, s.dead) for s in sums] == [(9, 8, 1)] * 2


IN_BUCKET = """\
name: {{name}}
source: {{{{topics: ["{{topic}}"], master: "{{master}}"}}}}
statestore: {{{{broker: "{{broker}}"}}}}
steps:
  - name: rows
    parse: {{{{schema: "n INT NOT NULL"}}}}
sinks:
  - name: json
    files: {{{{path: "{url}", endpoint: "{endpoint}"}}}}
"""


def test_files_in_a_bucket_need_no_jars(setup_of: Callable[..., Setup], object_storage: ObjectStorage) -> None:
    setup = setup_of(IN_BUCKET.format(url=object_storage.url, endpoint=object_storage.endpoint))
    setup.send(b'{"n": 1}', b'{"n": 2}')
    setup.run()
    setup.forget_the_last_data("json")
    setup.run()
    out = storage_path(object_storage.url)
    assert isinstance(out, ObjectPath)
    (name,) = out.names()
    assert sorted((out / name).read_bytes().splitlines()) == [b'{"n":1}', b'{"n":2}']


def test_a_null_in_the_only_column_of_csv_is_a_line(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.createDataFrame([("a",), (None,), ("",), ("b\r",)], "text STRING")
    write_lines(rows.coalesce(1), FilesSink(path="out", format="csv"), tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.csv")
    with file.open(encoding="utf-8", newline="") as lines:
        assert list(csv.reader(lines)) == [["text"], ["a"], [""], [""], ["b\r"]]
