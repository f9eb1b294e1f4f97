"""Arguments and options that several commands of `penstock pipeline` share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.pipeline.completion import complete_file
from penstock.errors import ConfigError
from penstock.runtime.extras import needs_extra

if TYPE_CHECKING:
    from penstock.pipelines.state_dir.replay import RunLocation
    from penstock.spark.files.object_storage import StoragePath

__all__ = [
    "Conf",
    "File",
    "Files",
    "Into",
    "Metrics",
    "Once",
    "StateDir",
    "Traces",
    "needs_spark",
    "options_of_spark",
    "pipeline_files",
    "run_of",
    "state_of",
    "state_path",
]

File = Annotated[
    Path,
    typer.Argument(help="Pipeline file (YAML).", metavar="FILE", show_default=False, autocompletion=complete_file),
]
Files = Annotated[
    list[Path],
    typer.Argument(
        help="Pipeline files (YAML), or directories with them; test files are skipped.",
        metavar="FILE|DIR...",
        show_default=False,
        autocompletion=complete_file,
    ),
]
StateDir = Annotated[
    str | None,
    typer.Option(
        help="Directory of checkpoints and ledger, with which a run continues: local, or s3://BUCKET/KEY. Default: "
        "penstock-pipelines/NAME.",
        metavar="DIR",
        show_default=False,
    ),
]
Into = Annotated[
    Path | None,
    typer.Option("--into", help="Directory of a replay.", metavar="DIR", show_default=False),
]
Conf = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Spark option; repeatable.", show_default=False),
]
Once = Annotated[bool, typer.Option("--once", help="Process the records that are available now, then exit.")]
Metrics = Annotated[
    str | None,
    typer.Option(help="Serve metrics for Prometheus at this address.", metavar="HOST:PORT", show_default=False),
]
Traces = Annotated[
    str | None,
    typer.Option(
        help="Send a span of each batch to this receiver of OTLP over HTTP.", metavar="URL", show_default=False
    ),
]


def needs_spark() -> AbstractContextManager[None]:
    """Translate a failed import of Spark inside the block.

    Raises:
        ConfigError: Spark is not installed.
    """
    return needs_extra("spark", "Spark is not installed")


def state_of(name: str, given: str | None, *, is_parent: bool = False) -> StoragePath:
    """Return the state directory of the pipeline ``name``: ``given``, or if it ``is_parent``, the one below it.

    Raises:
        ConfigError: it belongs to another pipeline, or is a URI of another storage than S3.
        UnavailableError, StorageError: it is in a bucket that cannot be read.
    """
    from penstock.pipelines.state_dir.layout import check_owner

    path = given if given is not None else f"penstock-pipelines/{name}"
    if given is not None and is_parent:
        path = f"{given.rstrip('/')}/{name}"
    state = state_path(path)
    if isinstance(state, Path):
        state = state.resolve()
    check_owner(state, name)
    return state


def state_path(path: str) -> StoragePath:
    """Return the path that the value of --state-dir names.

    Raises:
        ConfigError: it is a URI of another storage than S3, or not a path in a bucket.
    """
    from penstock.pipelines.spec.values import is_uri
    from penstock.spark.files.object_storage import is_object_url, storage_path

    if is_uri(path) and not is_object_url(path):
        raise ConfigError(
            f"--state-dir {path!r} is a URI",
            option="state-dir",
            why="checkpoints and the ledger need a local or mounted file system, or a storage with the protocol of S3",
            hint="set a directory that all executors share, for example of NFS, or s3://BUCKET/KEY",
        )
    return storage_path(path)


def run_of(file: Path, state_dir: str | None, into: Path | None) -> RunLocation:
    """Return the pipeline, its state directory and the name of its lease, or those of its replay ``into``.

    Raises:
        ConfigError: the file is not valid, or ``into`` has no replay.
    """
    from penstock.pipelines.spec.loader import load
    from penstock.pipelines.state_dir.replay import RunLocation, existing_replay

    pipeline = load(file)
    if into is None:
        return RunLocation(pipeline, state_of(pipeline.name, state_dir), pipeline.name)
    if state_dir is not None:
        raise ConfigError(
            "--state-dir and --into exclude each other", option="--into", hint="omit --state-dir: a replay has its own"
        )
    return existing_replay(pipeline, into)


def pipeline_files(given: Sequence[Path]) -> list[Path]:
    """Return the files ``given``, with directories replaced by their pipeline files, sorted by name.

    Raises:
        ConfigError: a directory has no pipeline files.
    """
    found: list[Path] = []
    for path in given:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(each for each in path.iterdir() if each.suffix in (".yaml", ".yml"))
        inside = [each for each in inside if not each.stem.endswith(".test")]
        if not inside:
            raise ConfigError(
                f"{str(path)!r} has no pipeline files", hint="name a directory with files that end with .yaml or .yml"
            )
        found += inside
    return found


def options_of_spark(given: list[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` pairs of Spark options.

    Raises:
        ConfigError: a pair is not valid.
    """
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise ConfigError(f"--conf {text!r} is not a Spark option", option="conf", hint="write spark.NAME=VALUE")
        options[name] = value
    return options
