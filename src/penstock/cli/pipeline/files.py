"""Commands of `penstock pipeline` on files: `init`, `infer`, `validate`, `plan`, `schema` and `test`."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from penstock.cli.options import DEFAULT, Json, local_addresses, shared_options
from penstock.cli.output import escape, note, print_error, print_json, text_width, unless_standard, use_colour
from penstock.cli.pipeline.completion import complete_case, complete_source, complete_valid_file
from penstock.cli.pipeline.options import File, Into, StateDir, needs_spark, run_of
from penstock.cli.pipeline.registry import RegistryOptions, print_subject
from penstock.cli.tube.access import MasterOptions, complete_topic, connects_to_master
from penstock.errors import ConfigError, StorageError, UnavailableError
from penstock.runtime.io.process_end import end_at_sigterm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.pipelines.ledger.plan_changes import PlanChange
    from penstock.pipelines.spec.inference import InferredSchema
    from penstock.pipelines.testing.runner import Outcome

__all__ = ["infer", "init", "lines_of", "run_cases", "schema", "show_plan", "validate"]

_SAMPLES = 1000
"""Newest records of each partition from which columns are inferred."""

Source = Literal["tubemq", "mqtt", "files"]

_FILE = """\
# Check this pipeline:        penstock pipeline validate {file}
# Test it without a node:     penstock pipeline test {file}
# Show its steps and sinks:   penstock pipeline plan {file}
# Run it:                     penstock pipeline run {file}
# For completion in an editor: penstock pipeline schema > pipeline.schema.json
# yaml-language-server: $schema=pipeline.schema.json

name: {name}

{source}
# The state store: lease of the run, and keys for enrich steps. ${{VAR:-default}} is read from the environment.
statestore: {statestore}

# Table of records that a step cannot process: the original bytes and the reason.
dead_letters: {{path: lake/{dead_letters}}}

{rest}"""
_STEPS = """\
steps:
  # Parse the payload into columns. Invalid records become dead letters.
  - name: readings
    parse:
{parse}
  # Keep plausible rows; others are counted as filtered.
  - name: plausible
    filter: celsius BETWEEN -50 AND 500
  # Compute columns with SQL.
  - name: judged
    map: {{compute: {{hot: celsius > 90}}}}

sinks:
  # Write each row exactly once.
  - name: readings
    table: {{path: lake/readings}}
  # Write the newest reading of each machine to a key of the state store.
  - name: newest
    statestore:
      order_by: time
      entries: [{{key: "{name}/newest/{{machine}}", value: [time, celsius, hot]}}]
"""
_STEPS_OF_TOPIC = """\
# More steps: map, filter, enrich, dedupe, window, expectations. Show rows after each one for the newest records:
#   penstock pipeline sample {file}
steps:
  # Parse the payload into columns, inferred from {samples} records. Invalid records become dead letters.
{notes}  - name: {name}
    parse:
      schema: {columns}

sinks:
  # Write each row exactly once.
  - name: {name}
    table: {{path: lake/{name}}}
"""
_CASES_OF_TOPIC = """\
# Test cases: penstock pipeline test {file}
cases:
  - name: a record of the topic
    input:
      - value: {good}
      - value: not a record
    expect:
      {name}: [{row}]
    dead_letters: [{{step: {name}, value: not a record}}]
"""
_SOURCES: dict[Source, str] = {
    "tubemq": """\
# TubeMQ topics. Create one with: penstock tube topic create telemetry
source:
  topics: [telemetry]
  master: "${PENSTOCK_TUBE_MASTER:-127.0.0.1:8715}"
""",
    "mqtt": """\
# MQTT messages, from the TubeMQ topic to which a rule of the node copies them.
source:
  format: mqtt
  tube_topic: telemetry
  topic_filter: plant/+/telemetry
  master: "${PENSTOCK_TUBE_MASTER:-127.0.0.1:8715}"
""",
    "files": """\
# Files of a directory, each once. Write a file in another directory and rename it when it is complete.
source: {format: files, path: "in/*.csv", skip_lines: 1}
""",
}
_SCHEMA = "      schema: machine STRING NOT NULL, time TIMESTAMP NOT NULL, celsius DOUBLE NOT NULL"
_PARSE: dict[Source, str] = {"files": f"      format: csv\n{_SCHEMA}"}
_CASES = """\
# Test cases: penstock pipeline test {file}
cases:
  - name: a hot machine
    input:
      - value: {good}
      - value: not a reading
    expect:
      readings: [{{machine: press, celsius: 93.5, hot: true}}]
      newest: {{{name}/newest/press: {{celsius: 93.5, hot: true}}}}
    dead_letters: [{{step: readings, value: not a reading}}]
"""
_GOOD: dict[Source, str] = {"files": '"press,2024-05-01T06:00:00Z,93.5"'}
_GOOD_JSON = '{machine: press, time: "2024-05-01T06:00:00Z", celsius: 93.5}'


@connects_to_master
def init(
    master: MasterOptions,
    file: Annotated[
        Path, typer.Argument(help="File to create, with NAME.test.yaml next to it.", metavar="FILE")
    ] = Path("pipeline.yaml"),
    name: Annotated[
        str | None,
        typer.Option(help="Name of the pipeline. Default: that of the directory.", metavar="NAME", show_default=False),
    ] = None,
    source: Annotated[Source, typer.Option(help="Source of the records.")] = "tubemq",
    topic: Annotated[
        str | None,
        typer.Option(
            help="Write the records of this TubeMQ topic to a table; the columns are inferred from the newest records, "
            "which must be JSON.",
            metavar="TOPIC",
            show_default=False,
            autocompletion=complete_topic,
        ),
    ] = None,
) -> None:
    """Create a commented pipeline file and a test case for it. Existing files are not overwritten.

    Without --topic the file is an example to edit. With --topic it can run.
    """
    if topic is not None and source != "tubemq":
        raise ConfigError(
            f"--topic and --source {source} exclude each other",
            option="--topic",
            why="the records of a topic are read with the source tubemq, also those that a rule copied from MQTT",
            hint="omit --source",
        )
    from penstock.pipelines.spec.loader import load
    from penstock.pipelines.testing.cases import cases_path, load_cases

    cases = cases_path(file)
    for path in (file, cases):
        if path.exists():
            raise ConfigError(f"{path} exists already", option="file", hint="name another file")
    named = name or _named_after(file.absolute().parent)
    text, case = _example(file, named, source) if topic is None else _pipeline_of_topic(file, named, topic, master)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        cases.write_text(case, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{error.filename} cannot be written: {error.strerror}", path=str(file)) from error
    try:
        load_cases(cases, load(file))
    except ConfigError:
        # An invalid name: delete the files, so that the next attempt can create them.
        file.unlink()
        cases.unlink()
        raise
    sys.stdout.write(f"wrote {file} and {cases}\n")
    then = "plan" if topic is None else "run"
    sys.stdout.write(f"next: penstock pipeline test {file}, then penstock pipeline {then} {file}\n")


def _example(file: Path, name: str, source: Source) -> tuple[str, str]:
    """Return the text of an example of a pipeline, and that of its test cases."""
    steps = _STEPS.format(name=name, parse=_PARSE.get(source, _SCHEMA))
    text = _FILE.format(
        file=file, name=name, source=_SOURCES[source], rest=steps, dead_letters="dead_letters",
        statestore=f'{{broker: "${{PENSTOCK_BROKER:-{DEFAULT}}}"}}',
    )  # fmt: skip
    return text, _CASES.format(file=file, name=name, good=_GOOD.get(source, _GOOD_JSON))


def _pipeline_of_topic(file: Path, name: str, topic: str, master: MasterOptions) -> tuple[str, str]:
    """Return the text of a pipeline that writes the records of ``topic`` to a table, and that of its test cases.

    Raises:
        ConfigError: none of the newest records is a JSON object.
        RefusedError, UnavailableError: the topic does not exist, or no broker responds.
    """
    samples = list(_records_of(topic, master, _SAMPLES))
    found = _inferred(samples, f"topic {topic!r}", "--topic")
    if found.refused:
        note(f"{found.refused} of {found.refused + found.samples} records are not JSON objects: {found.example}")
    notes = [*found.notes, *(text for column in found.columns for text in column.notes)]
    step = _step_name(topic)
    steps = _STEPS_OF_TOPIC.format(
        file=file,
        samples=found.samples,
        notes="".join(f"{line}\n" for text in notes for line in _as_comment(text)),
        name=step,
        columns=_schema_as_yaml([column.ddl(nullable=False) for column in found.columns]),
    )
    options = master.spark_options()
    source = {
        "topics": _as_yaml([topic]),
        **({"options": _as_yaml(options)} if options else {}),
        "master": json.dumps(f"${{PENSTOCK_TUBE_MASTER:-{master.tube_master}}}"),
    }
    broker = local_addresses({}, {"broker": False}).get("broker", DEFAULT)
    store = {"broker": json.dumps(f"${{PENSTOCK_BROKER:-{broker}}}")}
    if master.username is not None:
        store |= {"username": _as_yaml(master.username), "password_file": _as_yaml(str(master.password_file))}
    text = _FILE.format(
        file=file, name=name, source=f"source: {_yaml_mapping(source)}\n", rest=steps, statestore=_yaml_mapping(store),
        dead_letters=f"{step}_dead_letters",
    )  # fmt: skip
    good, row = _sample_row(samples, found)
    return text, _CASES_OF_TOPIC.format(file=file, name=step, good=_as_yaml(good), row=_as_yaml(row))


def _as_yaml(value: object) -> str:
    """Return ``value`` on one line; ``${`` in its texts, and characters that YAML does not permit, are escaped."""
    if isinstance(value, dict):
        return _yaml_mapping({_quoted(name): _as_yaml(inner) for name, inner in value.items()})
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    # Variables are replaced in values, not in keys.
    return _quoted(value.replace("${", "$${")) if isinstance(value, str) else json.dumps(value)


def _yaml_mapping(values: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(
        c if c.isprintable() else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in quoted
    )


def _schema_as_yaml(columns: Sequence[str]) -> str:
    """Return a schema with a column per line, or on one line if a name has characters that need an escape."""
    if not all(column.isprintable() for column in columns):
        return _as_yaml(", ".join(columns))
    return ">-\n" + textwrap.indent(",\n".join(columns).replace("${", "$${"), " " * 8)


def _inferred(samples: Iterable[tuple[str, str]], name: str, option: str) -> InferredSchema:
    """Return the columns of ``samples``. Raises ConfigError if none has any."""
    from penstock.pipelines.spec.inference import infer_samples

    found = infer_samples(samples)
    if not found.columns:
        raise ConfigError(
            f"{name} has no JSON object with columns",
            option=option,
            why=found.example or None,
            hint=f"give {'a file with a JSON object per line' if option == 'file' else 'a topic with JSON objects'}",
        )
    return found


def _sample_row(samples: Sequence[tuple[str, str]], found: InferredSchema) -> tuple[str, dict[str, object]]:
    """Return the newest sample that fits all columns, and its row, without values that may be converted (times).

    The row is empty only if no sample has other values.
    """
    from penstock.spark.option_parsing import json_value

    types = {column.name: column.type for column in found.columns}
    needed = {column.name for column in found.columns if not column.nullable}
    fitting: list[str] = []
    for _, text in reversed(samples):
        try:
            value = json_value(text)
        except ValueError:
            continue
        if isinstance(value, dict) and needed <= value.keys():
            row = {name: value[name] for name, kind in types.items() if _is_unchanged(value.get(name), kind)}
            if row:
                return text, row
            fitting.append(text)
    return fitting[0], {}


def _is_unchanged(value: object, kind: str) -> bool:
    """Whether a column of the type ``kind`` has the ``value`` of the JSON as it is."""
    if type(value) is not {"STRING": str, "BIGINT": int, "BOOLEAN": bool, "DOUBLE": float}.get(kind):
        return False
    if isinstance(value, str):
        return not any("\ud800" <= c <= "\udfff" for c in value)  # half of a pair, which UTF-8 cannot have
    return not isinstance(value, float) or math.isfinite(value)


def _as_comment(text: str) -> list[str]:
    shown = escape(" ".join(text.split()))
    return textwrap.wrap(shown, 100, initial_indent="  # ", subsequent_indent="  # ")


def _step_name(topic: str) -> str:
    """Return a name of a step for a topic."""
    name = re.sub(r"[^a-z0-9_]", "_", topic.lower()).lstrip("0123456789_")[:60]
    return name if name not in {"", "source"} else "records"  # the single source has that name


def _named_after(directory: Path) -> str:
    """Return a name for a pipeline, derived from the name of a directory."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in directory.name.lower())
    return kept.lstrip("0123456789_-")[:63] or "pipeline"


@connects_to_master
@shared_options(RegistryOptions, "schemas")
def infer(
    master: MasterOptions,
    schemas: RegistryOptions,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="File with a JSON object per line; - for standard input.", metavar="[FILE]", show_default=False
        ),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(
            help="Read records of this TubeMQ topic, instead of a file.",
            metavar="TOPIC",
            show_default=False,
            autocompletion=complete_topic,
        ),
    ] = None,
    pipeline: Annotated[
        Path | None,
        typer.Option(
            help="Read records of the source of this pipeline file, which reads Kafka, instead of a file.",
            metavar="FILE",
            show_default=False,
            autocompletion=complete_valid_file,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from-source",
            help="With --pipeline: the source, if the file has several.",
            metavar="NAME",
            show_default=False,
            autocompletion=complete_source,
        ),
    ] = None,
    records: Annotated[
        int,
        typer.Option(
            help="With --topic and --pipeline: read this many of the newest records of each partition.",
            min=1,
            metavar="N",
        ),
    ] = _SAMPLES,
    nullable: Annotated[bool, typer.Option("--nullable", help="No column is NOT NULL.")] = False,
    as_json: Json = False,
) -> None:
    """Print the columns of a parse step for samples in JSON, as a file for its `schema_file`.

    A column has the narrowest type that holds all values; it is NOT NULL if no sample lacks it. Comments say what the
    samples leave open (a column that is always null) or contradict (a column with numbers and texts is STRING), with an
    example and its place: the line, or partition and offset of the record. Samples that are not a JSON object are left
    out with a note. No group's offsets change.

    With --registry, print the schema of a subject, for a step with `encoding: confluent` and `registry`: an Avro schema
    or the descriptor set of Protobuf, with the schemas that it refers to, or a JSON Schema.
    """
    if [file, topic, pipeline, schemas.registry].count(None) != 3:
        raise ConfigError(
            "infer needs samples: a FILE, --topic or --pipeline, or a --registry, and only one of them",
            option="file",
            hint="name a file (- for standard input), or a topic: penstock pipeline infer --topic TOPIC",
        )
    if source is not None and pipeline is None:
        raise ConfigError(
            "--from-source is set without --pipeline", option="--from-source", hint="add --pipeline, or omit it"
        )
    if schemas.registry is not None:
        print_subject(schemas, nullable=nullable, as_json=as_json)
        return
    schemas.check_unused()
    what = "records" if file is None else "lines"
    if file is not None:
        samples, name, option = _samples_of(file), str(file), "file"
    elif topic is not None:
        samples, name, option = _records_of(topic, master, records), f"topic {topic!r}", "--topic"
    else:
        assert pipeline is not None
        samples, name, option = _records_of_source(pipeline, source, records), f"source of {pipeline}", "--pipeline"
    found = _inferred(samples, name, option)
    if found.refused:
        note(f"{found.refused} of {found.refused + found.samples} {what} left out, the first: {found.example}")
    if not as_json:
        sys.stdout.write(found.ddl(nullable=nullable))
        return
    columns = [
        {**column._asdict(), "nullable": nullable or column.nullable, "notes": list(column.notes)}
        for column in found.columns
    ]
    print_json({"columns": columns, "notes": found.notes, "samples": found.samples, "refused": found.refused})


def _samples_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of ``file`` with their places."""
    path = unless_standard(file)
    try:
        data = sys.stdin.buffer.read() if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}", option="file", hint="name a file, or -"
        ) from error
    # Not splitlines: a line separator of Unicode may be part of a text.
    for number, line in enumerate(data.split(b"\n"), 1):
        yield f"line {number}", line.decode("utf-8", "replace")


def _records_of(topic: str, master: MasterOptions, count: int) -> Iterator[tuple[str, str]]:
    """Yield the values of the newest ``count`` records of each partition with their places."""
    from penstock.cli.tube.consume import newest_records, note_undecodable

    undecodable: list[str] = []
    for place, record in newest_records(master.tube_master, topic, master.client(), count, undecodable):
        yield place, record.value.decode("utf-8", "replace")
    if undecodable:
        note_undecodable(undecodable)


def _records_of_source(file: Path, name: str | None, count: int) -> Iterator[tuple[str, str]]:
    """Yield the values of the newest ``count`` records of each partition of a source of the pipeline ``file``."""
    from penstock.pipelines.spec.loader import load
    from penstock.pipelines.spec.sources import KafkaSource, TubeOptions

    inputs = load(file).inputs
    if name is None and len(inputs) == 1:
        (name,) = inputs
    if name is None or name not in inputs:
        raise ConfigError(
            f"{file} has several sources" if name is None else f"{file} has no source {name!r}",
            option="--from-source",
            hint=f"set --from-source to one of {', '.join(inputs)}" if len(inputs) > 1 else "omit --from-source",
        )
    source = inputs[name]
    if not isinstance(source, KafkaSource):
        raise ConfigError(
            f"the source {name!r} of {file} does not read Kafka",
            option="--pipeline",
            hint=f"read its topic: penstock pipeline infer --topic {source.tube_topics()[0]}"
            if isinstance(source, TubeOptions)
            else "give a file with a JSON object per line",
        )
    with needs_spark():
        from penstock.pipelines.testing.sample import newest_values
    for place, value in newest_values(name, source, count):
        yield place, value.decode("utf-8", "replace")


CASES = ".test.yaml"
"""Suffix of test files."""
_PROBLEM = re.compile(r".*?:(?P<line>\d+):(?P<column>\d+): (?:option '(?P<option>.*?)': )?(?P<text>.*)")


def validate(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Pipeline files (YAML) and test files (NAME.test.yaml).",
            metavar="FILE...",
            autocompletion=complete_valid_file,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Check pipeline files without Spark.

    Options, values, names, references, schemas, the syntax of SQL and the columns in it are checked; errors have line
    and column. Functions and types in SQL are checked when the pipeline runs. A test file is checked against its
    pipeline. Exit status 2 if a file is not valid.
    """
    refused = 0
    for file in files:
        try:
            found = _valid(file)
        except ConfigError as error:
            if as_json:
                print_json(_as_json(error, file))
            elif len(files) == 1:
                raise
            else:
                print_error(error)
            refused += 1
        else:
            if as_json:
                print_json({"ok": True, "file": str(file), **found.data})
            else:
                sys.stdout.write("\n  ".join([f"{file}: {found.words}", *found.lines]) + "\n")
    if len(files) > 1 and not as_json:
        sys.stdout.write(f"{len(files) - refused} valid, {refused} not\n")
    if refused:
        raise typer.Exit(2)


class _ValidFile(NamedTuple):
    """Report about a valid file."""

    words: str
    lines: list[str]
    data: dict[str, object]


def _valid(file: Path) -> _ValidFile:
    """Check one file.

    Raises:
        ConfigError: it is not valid.
    """
    from penstock.pipelines.spec.description import query_path
    from penstock.pipelines.spec.loader import load
    from penstock.pipelines.spec.pipeline import plan

    if file.name.endswith(CASES):
        from penstock.pipelines.testing.cases import load_cases

        pipeline = load(file.with_name(file.name.removesuffix(CASES) + file.suffix))
        names = [case.name for case in load_cases(file, pipeline)]
        count = "1 case" if len(names) == 1 else f"{len(names)} cases"
        return _ValidFile(f"{count} of pipeline {pipeline.name!r}", names, {"pipeline": pipeline.name, "cases": names})
    pipeline = load(file)
    plans = plan(pipeline)
    return _ValidFile(
        f"pipeline {pipeline.name!r} is valid",
        [f"{query_path(sink_plan)} -> {sink_plan.sink.name}" for sink_plan in plans],
        {"pipeline": pipeline.name, "sinks": {p.sink.name: [step.name for step in p.steps] for p in plans}},
    )


def show_plan(
    file: File,
    state_dir: StateDir = None,
    into: Into = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print the graph as a Mermaid flowchart.")] = False,
    as_json: Json = False,
) -> None:
    """Show the plan of a pipeline, without Spark.

    For each sink: its steps from the source on, what happens to records that fail, the delivery guarantee, and the
    effect of a run that lost its lease. With --mermaid: the graph.

    For a pipeline that has run, also the changes since: + new, ~ changed, - removed, = continues, ? a renamed sink that
    would write all records again, or a table that was written and does not exist any more, for which a run asks, !
    cannot continue from its checkpoint or in its table. In the last case, and if a table does not exist any more or
    does not fit, a run would fail, and the exit status is 1.
    """
    from penstock.pipelines.ledger.missing_tables import check_missing_tables
    from penstock.pipelines.ledger.plan_changes import (
        REFUSED,
        changes,
        check_feeds,
        check_new_sinks,
        check_table_types,
        check_topics,
    )
    from penstock.pipelines.spec.description import WIDTH, as_data, as_mermaid, as_text
    from penstock.pipelines.spec.sources import FilesSource
    from penstock.pipelines.state_dir.layout import letter_writers, local_directory
    from penstock.pipelines.state_dir.letter_writers import letter_sinks
    from penstock.spark.environment.jars import s3a_jars
    from penstock.spark.files.object_storage import ObjectPath

    pipeline, state, _ = run_of(file, state_dir, into)
    for name, source in pipeline.inputs.items():
        if isinstance(source, FilesSource):
            local_directory(state, name)
    if isinstance(state, ObjectPath):
        s3a_jars()
    if mermaid:
        sys.stdout.write(as_mermaid(pipeline))
        return
    found, letters = changes(pipeline, state), letter_sinks(letter_writers(state))
    if as_json:
        print_json(
            {**as_data(pipeline, letters), "changes": None if found is None else [each.as_json() for each in found]}
        )
    else:
        sys.stdout.write(as_text(pipeline, letters, text_width(WIDTH)))
        if found is not None:
            sys.stdout.write(f"\ncompared with the last run, state in {state}\n")
            sys.stdout.writelines(f"{line}\n" for change in found for line in lines_of(change))
    if found is None:
        try:
            check_table_types(pipeline)
            check_new_sinks(pipeline, state)
        except UnavailableError as error:
            note(f"not compared with the tables: {error.what}; {error.why}")
    check_topics(pipeline)
    check_feeds(pipeline)
    check_missing_tables(pipeline, state)
    if any(change.mark == REFUSED for change in found or ()):
        raise typer.Exit(1)


_COLOURS = {"+": 32, "~": 33, "?": 33, "-": 31, "!": 31}


def lines_of(change: PlanChange) -> list[str]:
    """Format a change as lines of a diff."""
    from penstock.pipelines.spec.description import WIDTH

    text = escape(f"{change.mark} {change.what}: {change.text}")
    made = textwrap.wrap(
        text, text_width(WIDTH), initial_indent="  ", subsequent_indent=" " * 8, break_long_words=False
    )
    colour = _COLOURS.get(change.mark) if use_colour(sys.stdout) else None
    return made if colour is None else [f"\x1b[{colour}m{line}\x1b[0m" for line in made]


def schema() -> None:
    """Print the JSON Schema of the pipeline file, for editors."""
    from penstock.pipelines.spec.loader import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


def _as_json(error: ConfigError, file: Path) -> dict[str, object]:
    """Errors of a pipeline file for programs, one per line of the error."""
    problems = []
    for line in error.what.split("\n"):
        match = _PROBLEM.fullmatch(line)
        problems.append(
            {"line": None, "column": None, "option": None, "text": line}
            if match is None
            else {
                "line": int(match["line"]),
                "column": int(match["column"]),
                "option": match["option"],
                "text": match["text"],
            }
        )
    return {"ok": False, "file": str(file), "problems": problems, "why": error.why, "hint": error.hint}


def run_cases(
    file: File,
    cases: Annotated[
        Path | None,
        typer.Option(help="Test file. Default: FILE with .test.yaml.", metavar="FILE", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            help="Run only this case; repeatable.",
            metavar="NAME",
            show_default=False,
            autocompletion=complete_case,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the test cases of a pipeline: input records, and the expected rows of each sink and dead letters.

    No node is needed: cases contain the data of lookups, and the output of sinks is compared. Differences are printed
    as a diff, expected rows with -, actual rows with +. Exit status 1 if a case fails.
    """
    from penstock.pipelines.spec.loader import load
    from penstock.pipelines.testing.cases import cases_path, load_cases

    pipeline = load(file)
    chosen = load_cases(cases or cases_path(file), pipeline)
    if only:
        unknown = set(only) - {case.name for case in chosen}
        if unknown:
            raise ConfigError(
                f"--case {min(unknown)!r} is not one of the cases",
                option="case",
                hint="name one of " + ", ".join(repr(case.name) for case in chosen),
            )
        chosen = [case for case in chosen if case.name in only]
    with needs_spark():
        from penstock.pipelines.testing.runner import session_for_cases, try_case

    failed = 0
    end_at_sigterm()
    with session_for_cases(pipeline.name) as spark:
        for case in chosen:
            outcome = try_case(spark, pipeline, case)
            failed += bool(outcome.differences)
            _show(case.name, outcome, as_json=as_json)
    if not as_json:
        sys.stdout.write(f"{len(chosen) - failed} passed, {failed} failed\n")
    if failed:
        raise typer.Exit(1)


def _show(name: str, outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "case": name,
                "ok": not outcome.differences,
                "differences": [difference.model_dump() for difference in outcome.differences],
                "found": outcome.found,
                "dead_letters": outcome.dead_letters,
                "violations": outcome.violations,
                "stopped_by": outcome.stopped_by,
            }
        )
        return
    from penstock.pipelines.testing.cases import lines

    sys.stdout.write(f"{'failed' if outcome.differences else 'passed'}  {escape(name)}\n")
    for difference in outcome.differences:
        for line in lines(difference):
            sys.stdout.write(f"    {_coloured(escape(line))}\n")
    sys.stdout.flush()


def _coloured(line: str) -> str:
    colour = {"-": 31, "+": 32}.get(line.strip()[:1])
    return f"\x1b[{colour}m{line}\x1b[0m" if colour and use_colour(sys.stdout) else line
