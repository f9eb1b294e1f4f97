"""Maintenance of Delta tables on a schedule, in a thread of the run that writes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.pipelines.sinks.delta import is_delta_table
from penstock.pipelines.sinks.maintenance import maintain, maintained_at
from penstock.pipelines.spec.sinks import Maintenance, Sink
from penstock.pipelines.spec.values import duration_ms
from penstock.spark.files.object_storage import StoragePath

__all__ = ["MaintenanceSchedule"]

_CHECK_S = 10.0
"""Longest pause between two checks whether a table is due: another process may have maintained it."""
_HOUR_MS = 3_600_000


class MaintenanceSchedule:
    """Maintains the tables of ``sinks`` that have ``maintenance``, one at a time, until it is closed.

    ``report`` is called in the thread of the schedule with an event ``maintenance`` or ``warning`` and its fields. A
    failed maintenance is repeated when it is due again: no row depends on it.
    """

    def __init__(self, sinks: Sequence[Sink], report: Callable[..., None]) -> None:
        # Several sinks may write one table.
        self.tables = {
            _absolute(sink.table.location): (sink.name, sink.table.maintenance, sink.table.file_bytes)
            for sink in sinks
            if sink.table is not None and sink.table.maintenance is not None
        }
        """By path: the sink, its plan of maintenance and its file size."""
        self._report = report
        self._tried: dict[StoragePath, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="table maintenance", daemon=True)

    def start(self) -> None:
        """Start the thread, if there is a table to maintain."""
        if self.tables:
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop after the current table; wait at most ``timeout_s``, after which the end of the process interrupts it.

        An interrupted maintenance leaves the table as it was, and files that the next one removes. Only the first call
        waits.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            self.run_due(time.time())
            self._closing.wait(min(_CHECK_S, *(duration_ms(plan.every) / 1000 for _, plan, _ in self.tables.values())))

    def run_due(self, now: float) -> None:
        """Maintain the tables that are due at ``now`` (seconds since 1970); those that do not exist yet are not."""
        for path, (sink, plan, file_bytes) in self.tables.items():
            if self._closing.is_set():
                return
            try:
                every_s = duration_ms(plan.every) / 1000
                if now < self._tried.get(path, 0.0) + every_s or not is_delta_table(path):
                    continue
                # Read only if it can be due: a table in a bucket is loaded for it.
                self._tried[path] = maintained_at(path)
                if now >= self._tried[path] + every_s:
                    self._tried[path] = now
                    self._maintain(sink, path, plan, file_bytes)
            except Exception as error:  # noqa: BLE001 - it would end the thread, and with it all later maintenance
                self._tried[path] = now
                self._report("warning", text=f"sink {sink!r}: its table was not maintained: {error}")

    def _maintain(self, sink: str, path: StoragePath, plan: Maintenance, file_bytes: int) -> None:
        began = time.monotonic()
        found = maintain(
            path,
            retention_h=_hours(plan.retention),
            target_bytes=plan.target_bytes or file_bytes,
            log_retention_h=None if plan.log_retention is None else _hours(plan.log_retention),
            in_use=True,
        )
        fields: dict[str, Any] = found._asdict()
        self._report("maintenance", sink=sink, **fields, took_s=round(time.monotonic() - began, 3))


def _absolute(path: StoragePath) -> StoragePath:
    return path.absolute() if isinstance(path, Path) else path


def _hours(duration: str) -> int:
    """Return the hours of ``duration``, rounded up: nothing is removed before the time that the file names."""
    return -(-duration_ms(duration) // _HOUR_MS)
