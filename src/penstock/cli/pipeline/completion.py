"""Shell completion of pipeline files, and of the names in them. What cannot be read is not offered."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from penstock.cli.parameters import source_of
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.pipelines.spec.pipeline import Pipeline

__all__ = [
    "complete_case",
    "complete_file",
    "complete_file_or_local_name",
    "complete_file_or_running_name",
    "complete_rejecting_step",
    "complete_source",
    "complete_step",
    "complete_table_sink",
    "complete_valid_file",
]

_MAX_FILES: Final = 500
"""Files of a directory that are looked at."""
_MAX_BYTES: Final = 64 << 10
_SECTIONS: Final = re.compile(r"""^["']?(?:sources?|sinks)["']?\s*:""", re.MULTILINE)
"""A line of a pipeline file, also of one that is not complete yet. Other YAML files, as of a node, have none."""
_CASES: Final = re.compile(r"""^["']?cases["']?\s*:""", re.MULTILINE)
_START: Final = re.compile(r"[a-z0-9_-]*")
"""The beginning of a pipeline's name."""


def complete_file(incomplete: str) -> list[str]:
    """Shell completion: pipeline files that begin with ``incomplete``, also those one directory below."""
    return sorted(_files(incomplete, _SECTIONS, tests=False))


def complete_valid_file(incomplete: str) -> list[str]:
    """Shell completion: pipeline files and test files that begin with ``incomplete``."""
    return sorted({*_files(incomplete, _SECTIONS, tests=False), *_files(incomplete, _CASES, tests=True)})


def complete_file_or_local_name(incomplete: str) -> list[str]:
    """Shell completion: pipeline files, and names of pipelines with a state directory in the working directory."""
    names = (path.name for path in _listed(Path("penstock-pipelines")))
    return [*complete_file(incomplete), *sorted(_beginning(names, incomplete))]


def complete_file_or_running_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: pipeline files, and names of pipelines whose runs report to the state store."""
    files = complete_file(incomplete)
    return [*files, *sorted(_reported(ctx, incomplete))] if _START.fullmatch(incomplete) else files


def complete_case(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the test cases of the pipeline in FILE."""
    from penstock.pipelines.testing.cases import cases_path, load_cases

    file, pipeline = _file(ctx), _pipeline(ctx)
    if file is None or pipeline is None:
        return []
    try:
        cases = load_cases(Path(ctx.params.get("cases") or cases_path(file)), pipeline)
    except PenstockError:
        return []
    return list(_beginning((case.name for case in cases), incomplete))


def complete_source(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the sources of the pipeline file in --pipeline."""
    file = ctx.params.get("pipeline")
    pipeline = None if file is None else _load(Path(file))
    return [] if pipeline is None else list(_beginning(pipeline.inputs, incomplete))


def complete_step(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the steps of the pipeline in FILE."""
    pipeline = _pipeline(ctx)
    return [] if pipeline is None else list(_beginning((step.name for step in pipeline.steps), incomplete))


def complete_rejecting_step(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the steps and sinks of the pipeline in FILE that can reject records."""
    from penstock.pipelines.spec.description import graph

    pipeline = _pipeline(ctx)
    nodes = () if pipeline is None else graph(pipeline)
    return list(_beginning((node["id"] for node in nodes if node["dead_letters"]), incomplete))


def complete_table_sink(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the sinks of the pipeline in FILE that are tables."""
    pipeline = _pipeline(ctx)
    sinks = () if pipeline is None else pipeline.sinks
    return list(_beginning((sink.name for sink in sinks if sink.table is not None), incomplete))


def _beginning(names: Iterable[str], incomplete: str) -> Iterator[str]:
    return (name for name in names if name.startswith(incomplete))


def _files(incomplete: str, section: re.Pattern[str], *, tests: bool) -> Iterator[str]:
    """Yield YAML files with ``section`` whose path begins with ``incomplete``, in its directory or one below."""
    folder, _, start = incomplete.rpartition("/")
    prefix = f"{folder}/" if folder or incomplete.startswith("/") else ""
    try:
        place = Path(prefix or ".").expanduser()
    except RuntimeError:  # ~NAME without a user of this name
        return
    for path in _listed(place):
        if not path.name.startswith(start) or (path.name.startswith(".") and not start):
            continue
        if path.is_dir():
            yield from (f"{prefix}{path.name}/{each.name}" for each in _listed(path) if _has(each, section, tests))
        elif _has(path, section, tests):
            yield prefix + path.name


def _listed(folder: Path) -> list[Path]:
    if not os.access(folder, os.X_OK):  # then its names can be listed, but nothing in it can be looked at
        return []
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry, _ in zip(entries, range(_MAX_FILES), strict=False)]
    except OSError:  # it does not exist, or cannot be read
        return []


def _has(path: Path, section: re.Pattern[str], tests: bool) -> bool:
    if path.suffix not in (".yaml", ".yml") or path.stem.endswith(".test") is not tests or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return section.search(file.read(_MAX_BYTES).decode(errors="replace")) is not None
    except OSError:
        return False


def _file(ctx: typer.Context) -> Path | None:
    """Return FILE of the line; None if it has none before the word."""
    # Of a line that ends with an option without its value, the arguments are split off, but not assigned.
    found = ctx.params.get("file") or next(iter(ctx.args), None)
    return None if found is None else Path(found)


def _pipeline(ctx: typer.Context) -> Pipeline | None:
    """Return the pipeline in FILE of the line; None if there is none, or it is not valid."""
    file = _file(ctx)
    return None if file is None else _load(file)


def _load(file: Path) -> Pipeline | None:
    from penstock.pipelines.spec.loader import load

    try:
        return load(file)
    except PenstockError:
        return None


def _reported(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of pipelines with a report in the state store."""
    from penstock.cli.options import StateStoreOptions, stored_keys
    from penstock.pipelines.spec.values import run_key

    broker = ctx.params["broker"]
    if source_of(ctx, "broker") != "COMMANDLINE":  # completion parses the line without environment variables
        broker = os.environ.get("PENSTOCK_BROKER") or broker
    before, after = run_key("\0").split("\0")
    found = stored_keys(StateStoreOptions(broker=broker), run_key(f"{incomplete}*"))
    return [key.decode(errors="replace").removeprefix(before).removesuffix(after) for key in found]
