"""Pipelines, as their runs report them in the state store of this node: state, rates, lag, dead letters, last error.

A run writes its status every five seconds as JSON to ``penstock/pipeline/NAME/run``, and holds the lease
``penstock/pipeline/NAME/lease`` (``pipelines/run/lease.py``). Every client that may write such a key can write another
status: nothing here trusts its types, and its texts are shown as texts only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from penstock.console.pages import Page, PageQuery, Pages
from penstock.console.run_status import (
    MAX_TEXT,
    TableTotals,
    expectations_of,
    field_of,
    graph_of,
    sink_names,
    sinks_of,
    tables_of,
)
from penstock.console.snapshots import Hop, PipelineDetail, PipelineSnapshot
from penstock.statestore.engine.record import Record
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.service import StateStoreService

__all__ = ["PipelineViews"]

PREFIX: Final = "penstock/pipeline/"
STATUS: Final = "/run"
MAX_PIPELINES: Final = 1000
"""Pipelines in the list: the status of each is parsed for a page."""
MAX_STATUS_BYTES: Final = 256 << 10
MAX_S: Final = 1.0
STEP_KEYS: Final = 100


class PipelineViews:
    """Pipelines in ``store``. ``managed``: names of those whose dead letters this node manages."""

    def __init__(self, store: StateStoreService, pages: Pages, managed: Callable[[], Collection[str]] = tuple) -> None:
        self._store = store
        self._pages = pages
        self._managed = managed
        self._listed: dict[str, _ListedLetters] = {}
        self._reports: dict[str, tuple[Hlc, _Report]] = {}
        """The reports of runs with the versions of their records: an overview parses only those that changed."""

    async def pipelines(self, query: PageQuery) -> Page[PipelineSnapshot]:
        """Return a page of the pipelines, those of the configuration that have not run yet included."""
        found, complete = await self._all()
        page = await self._pages.page(
            found,
            query,
            columns={
                "pipeline": lambda row: row.pipeline,
                "state": lambda row: row.state,
                "rows_per_s": lambda row: row.rows_per_s,
                "lag_records": lambda row: -1 if row.lag_records is None else row.lag_records,
                "lag_s": lambda row: -1.0 if row.lag_s is None else row.lag_s,
                "dead": lambda row: row.dead if row.open_letters is None else row.open_letters,  # as it is shown
            },
            name=lambda row: row.pipeline,
            row=lambda row: row,
        )
        return page if complete else Page(page.rows, page.next, page.total, page.matched, complete=False)

    async def hops(self) -> tuple[Hop, ...]:
        """Return all pipelines as a hop of the data, and their tables as another; empty without a pipeline.

        Errors of the pipelines are dead letters that are not known to be closed, and pipelines that failed or were
        lost; errors of the tables are those of :class:`TableTotals`.
        """
        found, _ = await self._all()
        if not found:
            return ()
        reports = [(each, self._reports[each.pipeline][1]) for each in found if each.pipeline in self._reports]
        tables = [(each.state == "running", report.tables) for each, report in reports if report.tables is not None]
        running = [totals for runs, totals in tables if runs]
        lags = [each for each in found if each.lag_records is not None]
        pipelines = Hop(
            "pipelines", "Pipelines", "records",
            rate=sum(each.rows_per_s for each in found),
            total=sum(each.read for each in found),
            errors=sum(each.dead if each.open_letters is None else each.open_letters for each in found)
            + sum(each.state in ("failed", "lost") for each in found),
            lag_records=sum(each.lag_records or 0 for each in lags) if lags else None,
            lag_s=max((each.lag_s or 0.0 for each in lags), default=None),
            to=(
                *(("tables",) if tables else ()),
                *(("statestore",) if any(report.writes_keys for _, report in reports) else ()),
            ),
        )  # fmt: skip
        if not tables:
            return (pipelines,)
        behind = [totals for totals in running if totals.lag_records is not None]
        return pipelines, Hop(
            "tables", "Tables", "rows",
            rate=sum(totals.written_per_s for totals in running),
            total=sum(totals.written for _, totals in tables),
            errors=sum(totals.errors for _, totals in tables),
            lag_records=sum(totals.lag_records or 0 for totals in behind) if behind else None,
            lag_s=max((totals.lag_s or 0.0 for totals in behind), default=None),
        )  # fmt: skip

    async def _all(self) -> tuple[list[PipelineSnapshot], bool]:
        """Return the pipelines, and False if there are more."""
        found = {name: self._pipeline(name, None, _snapshot(name, {})) for name in self._managed()}
        reports = {}
        pattern, after = f"{PREFIX}*{STATUS}".encode(), None
        ends_s = time.monotonic() + MAX_S
        while True:
            records, after = self._store.records(pattern, after, STEP_KEYS)
            for record in records:
                name = record.key.decode(errors="replace").removeprefix(PREFIX).removesuffix(STATUS)
                if (report := self._report(name, record)) is not None:
                    reports[name] = record.version, report
                    found[name] = self._pipeline(name, record, report.pipeline)
            if after is None or len(found) >= MAX_PIPELINES or time.monotonic() > ends_s:
                break
            await self._pages.pause()
        self._reports = reports
        return list(found.values()), after is None

    def pipeline(self, name: str) -> PipelineDetail | None:
        """Return one pipeline with its sinks; None if it has neither a status nor a place in the configuration."""
        record = self._store.record(f"{PREFIX}{name}{STATUS}".encode())
        status = None if record is None else _status(record)
        if status is None and name not in self._managed():
            return None
        status = status or {}
        found = self._pipeline(name, record, _snapshot(name, status))
        return PipelineDetail(found, sinks_of(status), graph_of(status), expectations_of(status))

    def count_letters(self, before: PipelineDetail | None, open_letters: int) -> None:
        """Note that ``open_letters`` of a pipeline were open or corrected when its dead letters were listed, and that
        ``before`` was its state when that began."""
        if before is not None:
            found = before.pipeline
            self._listed[found.pipeline] = _ListedLetters(found.run, found.dead, open_letters)

    def follow_letters(self) -> None:
        """Count the letters that runs wrote since they were listed. Call it more often than a pipeline can be started
        again: the next run reports its own letters only."""
        for name in self._listed:
            record = self._store.record(f"{PREFIX}{name}{STATUS}".encode())
            report = None if record is None else self._report(name, record)
            if record is not None and report is not None:
                self._reports[name] = record.version, report
                self._open_letters(name, report.pipeline)

    def _open_letters(self, name: str, report: PipelineSnapshot) -> int | None:
        listed = self._listed.get(name)
        if listed is None:
            return None
        if report.run is not None:
            self._listed[name] = listed = listed.after(report.run, report.dead)
        return listed.open_now

    def _report(self, name: str, record: Record) -> _Report | None:
        """Return what the run of a pipeline reports in ``record``; None if this is not a status."""
        version, report = self._reports.get(name, (None, None))
        if version == record.version:
            return report
        status = _status(record)
        if status is None:
            return None
        writes_keys = bool(sink_names(status, lambda kind: kind == "statestore"))
        return _Report(_snapshot(name, status), tables_of(status), writes_keys)

    def _pipeline(self, name: str, record: Record | None, report: PipelineSnapshot) -> PipelineSnapshot:
        """Return ``report`` with what this node knows: the lease, the age of the status, and letters."""
        lease = self._store.record(f"{PREFIX}{name}/lease".encode())
        # Another client's run may be text that cannot be encoded.
        holds = lease is not None and report.run is not None and lease.value.decode(errors="replace") == report.run
        found = replace(
            report,
            state="lost" if report.state == "running" and not holds else report.state,
            status_age_s=None if record is None else max(0, self._store.clock() - record.version.wall_ms) / 1000,
            managed=name in self._managed(),
            open_letters=self._open_letters(name, report),
        )
        return found if holds else replace(found, rows_per_s=0.0, lag_records=None, lag_s=None, spark_ui=None)


class _Report(NamedTuple):
    """The status of a run: the pipeline as if the run held its lease, its tables, and whether it writes keys."""

    pipeline: PipelineSnapshot
    tables: TableTotals | None
    writes_keys: bool


class _ListedLetters(NamedTuple):
    """Dead letters that were ``open`` when those of a pipeline were listed, or when ``run`` began, and the number that
    this run had written then and last."""

    run: str | None
    written: int
    open: int
    last_written: int = 0

    @property
    def open_now(self) -> int:
        """The number that is open if no other command has closed some."""
        return self.open + max(0, self.last_written - self.written)

    def after(self, run: str | None, written: int) -> _ListedLetters:
        """Return these letters and those of ``run``, which has ``written`` so many."""
        if run == self.run:
            return self._replace(last_written=written)
        return _ListedLetters(run, 0, self.open_now, written)


def _snapshot(name: str, status: Mapping[str, Any]) -> PipelineSnapshot:
    """Return a pipeline as the status of its run describes it, as if the run held its lease."""
    sinks = sinks_of(status)
    lags = [sink for sink in sinks if sink.lag_records is not None]
    # Each sink counts a record that a shared step rejected, but only one writes its dead letter. Without a table
    # for them, and in runs of earlier versions, no sink has written any.
    dead = sum(sink.letters for sink in sinks) or sum(sink.dead for sink in sinks)
    return PipelineSnapshot(
        pipeline=name,
        state=field_of(status, "state", str) or "never run",
        run=field_of(status, "run", str) or None,
        host=field_of(status, "host", str) or None,
        pid=field_of(status, "pid", int) or None,
        since_at=_time(status, "since"),
        status_age_s=None,
        why=field_of(status, "why", str)[:MAX_TEXT] or None,
        sinks=len(sinks),
        rows_per_s=sum(sink.rows_per_s for sink in sinks),
        lag_records=max((sink.lag_records or 0 for sink in lags), default=None),
        lag_s=max((sink.lag_s or 0.0 for sink in lags), default=None),
        read=sum(sink.read for sink in sinks),
        out=sum(sink.out for sink in sinks),
        dead=dead,
        restarts=sum(sink.restarts for sink in sinks),
        managed=False,
        spark_ui=_web_address(field_of(status, "spark_ui", str)),
    )


def _status(record: Record) -> dict[str, Any] | None:
    """The status in ``record``; None if it is not one."""
    if len(record.value) > MAX_STATUS_BYTES:
        return None
    try:
        found = json.loads(record.value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("run"), str) else None


def _web_address(text: str) -> str | None:
    """Return ``text`` if it is an address of a web page: another client may write a link that runs a script."""
    return text if text.startswith(("http://", "https://")) and len(text) <= MAX_TEXT else None


def _time(status: Mapping[str, Any], name: str) -> int | None:
    try:
        return int(datetime.fromisoformat(field_of(status, name, str)).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
