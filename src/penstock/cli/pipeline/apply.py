"""`penstock pipeline apply`."""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import DryRun, Json, Yes, confirmed, duration_option
from penstock.cli.output import note, print_json
from penstock.cli.pipeline.completion import complete_file_or_local_name
from penstock.cli.pipeline.files import lines_of
from penstock.cli.pipeline.options import StateDir, state_of
from penstock.errors import PenstockError, RefusedError

if TYPE_CHECKING:
    from penstock.pipelines.ledger.plan_changes import PlanChange
    from penstock.pipelines.run.lease import LeaseHolder
    from penstock.pipelines.spec.pipeline import Pipeline
    from penstock.pipelines.state_dir.versions import CurrentVersion, PipelineFile
    from penstock.spark.files.object_storage import StoragePath

__all__ = ["agreed", "apply", "file_to_run"]

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_ANSWER_S = 10.0


def apply(
    which: Annotated[
        str,
        typer.Argument(
            help="The changed pipeline file; with --rollback also the name of the pipeline.",
            metavar="FILE|NAME",
            show_default=False,
            autocompletion=complete_file_or_local_name,
        ),
    ],
    state_dir: StateDir = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="Put the version before into operation again.")] = False,
    timeout: Annotated[float, duration_option(text="Wait this long for the answer of the run.", default="5m")] = 300.0,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Put a changed pipeline file into operation without stopping its run.

    The run finishes its batches, and continues with the new version at the same offsets. If a query of the new version
    fails before it has finished a batch, the run continues with the version before, and the exit status is 1. Without
    a run, the next one starts with the new version.

    Only pipelines without steps that keep state (dedupe, window, join, as-of) are changed while they run. Sources and
    state store cannot change. --dry-run shows the changes, and whether the run would refuse them.
    """
    from penstock.pipelines.ledger.plan_changes import changes
    from penstock.pipelines.run import lease
    from penstock.pipelines.state_dir.versions import current_version, file_of, store_version, stored_version

    current: CurrentVersion | None
    if rollback and _NAME.fullmatch(which) and not Path(which).exists():
        state = state_of(which, state_dir)
        current = current_version(state)
        pipeline = stored_version(state, _known(current, which).version).load()
    else:
        from penstock.pipelines.spec.loader import load

        pipeline = load(which)
        state = state_of(pipeline.name, state_dir)
        current = current_version(state)
    broker, name = pipeline.statestore.url, pipeline.name
    number: int | None = None
    file: PipelineFile | None = None
    if rollback:
        number = _known(current, name).over
        if number is None:
            raise RefusedError(f"pipeline {name!r} has no version before", hint="apply a changed file")
        pipeline = stored_version(state, number).load()
    else:
        file = file_of(Path(which), pipeline)
        if current is not None and stored_version(state, current.version).digest == file.digest:
            _show(name, current.version, "is in operation already", as_json=as_json)
            return
    found = changes(pipeline, state) or []
    if not as_json:
        sys.stdout.writelines(f"{line}\n" for change in found for line in lines_of(change))
    holder = lease.lease_holder(broker, name, _ANSWER_S)
    _check(pipeline, state, current, holder, found)
    if dry_run:
        if as_json:
            print_json({"pipeline": name, "run": holder.run, "changes": [change.as_json() for change in found]})
        return
    repeats = agreed(found, yes=yes)
    if number is None:
        assert file is not None
        number = store_version(state, file)
    if holder.run is None:
        _apply_without_run(broker, name, state, number)
        _show(name, number, "is in operation: the next run starts with it", as_json=as_json)
        return
    if not as_json:
        note(f"pipeline {name}: asked {holder} to use version {number}")
    request = lease.ApplyRequest(uuid.uuid4().hex[:12], holder.run, number, repeats)
    answer = lease.apply_version(broker, name, request, timeout_s=timeout, answer_s=_ANSWER_S)
    if answer.result == lease.REFUSED:
        raise RefusedError(f"version {number} was not applied: {answer.what}", why=answer.why, hint=answer.hint)
    if answer.result == lease.ROLLED_BACK:
        raise PenstockError(
            f"version {number} failed, and version {answer.version} is in operation again: {answer.what}",
            why=answer.why,
            hint=answer.hint,
        )
    _show(name, number, "is in operation", as_json=as_json)


def file_to_run(file: Path, pipeline: Pipeline, state: StoragePath) -> tuple[PipelineFile, Pipeline, tuple[str, ...]]:
    """Return the version that a run with ``file`` starts with, its pipeline, and warnings if it is another one.

    Raises:
        StorageError: the versions cannot be read.
        ConfigError: the version in operation is not valid any more.
    """
    from penstock.pipelines.state_dir.versions import file_of, replaced_by, stored_version

    mine = file_of(file, pipeline)
    number = replaced_by(state, mine)
    if number is None:
        return mine, pipeline, ()
    newer = stored_version(state, number)
    text = (
        f"{file} was replaced: the run uses version {number} of {newer.name}; to use {file} again: "
        f"penstock pipeline apply {file}"
    )
    return newer, newer.load(), (text,)


def _known(current: CurrentVersion | None, name: str) -> CurrentVersion:
    if current is None:
        raise RefusedError(
            f"the state directory has no version of pipeline {name!r}",
            why="it has not run, or with another directory",
            hint="set the directory of the run with --state-dir",
        )
    return current


def _check(
    pipeline: Pipeline,
    state: StoragePath,
    current: CurrentVersion | None,
    holder: LeaseHolder,
    found: list[PlanChange],
) -> None:
    """Check that the run ``holder``, or the next one, can use ``pipeline``.

    Raises:
        RefusedError: it cannot.
    """
    from penstock.pipelines.ledger.plan_changes import REFUSED, check_applicable
    from penstock.pipelines.state_dir.checkpoint import START_OVER
    from penstock.pipelines.state_dir.versions import stored_version

    if holder.run is None:
        for change in found:
            if change.mark == REFUSED:
                raise RefusedError(f"{change.what}: {change.text}", hint=START_OVER)
        return
    if current is None or current.run != holder.run:
        raise RefusedError(
            f"{state} is not the state directory of {holder}",
            why="it has another one, or is about to start",
            hint="set the directory of the run with --state-dir, on its host; or try again",
        )
    check_applicable(stored_version(state, current.version).load(), pipeline, state, repeats=True)


def agreed(found: Iterable[PlanChange], *, yes: bool) -> bool:
    """Return True if a renamed sink may write again what it has written, or a sink create a table again, after asking.

    Raises:
        RefusedError: the answer is no, or there is no terminal to ask at.
    """
    from penstock.pipelines.ledger.plan_changes import ASKED

    asked = [change for change in found if change.mark == ASKED]
    for change in () if yes else asked:
        if not sys.stdin.isatty() or not confirmed(f"{change.what}: {change.text}. {change.question}"):
            raise change.refusal()
    return bool(asked)


def _apply_without_run(broker: str, name: str, state: StoragePath, number: int) -> None:
    from penstock.pipelines.run.lease import with_lease
    from penstock.pipelines.state_dir.versions import put_into_operation

    with_lease(broker, name, lambda token: put_into_operation(state, number, token=token, run=None), _ANSWER_S)


def _show(name: str, version: int, text: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"pipeline": name, "version": version, "result": text})
    else:
        sys.stdout.write(f"pipeline {name}: version {version} {text}\n")
