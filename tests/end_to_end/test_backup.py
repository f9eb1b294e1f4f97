"""Backups of a running node: what was acknowledged before the point is in the restored node, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.producer import Producer
from tests.end_to_end.nodes import PENSTOCK, RunningNode, environment, wait_until

CONFIG = "rules: [{filter: 'plant/#', topic: plant}]\nstatestore: {extensions: [batch]}\n"
DEADLINE_S = 60


class Acknowledged:
    """What clients were told is stored, and when."""

    def __init__(self) -> None:
        self.times: dict[str, dict[str, float]] = {name: {} for name in ("keys", "session", "retained", "log", "rule")}
        self.stop = asyncio.Event()

    async def write(self, kind: str, send: Callable[[str], Awaitable[object]]) -> None:
        """Send numbered items one after the other until the end, and note the acknowledgement of each."""
        number = 0
        while not self.stop.is_set():
            name = f"{kind}-{number}"
            await send(name)
            self.times[kind][name] = time.time() * 1000
            number += 1
            # So that the queue of a session without a client, 10,000 messages, has room for all on a fast disk.
            await asyncio.sleep(0.01)

    def before(self, kind: str, point: float) -> set[str]:
        return {name for name, at in self.times[kind].items() if at < point}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def penstock(*args: str) -> str:
    """Standard output of a command that must succeed, without the address of a node."""
    done = subprocess.run(
        [*PENSTOCK, *args], env=environment(), capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def written_during_backups(node: RunningNode, backups: Path) -> tuple[Acknowledged, list[Path]]:
    """Two backups while clients write; what was acknowledged, and the backups."""
    acknowledged = Acknowledged()
    port = port_of(node.ready["mqtt"])
    async with MqttClient(port=port, client_id="away", session_expiry_s=3600, clean_start=False) as away:
        await away.subscribe("to-session", qos=1)
    async with contextlib.AsyncExitStack() as parts:
        client, writer = [await parts.enter_async_context(MqttClient(port=port)) for _ in range(2)]
        store = await parts.enter_async_context(StateStoreClient(writer))
        producer = await parts.enter_async_context(Producer(node.ready["tube_master"]))
        for n in range(300):
            await store.set(f"old-{n}", bytes(2000))
        writers = {
            "keys": lambda name: store.set(name, name),
            "session": lambda name: client.publish("to-session", name),
            "retained": lambda name: client.publish(f"retained/{name}", name, retain=True),
            "rule": lambda name: client.publish(f"plant/{name}", name),
            "log": lambda name: producer.send("events", name.encode()),
        }
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for kind, send in writers.items():
                group.create_task(acknowledged.write(kind, send))
            made = []
            for _ in range(2):
                # Slow, so that most of it is read while clients write.
                row = await asyncio.to_thread(node.rows, "backup", str(backups), "--max-rate", "600KiB")
                made.append(Path(row[0]["backup"]))
            acknowledged.stop.set()
    return acknowledged, made


async def found_in(node: RunningNode, wanted: dict[str, set[str]]) -> dict[str, set[str]]:
    """What a node has. Messages arrive one after the other, until all that are ``wanted`` have arrived."""
    port = port_of(node.ready["mqtt"])
    found: dict[str, set[str]] = {"session": set(), "retained": set()}
    async with MqttClient(port=port) as client, StateStoreClient(client) as store:
        found["keys"] = {key.decode() async for key in store.scan("keys-*")}
        async with client.subscription("retained/#") as stream, asyncio.timeout(DEADLINE_S):
            async for message in stream:
                found["retained"].add(message.payload.decode())
                if wanted["retained"] <= found["retained"]:
                    break
    everything = asyncio.Event()

    def arrived(message: Publish) -> None:
        found["session"].add(message.payload.decode())
        if wanted["session"] <= found["session"]:
            everything.set()

    if wanted["session"]:
        async with (
            MqttClient(port=port, client_id="away", session_expiry_s=3600, clean_start=False, on_message=arrived),
            asyncio.timeout(DEADLINE_S),
        ):
            await everything.wait()
    for kind, topic in (("log", "events"), ("rule", "plant")):
        rows = await asyncio.to_thread(node.rows, "tube", "consume", topic)
        found[kind] = {row["value"] for row in rows}
    return found


def test_everything_acknowledged_before_the_point_is_restored(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    backups = tmp_path / "backups"
    with RunningNode(tmp_path / "first", CONFIG) as node:
        node.out("tube", "topic", "create", "events")
        acknowledged, made = asyncio.run(written_during_backups(node, backups))
        node.kill()
    points = [json.loads((path / "manifest.json").read_text())["point_at"] for path in made]
    for number, (path, point) in enumerate(zip(made, points, strict=True)):
        directory = tmp_path / f"restored-{number}"
        directory.mkdir()
        penstock("restore", str(path), str(directory / "data"))
        expected = {kind: acknowledged.before(kind, point) for kind in acknowledged.times}
        assert all(len(names) > 5 for names in expected.values()), {kind: len(n) for kind, n in expected.items()}
        with RunningNode(directory, CONFIG) as restored:
            found = asyncio.run(found_in(restored, expected))
            assert restored.stop() == 0
        for kind, names in expected.items():
            assert names - found[kind] == set(), kind
            # Nothing of what came long after the point.
            assert found[kind] <= {f"{kind}-{n}" for n in range(len(names) + 200)}
        log = (directory / "node.log").read_text()
        assert "lost" not in log
        assert "quarantined" not in log


def test_a_killed_backup_leaves_the_node_and_the_earlier_backup(tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    with RunningNode(tmp_path) as node:
        node.out("kv", "set", "key", "--file", "-", stdin=b"x" * 200_000)
        node.out("backup", str(backups))
        (earlier,) = backups.glob("*/manifest.json")
        slow = [*PENSTOCK, "backup", str(backups), "--max-rate", "10KiB"]
        with subprocess.Popen(slow, env=node.environment, stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: list(backups.glob("*.partial")), "the backup did not begin")
            refused = node.penstock("backup", str(tmp_path / "other"))
            assert refused.returncode == 1
            assert b"another backup of this node is running" in refused.stderr
            process.kill()
        # The node notices the lost connection; it needs no restart.
        wait_until(lambda: node.penstock("backup", str(backups)).returncode == 0, "backups are refused")
        assert not list(backups.glob("*.partial"))
        assert len(list(backups.glob("*/manifest.json"))) == 2
        assert node.out("fsck", str(earlier.parent)).startswith(f"{earlier.parent}: intact")
        assert len(node.out("kv", "get", "key")) == 200_000
        assert node.stop() == 0


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.nightly), signal.SIGTERM])
def test_a_node_that_ends_during_a_backup_leaves_no_incomplete_one(tmp_path: Path, number: signal.Signals) -> None:
    backups = tmp_path / "backups"
    with RunningNode(tmp_path) as node:
        node.out("kv", "set", "key", "--file", "-", stdin=b"x" * 200_000)
        slow = [*PENSTOCK, "backup", str(backups), "--max-rate", "10KiB"]
        with subprocess.Popen(slow, env=node.environment, stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: list(backups.glob("*.partial")), "the backup did not begin")
            assert node.stop(number) == (0 if number == signal.SIGTERM else -number)
            assert process.stderr is not None
            assert "the backup is not complete" in process.stderr.read()
            assert process.wait(DEADLINE_S) == 1
        assert list(backups.iterdir()) == [backups / "lock"]
        node.start()
        assert len(node.out("kv", "get", "key")) == 200_000
        data_dir = node.ready["data_dir"]
        assert node.stop() == 0
    # A stopped node is backed up by its directory.
    assert "everything acknowledged" in penstock("backup", str(backups), "--data-dir", data_dir)
    assert f"penstock up --data-dir {tmp_path / 'new'}" in penstock("restore", str(backups), str(tmp_path / "new"))
    assert "intact" in penstock("fsck", str(tmp_path / "new"))


def test_a_backup_needs_a_user_who_may_administer(tmp_path: Path) -> None:
    with RunningNode(tmp_path) as node:
        (tmp_path / "wrong").write_text("guess\n")
        refused = node.penstock("backup", str(tmp_path / "b"), "--admin-token-file", str(tmp_path / "wrong"))
        assert refused.returncode == 1
        assert b"is not the administration token" in refused.stderr
        node.out("backup", str(tmp_path / "b"))
        (entry,) = node.rows("audit", "list")
        assert (entry["method"], entry["credential"]) == ("backup", "administration token")
