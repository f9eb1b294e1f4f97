"""A node whose system clock is set while it runs: what clients see, what /readyz says, and how it is repaired."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.errors import PenstockError
from penstock.mqtt.client import MqttClient
from penstock.node.node import Node
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient
from tests.unit.node.test_node import config, http

TEN_YEARS_S = 10 * 365 * 86_400


class SystemClock:
    """The system clock of the node, ``error_s`` wrong; clients have a right one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error_s = 0
        self._right = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: self._right() + self.error_s * 10**9)
        monkeypatch.setattr(time, "time", lambda: time.time_ns() / 10**9)

    def right_ms(self) -> int:
        return self._right() // 1_000_000


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> SystemClock:
    return SystemClock(monkeypatch)


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*args: str) -> tuple[int, str, str]:
        status = main(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


async def readyz(address: str, until: Callable[[dict[str, list[str]]], bool]) -> tuple[int, dict[str, list[str]]]:
    """The first answer that is as expected."""
    deadline = time.monotonic() + 60
    while True:
        status, text = await http(address, "/readyz")
        body = json.loads(text)
        if until(body) or time.monotonic() > deadline:
            return status, body


async def metric(address: str, name: str) -> float:
    _, text = await http(address, "/metrics")
    (line,) = [line for line in text.splitlines() if line.startswith(f"penstock_{name} ")]
    return float(line.split()[1])


async def test_ten_years_ahead_for_a_moment(tmp_path: Path, system: SystemClock) -> None:
    node = Node(config(tmp_path))
    ready = await node.start()
    try:
        mqtt = MqttClient(*parse_address(ready.mqtt), client_id="c")
        async with mqtt, StateStoreClient(mqtt, clock=system.right_ms, timeout_s=60) as store:
            before = await store.set(b"k", b"1")
            system.error_s = TEN_YEARS_S
            during = await store.set(b"k", b"2")
            status, body = await readyz(ready.http, lambda body: bool(body["warnings"]))
            assert status == 200
            (warning,) = body["warnings"]
            assert "set ahead by 3153" in warning
            assert "correct it" in warning
            assert await metric(ready.http, "node_clock_offset_seconds") == pytest.approx(TEN_YEARS_S, abs=60)
            system.error_s = 0
            after = await store.set(b"k", b"3")
            assert before.version is not None
            assert during.version is not None
            assert after.version is not None
            assert before.version < during.version < after.version
            assert after.version.wall_ms <= system.right_ms() + 1000
            status, body = await readyz(ready.http, lambda body: not body["warnings"])
            assert (status, body["warnings"]) == (200, [])
            assert await metric(ready.http, "statestore_version_lead_seconds") < 1
    finally:
        await node.close()


async def test_versions_in_the_future_are_reported_and_repaired(
    tmp_path: Path, system: SystemClock, penstock: Command
) -> None:
    """As a node leaves them that was started while the clock was ten years ahead."""
    captured = {"capture_topic": "changes"}
    system.error_s = TEN_YEARS_S
    node = Node(config(tmp_path, statestore=captured))
    ready = await node.start()
    mqtt = MqttClient(*parse_address(ready.mqtt), client_id="c")
    async with mqtt, StateStoreClient(mqtt, timeout_s=60) as store:  # its clock is as wrong
        lock = (await store.set(b"lock", b"me")).version
        assert lock is not None
        await store.set(b"k", b"1", fencing_token=lock)
    await node.close()
    system.error_s = 0

    node = Node(config(tmp_path, statestore=captured))
    ready = await node.start()
    status, body = await readyz(ready.http, lambda body: bool(body["reasons"]))
    assert status == 503
    (reason,) = body["reasons"]
    assert "ahead of the clock" in reason
    assert "stop the node and run `penstock statestore repair`" in reason
    assert await metric(ready.http, "statestore_version_lead_seconds") == pytest.approx(TEN_YEARS_S, abs=60)
    status, _, err = penstock("statestore", "repair", "--data-dir", str(tmp_path), "--apply")
    assert (status, "is in use by" in err) == (1, True)
    await node.close()

    status, out, _ = penstock("statestore", "repair", "--data-dir", str(tmp_path))
    assert status == 0
    assert "2 versions ahead of the clock (2 keys" in out
    assert "repeat with --apply" in out
    _, out, _ = penstock("statestore", "repair", "--data-dir", str(tmp_path), "--apply", "--json")
    row = json.loads(out)
    assert (row["applied"], row["versions"], row["keys"]) == (True, 2, 2)
    _, out, _ = penstock("statestore", "repair", "--data-dir", str(tmp_path), "--apply")
    assert "nothing to repair" in out

    node = Node(config(tmp_path, statestore=captured))
    ready = await node.start()
    try:
        assert (await readyz(ready.http, lambda body: not body["reasons"]))[0] == 200
        mqtt = MqttClient(*parse_address(ready.mqtt), client_id="c")
        async with mqtt, StateStoreClient(mqtt, clock=system.right_ms, timeout_s=60) as store:
            assert await store.get(b"k") is not None
            with pytest.raises(PenstockError, match="fencing"):
                await store.set(b"k", b"old", fencing_token=lock)
            renewed = (await store.set(b"lock", b"me")).version
            assert renewed is not None
            first = (await store.set(b"k", b"2", fencing_token=renewed)).version
            second = (await store.set(b"k", b"3", fencing_token=renewed)).version
            assert first is not None
            assert second is not None
            assert renewed < first < second
            deadline = time.monotonic() + 60
            name = 'capture_captured_changes_total{topic="changes"}'
            while await metric(ready.http, name) < 3 and time.monotonic() < deadline:
                pass
            assert await metric(ready.http, name) >= 3, "the versions of its records are greater, and it goes on"
    finally:
        await node.close()


async def test_repair_refuses_a_missing_directory_and_a_wrong_clock(
    tmp_path: Path, system: SystemClock, penstock: Command
) -> None:
    status, _, err = penstock("statestore", "repair", "--data-dir", str(tmp_path / "none"))
    assert (status, "has no format.json" in err) == (1, True)
    assert not (tmp_path / "none").exists()
    system.error_s = -time.time_ns() // 10**9 + 100
    status, _, err = penstock("statestore", "repair", "--data-dir", str(tmp_path))
    assert (status, "the system clock shows 1970" in err) == (1, True)


@pytest.mark.parametrize("error_s", [-3600, TEN_YEARS_S])
async def test_rates_and_uptime_do_not_depend_on_the_clock(tmp_path: Path, system: SystemClock, error_s: int) -> None:
    node = Node(config(tmp_path))
    ready = await node.start()

    async def api(path: str, reached: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(60):
            while not reached(found := json.loads((await http(ready.http, f"/api/v1/{path}"))[1])):
                await asyncio.sleep(0.02)
        return found

    try:
        async with MqttClient(*parse_address(ready.mqtt)) as mqtt:
            await mqtt.publish("t", b"before")
            before = await api("history", lambda now: sum(now["series"]["mqtt_in"]) > 0)
            system.error_s = error_s
            await mqtt.publish("t", b"after")
            samples = len(before["at"])
            after = await api("history", lambda now: len(now["at"]) > samples)
        around = after["series"]["mqtt_in"][samples - 1 : samples + 1]
        assert all(around), "a rate covers several seconds"
        assert after["at"] == sorted(after["at"])
        assert abs(after["at"][-1] - time.time() * 1000) < 60_000
        assert 0 < (await api("overview", lambda _: True))["node"]["uptime_s"] < 600
    finally:
        await node.close()


async def test_sessions_outlive_a_clock_that_is_set(tmp_path: Path, system: SystemClock) -> None:
    """A machine without a battery clock starts in 1970; then its clock is set."""
    system.error_s = -time.time_ns() // 10**9 + 100
    node = Node(config(tmp_path))
    ready = await node.start()
    address = parse_address(ready.mqtt)
    async with MqttClient(*address, client_id="s", session_expiry_s=3600) as mqtt:
        await mqtt.subscribe("t", qos=1)
    system.error_s = 0
    await readyz(ready.http, lambda _: abs(node.clock.offset_ms) < 1000)
    async with MqttClient(*address, client_id="p") as mqtt:
        await mqtt.publish("t", b"kept", qos=1)
    await node.close()
    node = Node(config(tmp_path))
    ready = await node.start()
    try:
        async with MqttClient(
            *parse_address(ready.mqtt), client_id="s", clean_start=False, session_expiry_s=3600
        ) as mqtt:
            assert mqtt.server.session_present
    finally:
        await node.close()
