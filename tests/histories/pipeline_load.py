"""A pipeline that copies a topic of :mod:`tests.histories.tube_load` into a table while nodes of a cluster fail.

A run that ends by itself, as one that has lost its lease does, is started again, as by a supervisor.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow.parquet as pq

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.loader import load
from tests.end_to_end.nodes import PENSTOCK, environment
from tests.histories.tube import Sent

__all__ = ["PipelineLoad"]

FILE = """\
name: histories
source: {{topics: [{topic}], master: "{masters}"}}
statestore: {{broker: "{broker}"}}
trigger: 500 milliseconds
steps:
  - name: records
    parse: {{schema: "producer STRING NOT NULL, number INT NOT NULL"}}
sinks:
  - name: rows
    table: {{path: "{lake}/rows"}}
"""
DEADLINE_S = 900
"""Spark starts in 10 s on an idle machine."""


class PipelineLoad:
    """The pipeline in ``folder``, from ``topic`` at ``masters``, with its lease at ``broker``."""

    def __init__(self, folder: Path, masters: str, topic: str, broker: str) -> None:
        self.starts = 0
        self._folder = folder
        self._file = folder / "histories.yaml"
        self._file.write_text(FILE.format(topic=topic, masters=masters, broker=broker, lake=folder / "lake"))
        self._batches = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        result = (await asyncio.gather(self._task, return_exceptions=True))[0]
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if error is None and isinstance(result, Exception):
            raise result

    async def _run(self) -> None:
        arguments = (
            *("pipeline", "run", str(self._file), "--json", f"--state-dir={self._folder / 'state'}"),
            *("--conf", "spark.sql.shuffle.partitions=1"),
        )
        while True:
            self.starts += 1
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *PENSTOCK,
                    *arguments,
                    cwd=self._folder,
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # with its JVM, which ends with it
                )
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                self._batches += json.loads(line)["event"] == "batch"
            await self._process.wait()

    @property
    def _log(self) -> Path:
        return self._folder / "pipeline.log"

    async def more(self, batches: int = 1) -> None:
        """Return when so many more batches have ended."""
        wanted = self._batches + batches
        await self._until(lambda: self._batches >= wanted)

    async def finish(self, acknowledged: set[Sent]) -> str:
        """Wait until the table has every acknowledged record, and check it; one line about it."""
        while not acknowledged <= {(row["producer"], row["number"]) for row in await asyncio.to_thread(self._rows)}:
            await self.more()
        assert self._task is not None
        assert self._process is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._process.terminate()
        assert self._process.stdout is not None
        await asyncio.wait_for(self._process.stdout.read(), DEADLINE_S)
        assert await asyncio.wait_for(self._process.wait(), DEADLINE_S) == 0, self._log.read_text()[-3000:]
        rows = self._rows()
        assert max(Counter(row["_id"] for row in rows).values()) == 1, "each stored record is in the table once"
        records = Counter((row["producer"], row["number"]) for row in rows if row["producer"] == "once")
        assert max(records.values()) == 1, "and the idempotent producer's, which are stored once"
        pipeline, state = load(self._file), self._folder / "state"
        (account,) = await asyncio.to_thread(reconcile, pipeline, state, source_count(pipeline, state))
        assert (account.off, account.unknown) == ((), ())
        return f"ok rows={len(rows)} batches={self._batches} starts={self.starts}"

    def _rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in files(self._folder / "lake" / "rows"):
            found += pq.ParquetFile(path).read(["producer", "number", "_id"]).to_pylist()
        return found

    async def _until(self, holds: Callable[[], bool]) -> None:
        assert self._task is not None
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not holds():
                    if self._task.done():
                        self._task.result()
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(self._log.read_text()[-3000:]) from None
