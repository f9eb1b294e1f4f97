"""Drivers and PostgreSQL killed at random under load: rows are in the tables once, with the values of their times."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from pathlib import Path

import pytest

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.spec.loader import load
from penstock.tube.record import Record
from tests.postgresql import running_postgres
from tests.spark.node import CAPTURE_TOPIC, Node
from tests.spark.processes import Driver, until

FILE = """\
name: {name}
source: {{topics: ["{name}"], master: "{master}", options: {{maxOffsetsPerTrigger: 300}}}}
statestore: {{broker: "{broker}"}}
trigger: 100 milliseconds
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL, line STRING NOT NULL, at TIMESTAMP NOT NULL"}}
  - name: made
    enrich:
      key: "{name}/{{line}}"
      as: recipe
      schema: id INT
      missing: fail
      as_of: {{time: at, topic: {capture}}}
  - name: named
    map: {{compute: {{recipe_id: recipe.id}}, drop: [recipe]}}
sinks:
  - name: history
    postgresql: {{url: "{url}", password_file: "{password}", table: history, create: true}}
  - name: newest
    postgresql:
      url: "{url}"
      password_file: "{password}"
      table: newest
      mode: upsert
      key: [line]
      order_by: n
      create: true
"""
LINES = 5
ROUNDS = int(os.environ.get("PENSTOCK_CHAOS_ROUNDS", "8"))


class Plant:
    """Changes recipes and sends rows; knows which recipe each row must get."""

    def __init__(self, node: Node, name: str, dice: random.Random) -> None:
        self.rows: list[tuple[int, str, int]] = []
        self._node = node
        self._name = name
        self._dice = dice
        self._recipes: dict[str, list[tuple[datetime, int]]] = {}

    def change(self) -> None:
        """Change the recipe of each line, and wait until the capture topic has it."""
        before = self._node.capture.stats.captured
        recipes = {f"line{n}": self._dice.randrange(1_000_000) for n in range(LINES)}
        values = {f"{self._name}/{line}": json.dumps({"id": recipe}).encode() for line, recipe in recipes.items()}
        self._node.set_keys(values)
        self._node.wait_captured(before + LINES)
        time.sleep(0.005)
        now = datetime.now(UTC)
        time.sleep(0.005)
        for line, recipe in recipes.items():
            self._recipes.setdefault(line, []).append((now, recipe))

    def send(self, count: int) -> None:
        """Send rows with the times of any change so far."""
        records = []
        for n in range(len(self.rows), len(self.rows) + count):
            line = f"line{n % LINES}"
            at, recipe = self._dice.choice(self._recipes[line])
            self.rows.append((n, line, recipe))
            body = {"n": n, "line": line, "at": at.isoformat()}
            records.append((n % 2, Record(json.dumps(body).encode(), id=f"m{n}")))
        self._node.append(self._name, records)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_killed_drivers_and_servers_lose_and_repeat_nothing(
    node: Node, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    dice, pause, name = random.Random(seed), threading.Event(), new_topic(2)
    plant = Plant(node, name, dice)
    with running_postgres() as server:
        file, state = tmp_path / "p.yaml", tmp_path / "state"
        text = FILE.format(
            name=name,
            master=node.master,
            broker=node.mqtt,
            capture=CAPTURE_TOPIC,
            url=server.url,
            password=server.password_file,
        )
        file.write_text(text)
        plant.change()
        with Driver(tmp_path, file, f"--state-dir={state}", "--spark-master=local[2]") as driver:
            kills = {"driver": 0, "server": 0}
            for number in range(ROUNDS):
                done = len(driver.events)
                plant.send(dice.randint(300, 1_500))
                plant.change()
                plant.send(dice.randint(1, 300))
                if number % 2:
                    # Otherwise the driver may still be starting.
                    until(partial(driver.has_batch, done), "a batch after the last kill")
                pause.wait(dice.uniform(0.0, 3.0))
                victim = "driver" if number % 4 < 2 else "server"
                kills[victim] += 1
                if victim == "driver":
                    driver.kill()
                    driver.start()
                else:
                    server.stop("immediate")
                    pause.wait(dice.uniform(0.0, 2.0))
                    server.start()
            plant.send(100)
            until(lambda: server.rows("SELECT count(*) FROM history") == [(len(plant.rows),)], "all rows")
            last = sorted({row[1]: row for row in plant.rows}.values(), key=itemgetter(1))
            newest = "SELECT n, line, recipe_id FROM newest ORDER BY line"
            until(lambda: server.rows(newest) == last, "the newest row of each line")
            driver.terminate()
            assert driver.wait() == 0, driver.log.read_text()[-3000:]
            driver.process = None
        assert server.rows("SELECT n, line, recipe_id FROM history ORDER BY n") == plant.rows
        pipeline = load(file)
        accounts = reconcile(pipeline, state, source_count(pipeline, state))
        assert [(account.off, account.unknown) for account in accounts] == [((), ())] * 2
        print(f"{len(plant.rows)} rows, kills: {kills}")
