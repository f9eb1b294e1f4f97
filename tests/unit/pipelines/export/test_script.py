"""Programs of the example and of the documentation's pipelines: layout, what is left out, and variables."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.pipelines.export.code import statement
from penstock.pipelines.export.script import Exported, declarative_project, raw_document, streaming_script
from penstock.pipelines.spec.loader import load
from tests.docs.pages import ROOT, blocks, page_paths

PIPELINES = [
    (page, block)
    for page in page_paths()
    for block in blocks(page)
    if block.language == "yaml" and re.search(r"^name:.*^sinks:", block.text, re.MULTILINE | re.DOTALL)
]
INVALID = ("protobuf.md", "runbooks.md", "run.md")
"""Pages with a pipeline that is invalid here: without another file or a variable, or on purpose."""


def exported(text: str, directory: Path, kind: str = "pyspark", **environment: str) -> Exported:
    file = directory / "pipeline.yaml"
    file.write_text(text, encoding="utf-8")
    pipeline = load(file, environment)
    raw = raw_document(file).data
    if kind == "pyspark":
        return streaming_script(pipeline, raw)
    return declarative_project(pipeline, raw, storage="file:///lake/storage", table_format="parquet")


def program(found: Exported) -> str:
    (text,) = (text for text in found.files.values() if "written by `penstock pipeline export`" in text)
    return text


def test_programs_of_all_pages_have_the_layout_of_a_formatter(tmp_path: Path) -> None:
    made = 0
    refused: list[tuple[str, str]] = []
    for page, block in PIPELINES:
        directory = tmp_path / page.stem
        directory.mkdir(exist_ok=True)
        for other in blocks(page):
            if other.directive.startswith("file "):
                path = directory / other.directive.removeprefix("file ").strip()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(other.text, encoding="utf-8")
        for kind in ("pyspark", "declarative"):
            try:
                found = exported(block.text, directory, kind)
            except ConfigError as error:
                refused.append((page.name, str(error)))
                continue
            made += 1
            (directory / f"program_{block.line}_{kind}.py").write_text(program(found), encoding="utf-8")
    for name, text in refused:
        assert name in INVALID or re.match(r"no sink of pipeline '.*' can be exported\n  why: .", text), text
    for each in (ROOT / "examples" / "water", ROOT / "examples" / "reference"):
        made += 1
        text = (each / "pipeline.yaml").read_text(encoding="utf-8")
        (tmp_path / f"program_{each.name}.py").write_text(program(exported(text, tmp_path)), encoding="utf-8")
    programs = list(tmp_path.rglob("program_*.py"))
    assert len(programs) == made > 25
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    options = ["--isolated", "--line-length", "100"]
    subprocess.run([*ruff, "format", "--check", *options, *programs], check=True)
    subprocess.run([*ruff, "check", "--select", "F,I", "--isolated", *programs], check=True)


def test_the_page_shows_the_program(tmp_path: Path) -> None:
    page = blocks(ROOT / "docs" / "pipelines" / "export.md")
    pipeline, shown = (next(each.text for each in page if each.language == name) for name in ("yaml", "python"))
    assert shown in program(exported(pipeline, tmp_path))


PIPELINE = """\
name: plant
source:
  topics: [telemetry]
  master: "${MASTER}"
  options: {tubemq.user: "${PLANT_USER:-water}", tubemq.passwordFile: /secrets/tube}
statestore: {broker: "mqtts://water:${file:secret}@edge-7"}
steps:
  - name: readings
    parse: {schema: "machine STRING, celsius DOUBLE, at TIMESTAMP"}
  - name: hot
    sql: "SELECT machine, concat(machine, ',(') AS `a, b`, celsius IS DISTINCT FROM 3 AS odd FROM readings"
sinks:
  - name: hot
    mqtt: {topic: "hot/{machine}"}
"""


def test_variables_and_secrets_are_read_when_the_program_starts(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cr3t-value\n")
    text = program(exported(PIPELINE, tmp_path, MASTER="tube-1:8715"))
    assert 'os.environ["MASTER"]' in text
    assert 'os.environ.get("PLANT_USER", "water")' in text
    assert 'BROKER = "mqtts://water:" + Path("secret").read_text().splitlines()[0] + "@edge-7"' in text
    assert "s3cr3t-value" not in text
    assert "tube-1" not in text
    assert '"celsius IS DISTINCT FROM 3 AS odd"' in text
    assert "\"concat(machine, ',(') AS `a, b`\"" in text


def test_a_secret_elsewhere_in_the_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_text("s3cr3t-value\n")
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        PIPELINE.replace("${MASTER}", "tube-1:8715").replace("concat(machine, ',(')", "'${file:secret}'"),
        encoding="utf-8",
    )
    assert main(["pipeline", "export", str(file), "--directory", str(tmp_path / "out")]) == 2
    assert "would be part of the program" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


LEFT_OUT = """\
name: plant
source: {topics: [telemetry]}
steps:
  - name: readings
    parse: {schema: "machine STRING, celsius DOUBLE, at TIMESTAMP"}
  - name: placed
    enrich: {key: machines, match: {id: machine}, as: place, schema: hall STRING}
  - name: hours
    from: readings
    window: {time: at, duration: 1 hour, watermark: 1 hour, aggregates: {n: count(*)}}
sinks:
  - {name: readings, from: readings, table: {path: lake/readings}}
  - {name: placed, from: placed, table: {path: lake/placed}}
  - {name: late, from: hours.late, table: {path: lake/late}}
  - {name: small, from: readings, statestore: {entries: [{key: "at/{machine}"}], max_bytes: 10}}
  - {name: hours, statestore: {entries: [{key: "hour/{window_start}"}]}}
"""


def test_what_cannot_be_exported_is_marked_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = exported(LEFT_OUT, tmp_path)
    assert found.left_out == {
        "placed": "step placed looks up a dataset (match); write it to a table, and join that table",
        "late": "Spark drops late records of a window, so there are no rows for it",
        "small": "it has the option max_bytes, which programs cannot have",
    }
    text = program(found)
    assert "# Left out: sink late. Spark drops late records" in text
    functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert {"write_readings", "write_hours"} < functions
    assert not {"write_placed", "write_late", "step_placed"} & functions
    project = exported(LEFT_OUT, tmp_path, "declarative")
    assert set(project.left_out) == {"placed", "late", "small", "hours"}
    assert list(project.files) == ["spark-pipeline.yml", "transformations/plant.py"]
    with pytest.raises(ConfigError, match=r"Parquet tables only; export it with --table-format parquet"):
        declarative_project(load(tmp_path / "pipeline.yaml"), {}, storage="file:///lake/storage")

    command = ["pipeline", "export", str(tmp_path / "pipeline.yaml"), "--directory", str(tmp_path / "out")]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path}/out/plant.py\n"
    assert "sink placed is left out: step placed looks up" in printed.err
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_password_file_of_the_state_store_is_not_part_of_a_program(tmp_path: Path) -> None:
    store = "statestore: {username: plant, password_file: /secret}"
    text = f"""\
name: plant
source: {{topics: [telemetry]}}
{store}
steps: [{{name: readings, parse: {{schema: "machine STRING"}}}}]
sinks: [{{name: keys, statestore: {{entries: [{{key: "last/{{machine}}"}}]}}}}, {{name: rows, table: {{path: rows}}}}]
"""
    assert list(exported(text, tmp_path).left_out) == ["keys"]


NEWER = """\
name: plant
source: {topics: [telemetry]}
steps:
  - name: readings
    parse: {schema: "machine STRING, celsius DOUBLE, at TIMESTAMP"}
  - name: changes
    from: source
    parse: {schema: "machine STRING, celsius DOUBLE, at TIMESTAMP", allow_empty: true}
  - name: limits
    from: readings
    enrich: {key: "limit/{machine}", as: limit, schema: high DOUBLE, as_of: {time: at, topic: changes}}
  - name: pairs
    from: readings
    join:
      {with: changes, on: [machine], left_time: at, right_time: at, within: {after: 1 hour}, watermark: 1 hour, as: b}
  - name: parts
    from: readings
    explode: {column: tags, as: tag}
  - {name: moved, from: readings, deadband: {by: [machine], time: at, columns: {celsius: 0.5}}}
sinks:
  - {name: pairs, from: pairs, console: {}}
  - {name: moved, from: moved, console: {}}
  - {name: changes, from: changes, table: {path: lake/changes}}
  - {name: limits, from: limits, table: {path: lake/limits}}
  - {name: rows, from: readings, postgresql: {url: "postgresql://water@db/plant", table: rows}}
  - name: current
    from: readings
    table: {path: lake/current, mode: merge, keys: [machine], order_by: at, delete_when: celsius IS NULL}
  - name: newest
    from: parts
    table: {path: lake/newest, mode: merge, keys: [machine], order_by: at, partition_by: ['bucket(4, machine)']}
"""


FILES = """\
name: plant
source: {topics: [t]}
steps: [{name: readings, parse: {schema: "machine STRING, celsius DOUBLE"}}]
sinks:
  - {name: lines, files: {path: out/lines, format: csv, columns: [celsius], delimiter: ";", compression: gzip}}
  - {name: all, files: {path: out/all}}
  - {name: sorted, files: {path: out/sorted, order_by: celsius}}
"""


def test_files_are_those_of_spark(tmp_path: Path) -> None:
    found = exported(FILES, tmp_path)
    assert found.left_out == {"sorted": "it orders the rows of a file (order_by), which needs foreachBatch"}
    lines = "".join(line.strip() for line in program(found).splitlines())
    assert 'rows = rows.select("celsius")' in lines
    assert '.format("csv")' in lines
    for option in ('"sep", ";"', '"compression", "gzip"', '"ignoreTrailingWhiteSpace", "false"', '"header", "true"'):
        assert f".option({option})" in lines
    assert "rows = rows.select(*data_columns(rows))" in lines
    with pytest.raises(ConfigError, match="it writes a file for each batch, which needs a query of its own"):
        exported(FILES, tmp_path, "declarative")


def test_a_column_is_sent_as_text_or_as_its_bytes(tmp_path: Path) -> None:
    """A cast of a number to BINARY has its bytes, one of bytes to STRING is no text."""
    text = """\
name: p
source: {topics: [t]}
steps:
  - {name: raw, parse: {format: raw, schema: body BINARY}}
  - {name: counted, map: {compute: {n: length(body)}}}
sinks:
  - {name: numbers, tubemq: {topic: a, value: n}}
  - {name: bodies, mqtt: {topic: b, value: body}}
"""
    found = program(exported(text, tmp_path))
    assert 'sf.col("n").cast("string").cast("binary").alias("value")' in " ".join(found.split())
    assert 'sf.col("body").cast("string").cast("binary").alias("payload")' in " ".join(found.split())


def test_options_that_need_a_run_are_left_out_and_partitions_of_merged_tables_are_written(tmp_path: Path) -> None:
    found = exported(NEWER.replace("at TIMESTAMP", "at TIMESTAMP, tags ARRAY<STRING>", 1), tmp_path)
    reasons = {
        "changes": r"step changes accepts records without a payload \(allow_empty\)",
        "limits": r"step limits joins with the values that keys had .* \(as_of\)",
        "pairs": "step pairs joins two streams",
        "moved": "step moved is a deadband step, which programs cannot have",
        "rows": "it writes each batch and its number to PostgreSQL in one transaction",
        "current": r"it deletes rows of the table \(delete_when\)",
    }
    assert found.left_out.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert re.match(reason, found.left_out[name]), found.left_out[name]
    lines = "".join(line.strip() for line in program(found).splitlines())
    assert '.partitionBy("machine_bucket_4").mode("ignore").save(target)' in lines
    assert 'sf.col("at").desc_nulls_last(), "_id", "_part"' in lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("x = f(1)", ["    x = f(1)"]),
        ("return a.b('x').c()", ['    return a.b("x").c()']),
        (
            f"rows = rows.read('{'x' * 60}').where('{'y' * 40}').load()",
            [
                "    rows = (",
                f'        rows.read("{"x" * 60}")',
                f'        .where("{"y" * 40}")',
                "        .load()",
                "    )",
            ],
        ),
    ],
)
def test_statements_are_broken_like_those_of_a_formatter(text: str, lines: list[str]) -> None:
    assert statement(text) == lines


def test_renamed_columns_get_their_names_at_once(tmp_path: Path) -> None:
    text = (
        "name: p\nsource: {topics: [t]}\nsteps:\n"
        '  - {name: parsed, parse: {schema: "a INT, b INT, c INT, s STRUCT<low: INT, high: INT>"}}\n'
        "  - {name: swapped, map: {rename: {a: b, b: a, s.low: Low}}}\n"
        "  - {name: other, map: {rename: {c: d, s.high: top}}}\n"
        "sinks: [{name: rows, console: {}}]\n"
    )
    lines = [line.strip() for line in program(exported(text, tmp_path)).splitlines()]
    assert [line for line in lines if "withColumnRenamed" in line] == [
        'rows = rows.withColumnRenamed("a", "_renamed_0")',
        'rows = rows.withColumnRenamed("b", "_renamed_1")',
        'rows = rows.withColumnRenamed("_renamed_0", "b")',
        'rows = rows.withColumnRenamed("_renamed_1", "a")',
        'rows = rows.withColumnRenamed("c", "d")',
    ]
    assert [line for line in lines if "withField" in line] == [
        'rows = rows.withColumn("s", sf.col("s").withField("Low", sf.col("s.low")))',
        'rows = rows.withColumn("s", sf.col("s").withField("top", sf.col("s.high")).dropFields("high"))',
    ]
