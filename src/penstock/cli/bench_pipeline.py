"""`penstock bench pipeline`: telemetry through a topic and a pipeline of its own into tables.

Without a rate, the messages are in the topic before the pipeline starts, and its rate is measured. With a rate, the
pipeline runs before the measured messages are sent, and their latency is measured as well. A message is committed when
the ledger has the batches with its rows in all tables: the time is that of the ledger's file.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import shutil
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import typer

from penstock.cli.bench_operations import Operation, paced, print_operations, show_progress
from penstock.cli.options import DEFAULT, Json, StateStoreOptions, duration_option, local_node, size_option
from penstock.cli.output import fold, note
from penstock.cli.tube.access import TubeConnectionOptions, connects, run_client
from penstock.cli.tube.topics import create_topic, delete_topic
from penstock.errors import ConfigError, PenstockError, StorageError, UnavailableError

if TYPE_CHECKING:
    from penstock.demo.stack import Child
    from penstock.pipelines.ledger.ledger import LedgerEntry
    from penstock.tube.client.sender import SendResult

__all__ = ["Batch", "TableRows", "commit_times", "committed_rate", "count_rows", "pipeline"]

_MESSAGES: Final = 100_000
_SECONDS: Final = 20
"""Duration of the measured messages with a rate, by default."""
_BATCHES: Final = 5
"""Batches of a backlog, by default: the first one is slow, as Java compiles."""
_WARM_BATCHES: Final = 3
"""Batches before the measurement at a rate: the first ones start processes of Python, and Java compiles."""
_IN_FLIGHT: Final = 1000
_LONGEST_S: Final = 300.0
"""Longest wait for a batch; a loaded machine needs most of a minute to start Spark."""
_POLL_S: Final = 0.05
_NUMBER: Final = "number"
_SCHEMA: Final = (
    f"{_NUMBER} BIGINT NOT NULL, line STRING NOT NULL, machine STRING NOT NULL, time TIMESTAMP NOT NULL, "
    "state STRING NOT NULL, temperature DOUBLE NOT NULL, pressure DOUBLE, vibration DOUBLE, flow DOUBLE, good BIGINT, "
    "scrap BIGINT, text STRING"
)


@connects
def pipeline(
    tube: TubeConnectionOptions,
    broker: Annotated[
        str,
        typer.Option(
            help="MQTT broker of the state store, which has the lease of the pipeline. Default: that of the local "
            f"data directory, otherwise {DEFAULT}.",
            envvar="PENSTOCK_BROKER",
            metavar="URL",
            show_default=False,
        ),
    ] = DEFAULT,
    messages: Annotated[
        int | None,
        typer.Option(
            help=f"Number of measured messages. Default: {_MESSAGES:,}, or with --rate those of {_SECONDS} seconds.",
            min=1,
            max=100_000_000,
            metavar="N",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        int,
        typer.Option(
            help="Messages per second, while the pipeline runs; 0: all of them before it starts.", min=0, metavar="N"
        ),
    ] = 0,
    size: Annotated[int, size_option("--size", text="Least bytes of a message.", default="250")] = 250,
    table_format: Annotated[Literal["delta", "parquet"], typer.Option(help="Format of the tables.")] = "delta",
    sinks: Annotated[int, typer.Option(help="Number of tables, each with all rows.", min=1, max=100, metavar="N")] = 1,
    partitions: Annotated[int, typer.Option(help="Partitions of the topic.", min=1, max=1000, metavar="N")] = 3,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            help=f"Most messages of a batch. Default: a {_BATCHES}th of the messages; no limit with --rate.",
            min=1,
            metavar="N",
            show_default=False,
        ),
    ] = None,
    trigger: Annotated[
        float, duration_option("--trigger", text="Interval of the batches.", at_least_s=0.001, default="500ms")
    ] = 0.5,
    spark_master: Annotated[
        str, typer.Option(help="Spark master: local[N], where N is the number of cores.", metavar="MASTER")
    ] = "local[2]",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the topic, and the directory with the tables.")] = False,
    as_json: Json = False,
) -> None:
    """Measure a pipeline: from TubeMQ, through a parse step, into tables.

    The topic is new and has telemetry as JSON. Without --rate, `commit` has the rate of the pipeline after its first
    batch. With --rate, its latencies are those from the time at which a message was due to the commit of its batch in
    all tables. At the end every table must have every row once; then the topic, the tables and the keys of the pipeline
    are deleted. Spark runs in a process on this machine.
    """
    count = messages or (rate * _SECONDS if rate else _MESSAGES)
    if rate and batch is not None and batch < rate * trigger:
        raise ConfigError(
            f"--batch {batch} is less than the messages of one --trigger ({rate * trigger:g})",
            option="--batch",
            why="the pipeline could never keep up with --rate",
            hint="raise --batch, or omit it",
        )
    load = Load(
        messages=count,
        rate=rate,
        size=size,
        sinks=[f"table{n}" for n in range(1, sinks + 1)],
        format=table_format,
        partitions=partitions,
        batch=batch or (None if rate else -(-count // _BATCHES)),
        trigger_ms=round(trigger * 1000),
        spark_master=spark_master,
    )
    try:
        for needed in ("pyspark", "penstock.demo.stack"):
            import_module(needed)
    except ImportError as error:
        raise ConfigError(f"a pipeline lacks a package: {error}", hint='pip install "penstock[all]"') from error
    store = StateStoreOptions(
        broker=broker,
        username=tube.username,
        password_file=tube.password_file,
        ca_file=tube.ca_file,
        cert_file=tube.cert_file,
        key_file=tube.key_file,
    )
    run_client(_Run(load, tube, store, keep=keep, as_json=as_json).main())


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a measurement. ``rate`` 0: all messages are sent before the pipeline starts."""

    messages: int
    rate: int
    size: int
    sinks: Sequence[str]
    format: str
    partitions: int
    batch: int | None
    trigger_ms: int
    spark_master: str

    def file(self, name: str, topic: str, directory: Path, master: TubeConnectionOptions, broker: str) -> str:
        """Return the pipeline file."""
        options = {**master.spark_options(), "tubemq.group": ""}  # no offsets of a group stay in the log
        if self.batch is not None:
            options["maxOffsetsPerTrigger"] = str(self.batch)
        store: dict[str, str] = {"broker": broker}
        if master.username is not None and "@" not in broker:
            store |= {"username": master.username, "password_file": str(master.password_file)}
        content = {
            "name": name,
            "source": {"topics": [topic], "master": master.tube_master, "options": options},
            "statestore": store,
            "trigger": f"{self.trigger_ms} milliseconds",
            "dead_letters": {"path": str(directory / "dead_letters")},
            "steps": [{"name": "telemetry", "parse": {"schema": _SCHEMA}}],
            "sinks": [
                {"name": sink, "table": {"format": self.format, "path": str(directory / sink)}} for sink in self.sinks
            ],
        }
        return json.dumps(content, indent=1)  # YAML contains JSON


def telemetry(size: int) -> Iterator[bytes]:
    """Yield readings of the demo's plant as JSON, numbered from 0, and filled up to ``size`` bytes."""
    from penstock.demo.plant import Plant

    plant = Plant(0, datetime.now(UTC))
    numbers = itertools.count()
    for turn in itertools.count():
        for machine in plant.machines:
            for message in plant.messages(machine, float(turn)):
                payload = b'{"number": %d, ' % next(numbers) + message.payload[1:]
                missing = size - len(payload) - len(b', "text": ""')
                yield payload[:-1] + b', "text": "%s"}' % (b"x" * missing) if missing >= 0 else payload


class Batch(NamedTuple):
    """A batch of one sink in the ledger: the offsets that it read by partition, and the time of its commit."""

    sink: str
    number: int
    start: Mapping[str, int]
    end: Mapping[str, int]
    read: int
    took_s: float
    at: float


def committed_rate(batches: Iterable[Batch], sinks: int) -> tuple[int, float]:
    """Return messages that were committed in all tables, and the seconds that this took, without the first batch.

    A single batch counts with its duration.
    """
    groups: dict[int, list[Batch]] = {}
    for each in batches:
        groups.setdefault(each.number, []).append(each)
    whole = [(max(b.at for b in found), found[0]) for _, found in sorted(groups.items()) if len(found) == sinks]
    if not whole:
        return 0, 0.0
    if len(whole) == 1:
        return whole[0][1].read, max(b.took_s for b in groups[whole[0][1].number])
    return sum(found.read for _, found in whole[1:]), whole[-1][0] - whole[0][0]


def commit_times(batches: Iterable[Batch], stored: Sequence[tuple[str, int]]) -> list[float | None]:
    """Return for each message, by partition and offset, when the last table had its row; None without a commit."""
    by_place: dict[tuple[str, str], list[tuple[int, int, float]]] = {}
    sinks: set[str] = set()
    for each in batches:
        sinks.add(each.sink)
        for partition, end in each.end.items():
            by_place.setdefault((each.sink, partition), []).append((end, each.start.get(partition, 0), each.at))
    for found in by_place.values():
        found.sort()

    def committed(sink: str, partition: str, offset: int) -> float | None:
        # The first batch that ends after the offset has read it.
        found = by_place.get((sink, partition), [])
        index = bisect_left(found, offset + 1, key=lambda batch: batch[0])
        return found[index][2] if index < len(found) and found[index][1] <= offset else None

    times = []
    for partition, offset in stored:
        at = [committed(sink, partition, offset) for sink in sinks]
        times.append(None if not at or None in at else max(when for when in at if when is not None))
    return times


class TableRows(NamedTuple):
    """Messages without a row in a table, and rows of a message that has one already."""

    missing: int
    repeated: int


def count_rows(directory: Path, messages: int) -> TableRows:
    """Count the committed rows of the table in ``directory``, which should have each number below ``messages`` once."""
    import numpy as np
    import pyarrow.parquet as pq

    from penstock.pipelines.sinks.table import files

    counts = np.zeros(messages, dtype=np.int64)
    for file in files(directory):
        found = pq.ParquetFile(file).read([_NUMBER]).column(_NUMBER).to_numpy()
        counts += np.bincount(found, minlength=messages)
    return TableRows(int((counts == 0).sum()), int(np.maximum(counts - 1, 0).sum()))


@dataclass
class _Sent:
    """Messages that the broker has acknowledged: when each was due (``time.time``), its partition and offset."""

    due: list[float] = field(default_factory=list)
    stored: list[tuple[str, int]] = field(default_factory=list)


class _Run:
    """A measurement: its topic, directory and pipeline."""

    def __init__(
        self, load: Load, tube: TubeConnectionOptions, store: StateStoreOptions, *, keep: bool, as_json: bool
    ) -> None:
        self._load = load
        self._tube = tube
        self._store = store
        self._keep = keep
        self._json = as_json
        self._name = f"penstock-bench-{secrets.token_hex(4)}"
        self._topic = self._name.replace("-", "_")
        self._directory = Path(tempfile.mkdtemp(prefix=f"{self._name}-"))
        self._child: Child | None = None
        self._events: list[dict[str, Any]] = []
        self._token: str | None = None
        self._committed_at: dict[tuple[str, int], float] = {}
        self._messages = telemetry(load.size)
        self._began = 0.0

    async def main(self) -> None:
        """Measure, print the result, and delete what is not kept.

        Raises:
            StorageError: a table lacks a row, or has one twice.
        """
        created = False
        began, cpu = time.perf_counter(), time.process_time()
        try:
            await asyncio.to_thread(
                create_topic, self._tube, self._topic, {"numPartitions": str(self._load.partitions)}
            )
            created = True
            produce, commit, total = await (self._at_rate() if self._load.rate else self._backlog())
            client_cpu = (time.process_time() - cpu) / (time.perf_counter() - began)
            self._progress("counting the rows")
            tables = {sink: count_rows(self._directory / sink, total) for sink in self._load.sinks}
        finally:
            if self._child is not None:
                await self._child.kill()
            await self._clean(created=created)
        self._report(produce, commit, tables, total, client_cpu)

    def _progress(self, text: str) -> None:
        show_progress(text, as_json=self._json)

    # Load

    async def _backlog(self) -> tuple[Operation, Operation, int]:
        """Send all messages, then run the pipeline until it has read them."""
        load = self._load
        produce, commit = Operation("produce"), Operation("commit")
        messages = itertools.islice(self._messages, load.messages)
        async with self._producer() as producer:
            began = time.perf_counter()

            async def work() -> None:
                for payload in messages:
                    started = time.perf_counter()
                    await producer.send(self._topic, payload)
                    produce.done(started, len(payload))
                    if produce.count % 1000 == 0:
                        self._progress(f"produced {produce.count:,} of {load.messages:,} messages")

            async with asyncio.TaskGroup() as group:
                for _ in range(_IN_FLIGHT):
                    group.create_task(work())
            produce.seconds = time.perf_counter() - began
        await self._start("--once")
        await self._until(load.messages)
        await self._end()
        commit.count, commit.seconds = committed_rate(self._batches(), len(load.sinks))
        commit.size = round(produce.size / produce.count * commit.count)
        return produce, commit, load.messages

    async def _at_rate(self) -> tuple[Operation, Operation, int]:
        """Run the pipeline, with a few batches before the measurement, and send messages at the rate."""
        load = self._load
        produce, commit = Operation("produce"), Operation("commit")
        sent = _Sent()
        await self._start()
        async with self._producer() as producer:
            total = 0
            for _ in range(_WARM_BATCHES):
                warm = itertools.islice(self._messages, max(1, round(load.rate * load.trigger_ms / 1000)))
                total += len(await asyncio.gather(*(producer.send(self._topic, payload) for payload in warm)))
                await self._until(total)
            slots = asyncio.Semaphore(_IN_FLIGHT * 10)
            wall_clock_s = time.time() - time.perf_counter()

            async def send(payload: bytes, due: float) -> None:
                try:
                    result: SendResult = await producer.send(self._topic, payload)
                finally:
                    slots.release()
                produce.done(due, len(payload))
                sent.due.append(due + wall_clock_s)
                sent.stored.append((f"{result.broker_id}:{result.partition}", result.append_offset))

            async with asyncio.TaskGroup() as group:
                number = 0
                async for due in paced(load.rate):
                    if number == load.messages:
                        break
                    self._check()
                    await slots.acquire()
                    group.create_task(send(next(self._messages), due))
                    number += 1
                    if number % load.rate == 0:
                        self._progress(f"sent {number:,} of {load.messages:,} messages at {load.rate:,}/s")
            total += number
        produce.seconds = number / load.rate
        await self._until(total)
        await self._end()
        last = first = min(sent.due)
        for sent_at, at in zip(sent.due, commit_times(self._batches(), sent.stored), strict=True):
            if at is not None:
                commit.latencies.add(max(0.0, at - sent_at))
                commit.count += 1
                last = max(last, at)
        commit.size, commit.seconds = round(produce.size / number * commit.count), last - first
        return produce, commit, total

    def _producer(self) -> Any:
        from penstock.tube.producer import Producer

        return Producer(self._tube.tube_master, max_in_flight=_IN_FLIGHT * 10, **self._tube.client())

    # Pipeline

    async def _start(self, *more: str) -> None:
        """Start the pipeline."""
        from penstock.demo.stack import Child

        file = self._directory / "pipeline.yaml"
        text = self._load.file(self._name, self._topic, self._directory, self._tube, self._store.broker)
        file.write_text(text, encoding="utf-8")
        state = f"--state-dir={self._directory / 'state'}"
        self._progress("starting Spark; this takes ten seconds or more")
        self._child = Child(
            "pipeline",
            ["pipeline", "run", str(file), "--json", state, f"--spark-master={self._load.spark_master}", *more],
            log=self._directory / "pipeline.log",
            on_event=self._record,
        )
        self._began = time.time()
        await self._child.start()

    async def _end(self) -> None:
        """Stop the pipeline between two batches."""
        assert self._child is not None
        self._progress("stopping the pipeline")
        if await self._child.stop() != 0:
            raise self._child.failure()

    def _record(self, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "started":
                self._token = event["fencing_token"]
            case "batch":
                self._events.append(event)
                sink, number = event["sink"], event["batch"]
                # A run reports a batch up to 0.1 s after its commit.
                at = (self._directory / "state" / "ledger" / sink / f"{number}.json").stat().st_mtime
                self._committed_at[sink, number] = at

    def _read(self) -> int:
        """Messages that all tables have."""
        read = dict.fromkeys(self._load.sinks, 0)
        for event in self._events:
            read[event["sink"]] += event["read"]
        return min(read.values())

    def _batches(self) -> list[Batch]:
        """Return the batches with rows, from the ledger."""
        from penstock.pipelines.ledger.ledger import Ledger

        ledger = Ledger(self._directory / "state" / "ledger")
        took = {(event["sink"], event["batch"]): event["took_s"] for event in self._events}

        def batch(entry: LedgerEntry) -> Batch:
            start, end = entry.start.get(self._topic, {}), entry.end.get(self._topic, {})
            at = (entry.sink, entry.batch)
            return Batch(entry.sink, entry.batch, start, end, entry.read, took[at], self._committed_at[at])

        return [batch(entry) for sink in self._load.sinks for entry in ledger.entries(sink) if entry.read]

    def _check(self) -> None:
        """Raise UnavailableError if the pipeline has ended."""
        assert self._child is not None
        if not self._child.is_running:
            raise self._child.failure()

    async def _until(self, total: int) -> None:
        """Wait until ``total`` messages are committed in all tables.

        Raises:
            UnavailableError: the pipeline ended, or has committed nothing for five minutes.
        """
        read, since = self._read(), time.monotonic()
        while read < total:
            self._check()
            if time.monotonic() - since > _LONGEST_S:
                raise UnavailableError(
                    f"the pipeline has committed nothing for {_LONGEST_S:g} s",
                    why=f"{read:,} of {total:,} messages are committed",
                    hint="repeat it with --keep, and read its pipeline.log",
                )
            await asyncio.sleep(_POLL_S)
            if (now := self._read()) != read:
                read, since = now, time.monotonic()
                self._progress(f"committed {read:,} of {total:,} messages")

    # End

    async def _clean(self, *, created: bool) -> None:
        """Delete the topic, the directory and the keys of the pipeline, unless they are to be kept."""
        self._progress("")
        if self._keep:
            note(f"kept: topic {self._topic}, and {self._directory} with the tables, the ledger and pipeline.yaml")
            return
        shutil.rmtree(self._directory, ignore_errors=True)
        try:
            if created:
                await asyncio.to_thread(delete_topic, self._tube, self._topic)
            if self._token is not None:
                await self._delete_keys(self._token)
        except PenstockError as error:
            note(
                f"not deleted: topic {self._topic}, or keys penstock/pipeline/{self._name}/*: {error.what}\n"
                f"  hint: penstock tube topic delete {self._topic}"
            )

    async def _delete_keys(self, token: str) -> None:
        from penstock.pipelines.spec.values import apply_key, lease_key, run_key, stop_key
        from penstock.statestore.hlc import parse

        async with self._store.store() as store:
            for key in (lease_key, run_key, stop_key, apply_key):
                await store.delete(key(self._name), fencing_token=parse(token))

    def _report(
        self, produce: Operation, commit: Operation, tables: Mapping[str, TableRows], total: int, client_cpu: float
    ) -> None:
        """Print the result.

        Raises:
            StorageError: a table lacks a row, or has one twice.
        """
        load = self._load
        first_s = min(self._committed_at.values()) - self._began
        batches = len({number for _, number in self._committed_at})
        missing, repeated = (sum(column) for column in zip(*tables.values(), strict=True))
        commit.fields = {
            "first_batch_s": round(first_s, 3), "batches": batches, "table_rows": total,
            "missing_rows": missing, "repeated_rows": repeated,
        }  # fmt: skip
        found = local_node(self._store.broker)
        settings: dict[str, object] = {
            "server": self._tube.tube_master, "durability": None if found is None else str(found["durability"]),
            "messages": load.messages, "rate": load.rate or None, "size": load.size, "partitions": load.partitions,
            "table_format": load.format, "sinks": len(load.sinks), "batch": load.batch, "trigger_ms": load.trigger_ms,
            "spark_master": load.spark_master,
        }  # fmt: skip
        print_operations([produce, commit], settings, client_cpu=client_cpu, as_json=self._json)
        wrong = [name for name, rows in tables.items() if any(rows)]
        if not self._json:
            each = "" if wrong else f"; {'each' if len(tables) > 1 else 'the'} table has each of {total:,} rows once"
            text = f"first batch committed {first_s:.1f} s after the start of the pipeline; {batches} batches{each}"
            sys.stdout.write(fold("", text) + "\n")
            sys.stdout.flush()
        if wrong:
            raise StorageError(
                f"table {wrong[0]!r} lacks {tables[wrong[0]].missing} of {total} rows, and has "
                f"{tables[wrong[0]].repeated} rows twice",
                path=str(self._directory / wrong[0]),
                why="the producer sent a record again whose first copy was stored" if not missing else None,
                hint="repeat it with --keep, and compare: penstock pipeline reconcile pipeline.yaml",
            )
