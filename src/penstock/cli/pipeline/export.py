"""`penstock pipeline export`: write a pipeline as a program that does not need penstock's runtime."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.options import Json
from penstock.cli.output import note, print_json
from penstock.cli.pipeline.options import File, needs_spark
from penstock.errors import ConfigError, StorageError

__all__ = ["export"]

Kind = Annotated[
    Literal["pyspark", "declarative"],
    typer.Option(
        "--as", help="pyspark: a program of Structured Streaming; declarative: a project for `spark-pipelines`."
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option(
        help="Directory of the program; created if it does not exist. Default: exported/NAME.",
        metavar="DIR",
        show_default=False,
    ),
]
TableFormat = Annotated[
    Literal["delta", "parquet"] | None,
    typer.Option(help="Format of all tables. Default: that in the file; Delta needs Delta's jars.", show_default=False),
]


def export(
    file: File,
    kind: Kind = "pyspark",
    directory: Directory = None,
    table_format: TableFormat = None,
    as_json: Json = False,
) -> None:
    """Write a pipeline as a PySpark program, or as a project of Spark Declarative Pipelines.

    The program has a function for each step and a query for each sink, and writes new tables. It needs penstock's Spark
    formats only where it reads or writes TubeMQ, MQTT or the state store. It has no lease, no ledger and no dead
    letters to redrive. Sinks that cannot be exported are left out; a comment in the program and a note say why.
    Existing files are not overwritten.
    """
    from penstock.pipelines.spec.loader import load
    from penstock.runtime.config.yaml_document import read_document

    pipeline = load(file)
    with needs_spark():
        from penstock.pipelines.export.script import declarative_project, raw_document, streaming_script
    directory = directory or Path("exported") / pipeline.name
    raw = raw_document(file).data
    if kind == "pyspark":
        found = streaming_script(pipeline, raw, table_format=table_format)
    else:
        storage = f"file://{directory.absolute()}/storage"
        found = declarative_project(pipeline, raw, storage=storage, table_format=table_format)
    secrets = read_document(file, os.environ).secrets
    if any(secret in text for secret in secrets for text in found.files.values()):
        raise ConfigError(
            f"{file}: a value of ${{file:...}} would be part of the program",
            option="file",
            why="only addresses, options and topics of sources and sinks are read when the program starts",
            hint="remove the variable from this place of the file",
        )
    _write(directory, found.files)
    if as_json:
        print_json(
            {"pipeline": pipeline.name, "files": [str(directory / name) for name in found.files]}
            | {"left_out": found.left_out}
        )
        return
    for name in found.files:
        sys.stdout.write(f"{directory / name}\n")
    for name, why in found.left_out.items():
        note(f"sink {name} is left out: {why}")


def _write(directory: Path, files: dict[str, str]) -> None:
    for name in files:
        if (directory / name).exists():
            raise ConfigError(
                f"{directory / name} exists already", option="directory", hint="name another with --directory"
            )
    try:
        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{error.filename} cannot be written: {error.strerror}", path=str(directory)) from error
