"""`penstock pipeline init`: a commented pipeline file to start from, with a test case."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.errors import ConfigError, StorageError

__all__ = ["init"]

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
statestore: {{broker: "${{PENSTOCK_BROKER:-mqtt://127.0.0.1:1883}}"}}

# Table of records that a step cannot process: the original bytes and the reason.
dead_letters: {{path: lake/dead_letters}}

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
_JSON = "      schema: machine STRING NOT NULL, time TIMESTAMP NOT NULL, celsius DOUBLE NOT NULL"
_PARSE: dict[Source, str] = {"files": f"      format: csv\n{_JSON}"}
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


def init(
    file: Annotated[
        Path, typer.Argument(help="File to create, with NAME.test.yaml next to it.", metavar="FILE")
    ] = Path("pipeline.yaml"),
    name: Annotated[
        str | None,
        typer.Option(help="Name of the pipeline. Default: that of the directory.", metavar="NAME", show_default=False),
    ] = None,
    source: Annotated[Source, typer.Option(help="Source of the records.")] = "tubemq",
) -> None:
    """Create a commented pipeline file and a test case for it. Existing files are not overwritten."""
    from penstock.pipelines.spec.loader import load
    from penstock.pipelines.testing.cases import cases_beside, load_cases

    cases = cases_beside(file)
    for path in (file, cases):
        if path.exists():
            raise ConfigError(f"{path} is there already", option="file", do="name another file")
    named = name or _named_after(file.absolute().parent)
    text = _FILE.format(file=file, name=named, source=_SOURCES[source], parse=_PARSE.get(source, _JSON))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        good = _GOOD.get(source, _GOOD_JSON)
        cases.write_text(_CASES.format(file=file, name=named, good=good), encoding="utf-8")
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
    sys.stdout.write(f"next: penstock pipeline test {file}, then penstock pipeline plan {file}\n")


def _named_after(directory: Path) -> str:
    """Name of a pipeline derived from the name of a directory."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in directory.name.lower())
    return kept.lstrip("0123456789_-")[:63] or "pipeline"
