"""Driver, executor, node and tube broker killed -9 at random under load: nothing is lost, doubled or turned back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.errors import PenstockError
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.loader import load
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.end_to_end.nodes import PENSTOCK, RunningNode, environment, lines_of
from tests.spark.processes import Cluster, Driver, until

FILE = """\
name: chaos
source: {{topics: [chaos], master: "{master}", options: {{maxOffsetsPerTrigger: 400}}}}
statestore: {{broker: "{broker}"}}
trigger: 200 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "place STRING NOT NULL, time TIMESTAMP NOT NULL, n INT NOT NULL"}}
  - name: once
    dedupe: {{within: 1 day}}
  - name: once_in_time
    from: parsed
    dedupe: {{on: event}}
  - name: days
    window: {{time: time, duration: 1 day, watermark: 2 days, by: [place], aggregates: {{n: count(*), most: max(n)}}}}
sinks:
  - name: rows
    from: once
    table: {{path: "{lake}/rows"}}
  - name: alarms
    statestore: {{entries: [{{key: "chaos/{{place}}", value: [n, most]}}]}}
"""
PLACES = 3
VICTIMS = ("driver", "executor", "node", "broker")
ROUNDS = int(os.environ.get("PENSTOCK_CHAOS_ROUNDS", "4"))
PAUSE_S = (2.0, 12.0)
POISON = 200


class Load:
    """Sends 20 records a second for as long as it is let, each until it is acknowledged; watches the alarms."""

    def __init__(self, master: str, broker: str) -> None:
        self.acknowledged: set[str] = set()
        self.alarms: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.stop = threading.Event()
        self._master = master
        self._broker = broker
        self._threads = [threading.Thread(target=asyncio.run, args=(work(),)) for work in (self._send, self._watch)]
        self._closed = threading.Event()

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._closed.set()
        for thread in self._threads:
            thread.join(60)

    def sent(self) -> bool:
        return self.stop.is_set() and not self._threads[0].is_alive()

    async def _send(self) -> None:
        number = 0
        async with Producer(self._master, reorder=True) as producer:
            while not self.stop.is_set():
                names = [f"m{n}" for n in range(number, number + 20)]
                number += 20
                while True:
                    # Some of them may have been taken: those are copies, for the dedupe to find.
                    with contextlib.suppress(PenstockError):
                        await producer.send_all("chaos", [self._record(name) for name in names])
                        break
                    if self._closed.is_set():
                        return
                    await asyncio.sleep(0.5)
                self.acknowledged.update(names)
                await asyncio.sleep(1.0)

    @staticmethod
    def _record(name: str) -> Record:
        n = int(name[1:])
        body = {"place": f"p{n % PLACES}", "time": f"2024-05-01T{n // 60 % 24:02}:{n % 60:02}:00Z", "n": n}
        return Record(b"poison" if n % POISON == 0 else json.dumps(body).encode(), id=name)

    async def _watch(self) -> None:
        """Each value that an alarm had, in order."""
        while not self._closed.is_set():
            with contextlib.suppress(PenstockError, TimeoutError, OSError):
                async with StateStoreClient.connect(self._broker) as store, asyncio.TaskGroup() as group:
                    for place in range(PLACES):
                        group.create_task(self._watch_one(store, f"chaos/p{place}"))

    async def _watch_one(self, store: StateStoreClient, key: str) -> None:
        async with store.observe(key) as changes:
            if changes.entry is not None:
                self._note(key, changes.entry.value)
            while not self._closed.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        async for change in changes:
                            self._note(key, change.value)

    def _note(self, key: str, value: bytes | None) -> None:
        found = json.loads(value) if value is not None else {"n": -1, "most": -1}
        self.alarms[key].append((found["n"], found["most"]))


class Broker:
    """One more tube broker, as a process."""

    def __init__(self, directory: Path, master: str) -> None:
        self._directory = directory
        self._master = master
        self._address = "127.0.0.1:0"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Broker:
        argv = [*PENSTOCK, "tube", "broker", "run", "--broker-id", "2", "--tube-master", self._master, "--json"]
        argv += ["--data-dir", str(self._directory / "broker"), "--tube-broker", self._address]
        with (self._directory / "broker.log").open("ab") as log:
            self.process = subprocess.Popen(
                argv, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
            )
        ready = json.loads(next(lines_of(self.process)))
        self._address = ready["tube_broker"]
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def ids(table: Path, column: str) -> list[str]:
    return [str(n) for path in files(table) for n in pq.ParquetFile(path).read([column])[column].to_pylist()]


def kill(victim: str, driver: Driver, cluster: Cluster, node: RunningNode, broker: Broker) -> None:
    match victim:
        case "driver":
            driver.kill()
            driver.start()
        case "executor":
            cluster.kill_executor()
        case "node":
            node.kill()
            node.start()
        case _:
            broker.kill()
            broker.start()


@contextlib.contextmanager
def supervised(driver: Driver) -> Iterator[threading.Lock]:
    """Starts the driver again where it ends by itself: without its node for long, it gives up, and should."""
    over, lock = threading.Event(), threading.Lock()

    def look() -> None:
        while not over.wait(0.5):
            with lock:
                if driver.process is not None and driver.process.poll() is not None:
                    driver.start()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lock
    finally:
        over.set()
        thread.join()


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_no_record_is_lost_duplicated_or_reordered(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    dice = random.Random(seed)
    lake, state = tmp_path / "lake", tmp_path / "state"
    (tmp_path / "node").mkdir()
    with RunningNode(tmp_path / "node") as node, Broker(tmp_path, node.ready["tube_master"]) as broker:
        node.out("tube", "topic", "create", "chaos", "--partitions", "2")
        file = tmp_path / "p.yaml"
        master, mqtt = node.ready["tube_master"], f"mqtt://{node.ready['mqtt']}"
        file.write_text(FILE.format(master=master, broker=mqtt, lake=lake))
        small = ["spark.sql.shuffle.partitions=1", "spark.executor.memory=512m"]
        with Cluster(tmp_path) as cluster:
            options = [f"--state-dir={state}", f"--spark-master={cluster.url}"]
            driver = Driver(tmp_path, file, *options, *(word for text in small for word in ("--conf", text)))
            with Load(master, mqtt) as under_load, driver, supervised(driver) as lock:
                driver.await_event("batch", 1, sink="alarms")

                def batch_since(done: int) -> bool:
                    return any(event["event"] == "batch" for event in driver.events[done:])

                victims = [*VICTIMS, *(dice.choice(VICTIMS) for _ in range(ROUNDS - len(VICTIMS)))]
                dice.shuffle(victims)
                for victim in victims:
                    under_load.stop.wait(dice.uniform(*PAUSE_S))
                    done = len(driver.events)
                    with lock:
                        kill(victim, driver, cluster, node, broker)
                    # Let it come back, else the second kill hits what is not running.
                    until(partial(batch_since, done), f"a batch after the {victim} was killed")
                under_load.stop.set()
                until(under_load.sent, "everything sent to be acknowledged")
                wanted = under_load.acknowledged
                good = {name for name in wanted if int(name[1:]) % POISON}
                until(lambda: set(ids(lake / "rows", "_id")) >= good, "every record to be in the table")
                highest = {p: max(int(n[1:]) for n in good if int(n[1:]) % PLACES == p) for p in range(PLACES)}
                count = {p: sum(int(n[1:]) % PLACES == p for n in good) for p in range(PLACES)}
                until(
                    lambda: all(
                        under_load.alarms[f"chaos/p{p}"][-1:] == [(count[p], highest[p])] for p in range(PLACES)
                    ),
                    "the alarms to hold everything",
                )
                with lock:
                    driver.terminate()
                    assert driver.wait() == 0, driver.log.read_text()[-3000:]
                    driver.process = None
            rows, letters = ids(lake / "rows", "_id"), set(ids(lake / "dead", "id"))
            pipeline = load(file)
            accounts = reconcile(pipeline, state, source_count(pipeline, state))
    assert len(rows) == len(set(rows))
    assert set(rows) == good
    assert letters == wanted - good
    assert [(account.off, account.unknown) for account in accounts] == [((), ())] * 2
    for key, values in under_load.alarms.items():
        assert values == sorted(values), f"{key} went backwards: {values}"
    assert len(wanted) > 200
