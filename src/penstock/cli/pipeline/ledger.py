"""`penstock pipeline status`, `reconcile` and `dead-letter`: the ledger of a pipeline, without Spark."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.options import Commands, DryRun, Json, Watch, Yes, confirmed, duration_option, input_bytes, repeat
from penstock.cli.output import (
    bytes_fields,
    escape,
    note,
    print_error,
    print_json,
    print_table,
    shown,
    shown_bytes,
    shown_duration,
)
from penstock.cli.pipeline.completion import complete_file, complete_rejecting_step
from penstock.cli.pipeline.options import File, Into, StateDir, pipeline_files, run_of, state_of
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.config.values import did_you_mean

if TYPE_CHECKING:
    from penstock.pipelines.ledger.dead_letters import DeadLetter
    from penstock.pipelines.ledger.ledger import LedgerEntry
    from penstock.pipelines.ledger.letter_states import LetterState
    from penstock.pipelines.run.lease import LeaseHolder, RunRecord
    from penstock.pipelines.sources.lag import Lag
    from penstock.pipelines.spec.pipeline import Pipeline
    from penstock.pipelines.state_dir.replay import RunLocation
    from penstock.spark.files.object_storage import StoragePath

__all__ = ["app", "reconcile", "status"]

app = Commands("List, correct, redrive, close and purge dead letters: records that a step could not process.")

_STORE_TIMEOUT_S = 2.0
"""Timeout in seconds of the request to the state store for the lease. It is short, because the ledger is local."""
_REQUESTS = 16
"""Maximum number of requests at a time."""
_NOW = ("rows_per_s", "written_per_s", "lag_records", "lag_s", "batch_s", "behind_s", "state_rows", "state_bytes",
        "state_disk_bytes")  # fmt: skip
_SUMS = ("batches", "read", "exploded", "out", "dead", "filtered", "duplicates", "late")


class PipelineStatus(NamedTuple):
    """Status of a pipeline: a row for each sink, and the current or last run."""

    rows: list[dict[str, Any]]
    holder: LeaseHolder | None
    text: str

    @property
    def record(self) -> RunRecord | None:
        """Record of the run that holds the lease, or held it last."""
        return None if self.holder is None else self.holder.record


def status(
    file: Annotated[
        Path,
        typer.Argument(
            help="Pipeline file (YAML), or a directory with them.",
            metavar="FILE|DIR",
            show_default=False,
            autocompletion=complete_file,
        ),
    ],
    state_dir: StateDir = None,
    into: Into = None,
    watch: Watch = None,
    as_json: Json = False,
) -> None:
    """Show the counts of each sink from the ledger, and the run that holds the lease.

    Each sink has its lag in records and seconds, also while no run is active (unless the source does not respond).
    While a run is active: its host and start, and for each sink rows per second, the duration of a batch, the delay of
    the watermark, and the size of Spark's state. With --json each line has the state of the lease: held, free, or
    unknown if the state store does not respond. With --into: the status of that replay.

    With a directory: of all its pipelines. --state-dir is then the directory that contains their state directories. If
    a file is not valid, this is reported first, the others are shown, and the exit status is 2.
    """
    located: list[RunLocation] = []
    refused: list[ConfigError] = []
    is_directory = file.is_dir()
    for each in pipeline_files([file]) if is_directory else [file]:
        try:
            located.append(_located(each, state_dir, into, is_one_of_several=is_directory))
        except ConfigError as error:
            if not is_directory:
                raise
            refused.append(error)

    def look() -> list[tuple[RunLocation, PipelineStatus]]:
        # At the same time, because each of them waits for the timeout if the state store does not respond.
        with ThreadPoolExecutor(_REQUESTS) as pool:
            found = pool.map(lambda place: _status(place.pipeline, place.state, place.lease), located)
            return list(zip(located, found, strict=True))

    def show(found: list[tuple[RunLocation, PipelineStatus]]) -> None:
        if as_json:
            now = datetime.now().astimezone().isoformat(timespec="milliseconds")
            for place, each in found:
                record = None if each.record is None else asdict(each.record)
                for row in each.rows:
                    print_json({"time": now, "pipeline": place.pipeline.name, **row, "record": record})
        else:
            _print_status(found, with_pipelines=is_directory)

    # First: with --watch, the status is shown until Ctrl-C.
    for refusal in refused:
        print_error(refusal)
    repeat(look, show, watch, as_json=as_json)
    if refused:
        raise typer.Exit(2)


def _located(file: Path, state_dir: str | None, into: Path | None, *, is_one_of_several: bool) -> RunLocation:
    """Return the pipeline in ``file`` and its state directory, or those of a replay.

    Raises:
        ConfigError: the file is not valid, or ``into`` is set for one of several files.
    """
    if not is_one_of_several:
        return run_of(file, state_dir, into)
    from penstock.pipelines.spec.loader import load
    from penstock.pipelines.state_dir.replay import RunLocation

    if into is not None:
        raise ConfigError("--into needs a single pipeline", option="--into", hint="name one file")
    pipeline = load(file)
    state = state_of(pipeline.name, state_dir, is_parent=True)
    return RunLocation(pipeline, state, pipeline.name)


def _status(pipeline: Pipeline, state: StoragePath, name: str) -> PipelineStatus:
    from penstock.console.run_status import sinks_of
    from penstock.pipelines.ledger.ledger import Ledger
    from penstock.pipelines.run.lease import lease_holder
    from penstock.pipelines.state_dir import layout

    ledger = Ledger(layout.ledger(state))
    holder: LeaseHolder | None = None
    try:
        holder = lease_holder(pipeline.statestore.url, name, _STORE_TIMEOUT_S)
        lease = "free" if holder.run is None else "held"
        text = "no run holds the lease" if holder.run is None else f"{holder} holds the lease"
    except PenstockError as error:
        lease, text = "unknown", f"whether a run holds the lease is unknown: {error.what}"
        text += f"; {error.hint}" if error.hint else ""
    run = None if holder is None else holder.run
    record = None if holder is None else holder.record
    # Current values are known only while a run is active.
    reported = {each.sink: each for each in sinks_of(asdict(record))} if record is not None and run is not None else {}
    newest = {sink.name: ledger.last(sink.name) for sink in pipeline.sinks}
    # A replay ends by itself: what follows its range is no lag.
    lags = _lags(pipeline, state, newest) if lease == "free" and name == pipeline.name else {}
    rows: list[dict[str, Any]] = []
    for sink in pipeline.sinks:
        sums, last = ledger.counts(sink.name), newest[sink.name]
        counts = {name: getattr(sums, name) for name in _SUMS}
        now = {name: getattr(reported.get(sink.name), name, None) for name in _NOW}
        if (lag := lags.get(sink.name)) is not None:
            now |= {"lag_records": lag.records, "lag_s": lag.seconds}
        batch = None if last is None else last.batch
        expectations = {name: asdict(each) for name, each in sums.expectations.items()}
        steps = dict(sums.letters_by_step)
        sums_of_sink = {
            "sink": sink.name,
            "batch": batch,
            "version": None if last is None else last.version,
            **counts,
            "letters_by_step": steps,
            "expectations": expectations,
            "join": dict(sums.join),
        }
        rows.append({**sums_of_sink, **now, "lease": lease, "run": run})
    return PipelineStatus(rows, holder, text)


def _lags(pipeline: Pipeline, state: StoragePath, newest: Mapping[str, LedgerEntry | None]) -> dict[str, Lag]:
    """Return the lag of each sink behind the sources after its last batch; empty if they do not respond."""
    from penstock.pipelines.spec.pipeline import plan
    from penstock.runtime.io.clock import wall_clock_ms

    queries = {found.sink.name for found in plan(pipeline)}
    ends = {name: entry.end for name, entry in newest.items() if entry is not None and name in queries}
    if not ends:
        return {}
    from penstock.pipelines.sources.sources import Sources

    try:
        return Sources(pipeline, state).lag(ends, wall_clock_ms)
    except (PenstockError, OSError) as error:  # the counts of the ledger are known without the sources
        note(f"the lag is not known: {error.what if isinstance(error, PenstockError) else error}")
        return {}


def _print_status(found: list[tuple[RunLocation, PipelineStatus]], *, with_pipelines: bool) -> None:
    from penstock.pipelines.spec.steps import JOIN_COUNTS

    for place, each in found:
        _note_run(each, place.state, f"pipeline {place.pipeline.name}: " if with_pipelines else "")
    first = ["pipeline", "sink"] if with_pipelines else ["sink"]
    rows = [
        {
            "pipeline": place.pipeline.name,
            **row,
            "lag": row["lag_records"],
            "oldest": shown_duration(row["lag_s"]) if row["lag_records"] else "-",
            "rows/s": row["rows_per_s"],
            "batch_time": shown_duration(row["batch_s"]),
            "watermark": "-" if row["behind_s"] is None else f"{shown_duration(row['behind_s'])} behind",
            "state": "-" if not row["state_rows"] else f"{row['state_rows']} rows, {shown_bytes(row['state_bytes'])}",
        }
        for place, each in found
        for row in each.rows
    ]
    print_table(rows, [*first, "batch", *_shown_sums(rows)], as_json=False)
    running = [row for row in rows if row["run"] is not None]
    measured = [row for row in rows if row["run"] is not None or row["lag_records"] is not None]
    if measured:
        of_run = ["lag", "oldest", *(("rows/s", "batch_time") if running else ())]
        of_run += [name for name in ("watermark", "state") if any(row[name] != "-" for row in running)]
        sys.stdout.write("\n")
        print_table(measured, [*first, *of_run], as_json=False)
    rejected = [
        {"pipeline": row["pipeline"], "sink": row["sink"], "step": step, "dead_letters": letters}
        for row in rows
        for step, letters in row["letters_by_step"].items()
    ]
    if rejected:
        sys.stdout.write("\n")
        print_table(rejected, [*first, "step", "dead_letters"], as_json=False)
    joins = [{"pipeline": row["pipeline"], "sink": row["sink"], **row["join"]} for row in rows if row["join"]]
    if joins:
        sys.stdout.write("\n")
        print_table(joins, [*first, *JOIN_COUNTS], as_json=False)
    checked = [
        {"pipeline": row["pipeline"], "sink": row["sink"], "expectation": name, **counts}
        for row in rows
        for name, counts in row["expectations"].items()
    ]
    if checked:
        sys.stdout.write("\n")
        print_table(checked, [*first, "expectation", "rows", "violations"], as_json=False)


def _note_run(found: PipelineStatus, state: StoragePath, prefix: str) -> None:
    """Note the run that holds the lease, or the last one."""
    holder, record = found.holder, found.record
    run = None if holder is None else holder.run
    left = "" if holder is None or holder.left_ms is None else f", {holder.left_ms / 1000:.1f} s unless it renews it"
    version = "" if run is None or record is None or record.version is None else f", version {record.version}"
    note(f"{prefix}{found.text}{version}{left}")
    if record is not None and not state.exists():
        note(f"{prefix}{state} contains no ledger: set the directory of the run with --state-dir")
    if run is not None and record is not None and record.why:
        note(f"{prefix}the run continues without a sink: {record.why}")
    if run is None and record is not None:
        note(f"{prefix}the last one, run {record.run} on {record.host}: {_end_of_run(record)}")


def _shown_sums(rows: list[dict[str, Any]]) -> list[str]:
    """Return the names of the sums to show of ``rows``: that of explode steps only if there are any."""
    return [name for name in _SUMS if name != "exploded" or any(row[name] for row in rows)]


def _end_of_run(record: RunRecord) -> str:
    if record.state == "running":
        return f"ended without a record, last seen {record.at or record.since}"
    return f"{record.state} {record.at}" + (f": {record.why}" if record.why else "")


def reconcile(file: File, state_dir: StateDir = None, into: Into = None, as_json: Json = False) -> None:
    """Check that every record that was read is accounted for; exit status 1 if not.

    Compares the ledger with TubeMQ (the brokers count each range), with the rows in the tables, and each batch with
    the previous one. With --into: the ledger of that replay.
    """
    from penstock.pipelines.ledger import reconcile as books

    pipeline, state, _ = run_of(file, state_dir, into)
    is_off = False
    for account in books.each_reconciled(pipeline, state, books.source_count(pipeline, state)):
        is_off |= bool(account.off)
        sums = {name: getattr(account.counts, name) for name in _SUMS}
        if as_json:
            print_json(
                {"sink": account.sink, "ok": not account.off, **sums, "off": account.off, "unknown": account.unknown}
            )
            continue
        counts = ", ".join(
            f"{count} {'batch' if (name, count) == ('batches', 1) else name}"
            for name, count in sums.items()
            if count or name in ("batches", "read", "out")
        )
        sys.stdout.write(f"{account.sink}: {'off' if account.off else 'ok'}: {counts}\n")
        for text in account.off:
            sys.stdout.write(f"  off: {text}\n")
        for text in account.unknown:
            sys.stdout.write(f"  unknown: {text}\n")
        sys.stdout.flush()
    if is_off:
        raise typer.Exit(1)


def _dead_letters(file: Path, into: Path | None = None) -> tuple[StoragePath, Pipeline]:
    """Return the path of the dead letters of the pipeline, or of its replay ``into``, and the pipeline."""
    pipeline = run_of(file, None, into).pipeline
    if pipeline.dead_letters is None:
        raise ConfigError(
            f"pipeline {pipeline.name!r} has no dead_letters setting",
            option="dead_letters",
            hint="add dead_letters: {path: ...} to the file; from then on they are kept",
        )
    return pipeline.dead_letters.location, pipeline


All = Annotated[bool, typer.Option("--all", help="Include redriven, resolved and discarded letters.")]


@app.add("penstock pipeline dead-letter list pipeline.yaml", name="list")
def dead_list(file: File, into: Into = None, every: All = False, as_json: Json = False) -> None:
    """Count the dead letters by step, code, reason and state. With --into: those of that replay.

    States: open, corrected (redrive sends the corrected payload), redriven, resolved, discarded. Groups without open or
    corrected letters are shown with --all.
    """
    from penstock.pipelines.ledger.dead_letters import letters
    from penstock.pipelines.ledger.letter_states import LetterState, letter_states, status_of

    path, _ = _dead_letters(file, into)
    states = letter_states(path)
    counts: dict[tuple[str, str, str], Counter[LetterState]] = {}
    for letter in letters(path):
        group = counts.setdefault((letter.step, letter.code, letter.reason), Counter())
        group[status_of(states, letter).state] += 1
    shown_counts = {
        group: found for group, found in counts.items() if every or any(not state.is_closed for state in found)
    }
    rows: list[dict[str, str | int | None]] = [
        {
            "step": step,
            "code": code,
            "reason": reason,
            "letters": found.total(),
            **{state.value: found[state] for state in LetterState},
        }
        for (step, code, reason), found in sorted(shown_counts.items())
    ]
    names = [state.value for state in LetterState if any(row[state.value] for row in rows)]
    if rows or as_json:
        print_table(rows, ["step", "code", "reason", "letters", *names], as_json=as_json)
        if rows and not as_json:
            replay = "" if into is None else f" --into {shlex.quote(str(into))}"
            note(f"show the records: penstock pipeline dead-letter show {shlex.quote(str(file))}{replay}")
    elif not counts:
        note("there are no dead letters")
    closed = sum(found.total() for group, found in counts.items() if group not in shown_counts)
    if closed and not as_json:
        note(f"{_letters(closed)} of other groups {'is' if closed == 1 else 'are'} closed: --all lists them")


Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most N letters.", metavar="N")]
Step = Annotated[
    str | None,
    typer.Option(
        help="Only letters of this step.",
        metavar="STEP",
        show_default=False,
        autocompletion=complete_rejecting_step,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--id", help="Only the letter with this id; repeatable.", metavar="ID", show_default=False),
]


@app.add("penstock pipeline dead-letter show pipeline.yaml --step readings --limit 5", name="show")
def dead_show(
    file: File,
    into: Into = None,
    step: Step = None,
    only: Only = None,
    every: All = False,
    limit: Limit = 10,
    as_json: Json = False,
) -> None:
    """Show open and corrected dead letters: reason, origin, and the record. With --into: those of that replay.

    Letters that --id selects are shown in any state.
    """
    from penstock.pipelines.ledger.dead_letters import letters
    from penstock.pipelines.ledger.letter_states import LetterState, letter_states, status_of

    path, pipeline = _dead_letters(file, into)
    states = letter_states(path)
    chosen = [
        (letter, status)
        for letter in _chosen(list(letters(path)), pipeline, step, only)
        for status in [status_of(states, letter)]
        if every or only or not status.state.is_closed
    ]
    for letter, status in chosen[:limit]:
        if as_json:
            print_json(
                {
                    "id": letter.id,
                    "part": letter.part,
                    "step": letter.step,
                    "code": letter.code,
                    "source": letter.source,
                    "reason": letter.reason,
                    "place": f"{letter.topic} {letter.broker}:{letter.partition}@{letter.offset}",
                    "timestamp": None if letter.timestamp is None else letter.timestamp.isoformat(),
                    "state": status.state.value,
                    **bytes_fields("key", letter.key),
                    "headers": [[name, shown(value)] for name, value in letter.headers],
                    **bytes_fields("value", letter.value),
                    **bytes_fields("corrected", status.value),
                }
            )
            continue
        state = "" if status.state is LetterState.OPEN else f" ({status.state.value})"
        code = f" ({letter.code})" if letter.code else ""
        part = "" if letter.part is None else f", part {letter.part}"
        sys.stdout.write(f"{escape(letter.id)}{part}: {letter.step}: {escape(letter.reason)}{code}{state}\n")
        at = "" if letter.timestamp is None else f", {letter.timestamp:%Y-%m-%d %H:%M:%S} UTC"
        sys.stdout.write(f"  {_place(letter, pipeline)}{at}\n")
        for name, value in letter.headers:
            sys.stdout.write(f"  {shown(name.encode())}: {shown(value)}\n")
        sys.stdout.write(f"  {shown(letter.value)}\n")
        if status.value is not None:
            sys.stdout.write(f"  corrected: {shown(status.value)}\n")
    if len(chosen) > limit:
        note(f"{len(chosen) - limit} more: raise --limit")
    if chosen and not as_json and into is None:
        name = shlex.quote(str(file))
        note(f"correct one: penstock pipeline dead-letter correct {name} --id ID --value TEXT")
        note(f"send all again: penstock pipeline dead-letter redrive {name}")


@app.add("penstock pipeline dead-letter redrive pipeline.yaml --step readings --dry-run", name="redrive")
def dead_redrive(
    file: File,
    state_dir: StateDir = None,
    step: Step = None,
    only: Only = None,
    resend: Annotated[bool, typer.Option("--repeat", help="Include letters that were sent again before.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Send open and corrected dead letters to their source again, with their ids.

    Use it after the pipeline, or the data that it looks up, was corrected; a letter is sent with its original content
    unless `dead-letter correct` has stored another one. A letter that fails again becomes a new letter. Letters of a
    replay are not sent: correct the file and replay into a new directory.
    """
    from penstock.pipelines.ledger.dead_letters import redrive
    from penstock.pipelines.ledger.redrive_lock import redriving

    path, pipeline = _dead_letters(file)
    with nullcontext() if dry_run else redriving(path):
        chosen = _to_redrive(path, pipeline, step, only, resend=resend)
        state = state_of(pipeline.name, state_dir)
        sent = 0 if dry_run else asyncio.run(redrive(path, chosen, pipeline, state, note))
    if as_json:
        print_json({"chosen": len(chosen), "sent": sent})
    elif dry_run:
        sys.stdout.write(f"{_letters(len(chosen))} would be sent again\n")
    else:
        sys.stdout.write(f"{_letters(sent)} sent again\n")


def _to_redrive(
    path: StoragePath, pipeline: Pipeline, step: str | None, only: list[str] | None, *, resend: bool
) -> list[DeadLetter]:
    """Return the letters to send again; note which of the selected ones are not."""
    from penstock.pipelines.ledger.dead_letters import failed_again, letters, of_same_records
    from penstock.pipelines.ledger.letter_states import LetterState, letter_states, status_of
    from penstock.pipelines.spec.pipeline import steps_after

    states = letter_states(path)
    every = list(letters(path))
    found = _chosen(every, pipeline, step, only)
    made = _derived_rows(pipeline)
    sendable = {LetterState.OPEN, LetterState.CORRECTED} | ({LetterState.REDRIVEN} if resend else set())
    # The newer letter has the same record.
    older = failed_again(every, steps_after(pipeline))
    newest = [letter for letter in found if (letter.place, letter.step) not in older]
    wanted = [letter for letter in newest if letter.source not in made]

    def is_sendable(letter: DeadLetter) -> bool:
        return status_of(states, letter).state in sendable and (letter.place, letter.step) not in older

    for kind, reason in _NOT_SENT.items():
        kept = sum(made.get(letter.source) == kind for letter in found)
        if kept:
            note(f"{_letters(kept)} of {kind}s {'is' if kept == 1 else 'are'} not sent: {reason}")
    if found and not newest:
        why = "its record failed again, and a newer letter has the same id"
        if len(found) > 1:
            why = "their records failed again, and newer letters have the same ids"
        note(f"{_letters(len(found))} not sent: {why}")
    chosen = [letter for letter in wanted if is_sendable(letter)]
    if only and len(chosen) < len(wanted):
        left_out = {status_of(states, letter).state for letter in wanted if letter not in chosen}
        count = _letters(len(wanted) - len(chosen))
        if left_out == {LetterState.REDRIVEN}:
            note(f"{count} sent again before: --repeat sends it once more")
        else:
            found_as = ", ".join(sorted(left_out))
            note(f"{count} not sent: {found_as}; `penstock pipeline dead-letter reopen` opens it")
    records = of_same_records(chosen, (letter for letter in every if letter.source not in made and is_sendable(letter)))
    if others := len(records) - len(chosen):
        note(f"{_letters(others)} of other steps {'is' if others == 1 else 'are'} sent with the same records")
    return records


@app.add("penstock pipeline dead-letter correct line3.yaml --id 5f2c --value-file fixed", name="correct")
def dead_correct(
    file: File,
    one: Annotated[str, typer.Option("--id", help="Id of the letter.", metavar="ID", show_default=False)],
    value: Annotated[str | None, typer.Option(help="Corrected payload.", metavar="TEXT", show_default=False)] = None,
    value_file: Annotated[
        Path | None,
        typer.Option(help="File with the corrected payload; - for standard input.", metavar="FILE", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Store a corrected payload for a dead letter, with which `dead-letter redrive` sends it. The original is kept.

    A note says if the letter's parse step would reject the payload again, as far as this is known without Spark.
    """
    from penstock.pipelines.ledger.dead_letters import failed_again, letters
    from penstock.pipelines.ledger.letter_states import LetterState, letter_states, set_state, status_of
    from penstock.pipelines.spec.columns import rejection
    from penstock.pipelines.spec.pipeline import steps_after

    if (value is None) == (value_file is None):
        raise ConfigError(
            "no corrected payload", option="--value", hint="set one of --value TEXT and --value-file FILE"
        )
    payload = input_bytes("pipeline dead-letter correct", "TEXT", value, value_file)
    path, pipeline = _dead_letters(file)
    every = list(letters(path))
    older, states = failed_again(every, steps_after(pipeline)), letter_states(path)
    newest = [letter for letter in _chosen(every, pipeline, None, [one]) if (letter.place, letter.step) not in older]
    chosen = [letter for letter in newest if not status_of(states, letter).state.is_closed] or newest
    made = _derived_rows(pipeline)
    if all(letter.source in made for letter in chosen):
        raise ConfigError(
            f"the letter {one!r} is a {made[chosen[0].source]}, which has no source record",
            option="--id",
            hint="correct the step or the sink",
        )
    set_state(path, chosen, LetterState.CORRECTED, payload)
    _report_changed(len(chosen), LetterState.CORRECTED, as_json=as_json)
    parses = {step.name: step.parse for step in pipeline.steps if step.parse is not None}
    for letter in chosen:
        # A part has the form that an explode step made.
        if letter.part is None and letter.step in parses and (why := rejection(parses[letter.step], payload)):
            note(f"step {letter.step!r} will reject it again: {why}; correct it once more before you redrive it")


@app.add("penstock pipeline dead-letter resolve pipeline.yaml --step readings", name="resolve")
def dead_resolve(
    file: File, step: Step = None, only: Only = None, dry_run: DryRun = False, yes: Yes = False, as_json: Json = False
) -> None:
    """Close dead letters whose data was written in another way; without --step and --id all that are not closed."""
    from penstock.pipelines.ledger.letter_states import LetterState

    _change_state(file, step, only, LetterState.RESOLVED, dry_run=dry_run, yes=yes, as_json=as_json)


@app.add("penstock pipeline dead-letter discard pipeline.yaml --id 5f2c", name="discard")
def dead_discard(
    file: File, step: Step = None, only: Only = None, dry_run: DryRun = False, yes: Yes = False, as_json: Json = False
) -> None:
    """Close dead letters that will not be processed; without --step and --id all that are not closed."""
    from penstock.pipelines.ledger.letter_states import LetterState

    _change_state(file, step, only, LetterState.DISCARDED, dry_run=dry_run, yes=yes, as_json=as_json)


@app.add("penstock pipeline dead-letter reopen pipeline.yaml --id 5f2c", name="reopen")
def dead_reopen(
    file: File, step: Step = None, only: Only = None, dry_run: DryRun = False, yes: Yes = False, as_json: Json = False
) -> None:
    """Open resolved and discarded dead letters again, and drop corrections; without --step and --id all of them."""
    from penstock.pipelines.ledger.letter_states import LetterState

    _change_state(file, step, only, LetterState.OPEN, dry_run=dry_run, yes=yes, as_json=as_json)


@app.add("penstock pipeline dead-letter purge pipeline.yaml --older-than 30d --dry-run", name="purge")
def dead_purge(
    file: File,
    older_than: Annotated[
        float,
        duration_option(
            text="Only records that their source received longer ago than this, or that have no time.",
            default="",
            or_forever=True,
        ),
    ],
    every: Annotated[bool, typer.Option("--all", help="Include open and corrected letters.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete redriven, resolved and discarded dead letters by age. They cannot be restored."""
    from penstock.pipelines.ledger.dead_letters import letters, purge
    from penstock.pipelines.ledger.letter_states import letter_states, status_of

    path, _ = _dead_letters(file)
    states = letter_states(path)
    before = datetime.now(UTC) - timedelta(seconds=min(older_than, _LONGEST_S))
    chosen = [
        letter
        for letter in letters(path)
        if (letter.timestamp is None or _in_utc(letter.timestamp) < before)
        and (every or status_of(states, letter).state.is_closed)
    ]
    if chosen and not (dry_run or yes or confirmed(f"Delete {_letters(len(chosen))}?")):
        note("nothing was deleted")
        raise typer.Exit(1)
    deleted = 0 if dry_run else purge(path, chosen)
    if as_json:
        print_json({"chosen": len(chosen), "deleted": deleted})
    else:
        sys.stdout.write(f"{_letters(len(chosen))} {'would be' if dry_run else 'were'} deleted\n")


_LONGEST_S = 1e10
"""300 years: no record is older."""


def _in_utc(time: datetime) -> datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _change_state(
    file: Path,
    step: str | None,
    only: list[str] | None,
    state: LetterState,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Change the state of the selected letters; a redriven letter keeps its state."""
    from penstock.pipelines.ledger.dead_letters import letters
    from penstock.pipelines.ledger.letter_states import LetterState, letter_states, set_state, status_of

    path, pipeline = _dead_letters(file)
    states = letter_states(path)
    chosen = []
    for letter in _chosen(list(letters(path)), pipeline, step, only):
        now = status_of(states, letter).state
        changes = now is not LetterState.OPEN if state is LetterState.OPEN else not now.is_closed
        if changes and now is not LetterState.REDRIVEN:
            chosen.append(letter)
    if chosen and not (dry_run or only or step or yes or confirmed(f"Mark {_letters(len(chosen))} as {state.value}?")):
        note("nothing was changed")
        raise typer.Exit(1)
    if not dry_run:
        set_state(path, chosen, state)
    _report_changed(len(chosen), state, dry_run=dry_run, as_json=as_json)


def _report_changed(count: int, state: LetterState, *, dry_run: bool = False, as_json: bool) -> None:
    if as_json:
        print_json({"letters": count, "state": state.value})
    elif dry_run:
        sys.stdout.write(f"{_letters(count)} would be {state.value}\n")
    else:
        sys.stdout.write(f"{_letters(count)} {'is' if count == 1 else 'are'} {state.value}\n")


def _place(letter: DeadLetter, pipeline: Pipeline) -> str:
    """Return the position of the record in its source."""
    kind = _derived_rows(pipeline).get(letter.source)
    if kind is not None:
        return f"{kind} of {letter.source}"
    source = pipeline.inputs.get(letter.source)
    if source is not None and source.format == "delta":
        return f"version {letter.partition}, {letter.topic}, row {letter.offset}"
    if source is not None and source.format == "kafka":
        return f"{letter.topic}:{letter.partition}@{letter.offset}"
    if source is None or source.format != "files":
        return f"{letter.topic} {letter.broker}:{letter.partition}@{letter.offset}"
    unit = "byte" if source.content in {"lines", "whole"} else "row"
    return f"{letter.topic}, {unit} {letter.offset}"


_NOT_SENT = {
    "window": "a window has no source record; correct the sink, and later changes of the window are written",
    "joined row": "a joined row has no source record; correct the step or the sink, and replay its records",
}
"""Rows that steps make, and why their dead letters are not sent again."""


def _derived_rows(pipeline: Pipeline) -> dict[str, str]:
    """Return the steps whose own rows may be dead letters, with the step as source, and what these rows are."""
    kinds = {"window": "window", "join": "joined row"}
    return {step.name: kinds[step.kind] for step in pipeline.steps if step.kind in kinds}


def _chosen(
    letters: list[DeadLetter], pipeline: Pipeline, step: str | None, only: list[str] | None
) -> list[DeadLetter]:
    """Return the letters of ``step`` with the ids ``only``; without both, all letters.

    Raises:
        ConfigError: an id or the step is unknown.
    """
    from penstock.pipelines.spec.values import sink_letter

    steps = {s.name for s in pipeline.steps} | {sink_letter(s.name) for s in pipeline.sinks} | {x.step for x in letters}
    _refuse_unknown("id", only or (), {x.id for x in letters}, "`penstock pipeline dead-letter show` lists the ids")
    _refuse_unknown(
        "step", () if step is None else (step,), steps, "`penstock pipeline dead-letter list` lists the steps"
    )
    return [x for x in letters if (step is None or x.step == step) and (not only or x.id in only)]


def _refuse_unknown(option: str, names: Iterable[str], known: set[str], hint: str) -> None:
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known)
            raise ConfigError(
                f"no dead letter has the {option} {name!r}",
                option=option,
                hint=f"{meant} {hint}" if meant else hint,
            )


def _letters(count: int) -> str:
    return "1 letter" if count == 1 else f"{count} letters"
