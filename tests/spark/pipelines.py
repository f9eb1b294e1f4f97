"""One pipeline against the node of the suite, in the Spark session of the suite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.run import run as running
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.tube.record import Record
from tests.spark.node import Node

__all__ = ["Setup", "Shared"]


class Shared:
    """The session of the suite, which a run must not stop."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name == "stop" else getattr(self._spark, name)


class Setup:
    """One pipeline with directories, a topic and a name of its own."""

    def __init__(self, node: Node, topic: str, directory: Path, text: str) -> None:
        self.node = node
        self.topic = topic
        self.state = directory / "state"
        self.lake = directory / "lake"
        self.text = text.format(name=topic, topic=topic, master=node.master, broker=node.mqtt, lake=self.lake)
        self.pipeline: Pipeline = loader.parse(self.text, name="p.yaml")
        self.ledger = Ledger(self.state / "ledger")
        self.events: list[dict[str, Any]] = []

    def send(self, *messages: Record | bytes) -> None:
        self.node.append(self.topic, [(0, m) for m in messages])

    def run(self, stop: threading.Event | None = None, *, available_now: bool = True, **options: Any) -> None:
        running.run(
            self.pipeline,
            state=self.state,
            options=running.RunOptions(available_now=available_now, **options),
            emit=self.events.append,
            stop=stop or threading.Event(),
        )

    @contextmanager
    def running(self) -> Iterator[Future[None]]:
        """Run the pipeline in a thread, and stop it at the end of the block. Raises its error."""
        stop = threading.Event()
        with ThreadPoolExecutor(1) as executor:
            run = executor.submit(self.run, stop, available_now=False, progress_s=0.2)
            try:
                yield run
            finally:
                stop.set()
        run.result()

    def rows(self) -> list[str]:
        found = [pq.ParquetFile(file).read(["_id"])["_id"].to_pylist() for file in files(self.lake / "rows")]
        return sorted(str(name) for names in found for name in names)

    def dead(self) -> list[dict[str, Any]]:
        return [row for file in files(self.lake / "dead") for row in pq.ParquetFile(file).read().to_pylist()]

    def forget_the_last_commit(self, sink: str) -> int:
        """As after a crash between the sink and Spark's commit of the batch."""
        commits = self.state / "checkpoints" / sink / "commits"
        last = max(int(path.name) for path in commits.glob("[0-9]*"))
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)
        return last

    def forget_the_last_data(self, sink: str) -> None:
        """The same for the last batch that had records: those after it only closed windows or dropped state."""
        checkpoint = self.state / "checkpoints" / sink
        batches = sorted((int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*")), reverse=True)
        read = {entry.batch: entry.read for entry in self.ledger.entries(sink)}
        for batch in batches:
            if read[batch]:
                break
            for log in ("offsets", "commits"):
                (checkpoint / log / str(batch)).unlink()
                (checkpoint / log / f".{batch}.crc").unlink(missing_ok=True)
        self.forget_the_last_commit(sink)
