"""The node as a process: ready line, signals, what stops a start, and that kill -9 loses nothing acknowledged."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

import penstock
from tests.end_to_end.nodes import LISTENERS, PENSTOCK, RunningNode, environment, lines_of, wait_until


def test_one_ready_line_with_the_bound_addresses(tmp_path: Path) -> None:
    with RunningNode(tmp_path) as node:
        assert list(node.ready) == [
            "event", "version", "pid", "data_dir", "durability", "mqtt", "tube_master", "tube_broker",
            "tube_broker_http", "http", "admin_token_file", "listeners",
        ]  # fmt: skip
        assert node.process is not None
        assert node.ready["event"] == "ready"
        assert node.ready["version"] == penstock.__version__
        assert node.ready["pid"] == node.process.pid
        assert node.ready["data_dir"] == str(tmp_path / "data")
        assert node.ready["durability"] == "durable"
        for name in LISTENERS:
            host, _, port = node.ready[name.replace("-", "_")].rpartition(":")
            socket.create_connection((host, int(port)), timeout=60).close()
        with urllib.request.urlopen(f"http://{node.ready['http']}/readyz", timeout=60) as answer:
            assert json.load(answer) == {"ready": True, "reasons": [], "warnings": []}


def test_sighup_reads_policies_again(tmp_path: Path) -> None:
    """A good file counts from then on, a broken one keeps the good one, and /readyz says so."""

    def warnings() -> list[str]:
        with urllib.request.urlopen(f"http://{node.ready['http']}/readyz", timeout=60) as answer:
            found: list[str] = json.load(answer)["warnings"]
            return found

    policies = tmp_path / "policies.yaml"
    policies.write_text("rules: []\n")
    with RunningNode(tmp_path, "security: {policies: policies.yaml}\n") as node:
        assert node.process is not None
        pub = [*PENSTOCK, "mqtt", "pub", "--broker", f"mqtt://{node.ready['mqtt']}", "a", "x"]

        def refused() -> bool:
            done = subprocess.run(pub, env=environment(), capture_output=True, text=True, timeout=60)
            assert done.returncode == 0 or "0x87" in done.stderr, done.stderr
            return done.returncode != 0

        assert refused()
        policies.write_text(
            "rules: [{principals: {clientIds: ['*']}, brokerResources: [{method: Connect},"
            " {method: Publish, topics: ['#']}]}]\n"
        )
        node.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "reloaded" in node.log.read_text(), "the policies were not read again")
        assert not refused()
        policies.write_text("rules: 5\n")
        node.process.send_signal(signal.SIGHUP)
        wait_until(lambda: bool(warnings()), "nothing says that the file is broken")
        assert "policies.yaml:1:8" in warnings()[0]
        assert not refused()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    with RunningNode(tmp_path) as node:
        # An open connection must not hold it up.
        host, _, port = node.ready["mqtt"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60):
            assert node.stop(number) == 0
    log = node.log.read_text()
    assert f"draining signal={number.name}" in log
    assert "stopped" in log
    assert "Traceback" not in log


def test_the_banner_for_people(tmp_path: Path) -> None:
    flags = [part for name in LISTENERS for part in (f"--{name}", "127.0.0.1:0")]
    with subprocess.Popen(
        [*PENSTOCK, "up", "--data-dir", "d", *flags],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            lines = lines_of(process)
            assert next(lines).startswith(f"penstock {penstock.__version__} is ready")
            text = [next(lines) for _ in range(8)]
            assert any(str(tmp_path / "d") in line for line in text)
            assert any("durable" in line for line in text)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_startup_errors_state_failure_cause_and_remedy(tmp_path: Path) -> None:
    with RunningNode(tmp_path) as node:

        def second(*flags: str) -> tuple[int, str]:
            done = subprocess.run(
                [*PENSTOCK, "up", *flags], cwd=tmp_path, env=environment(), capture_output=True, timeout=60
            )
            assert done.stdout == b""
            return done.returncode, done.stderr.decode()

        status, text = second()
        assert status == 1
        assert f"data directory {tmp_path / 'data'} is in use by process {node.ready['pid']}" in text
        assert "  why: " in text
        assert "  hint: " in text
        options = ("mqtt", "tube-master", "tube-broker", "tube-broker-http")
        any_port = [argument for option in options for argument in (f"--{option}", "127.0.0.1:0")]
        status, text = second("--data-dir", str(tmp_path / "other"), *any_port, "--http", node.ready["http"])
        assert status == 1
        assert f"http: cannot listen on {node.ready['http']}" in text
        assert "another process listens there" in text
        (tmp_path / "file").write_text("")
        status, text = second("--data-dir", str(tmp_path / "file" / "d"))
        assert status == 1
        assert f"data directory {tmp_path / 'file' / 'd'} cannot be used" in text
        assert f"  why: {tmp_path / 'file'} is a file" in text
        (tmp_path / "bad.yaml").write_text("mqtt:\n  bnd: 127.0.0.1:1\n")
        status, text = second("--config", "bad.yaml")
        assert status == 2
        assert "bad.yaml:2:3: option 'mqtt.bnd': is not known\n" in text
        assert "did you mean 'bind'?" in text


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    config = "rules: [{filter: 'plants/#', topic: water}]\n"
    with RunningNode(tmp_path, config) as node:
        versions = {}
        for n in range(3):
            versions[f"key-{n}"] = node.rows("kv", "set", f"key-{n}", f"value-{n}")[0]["version"]
        sent = node.rows("tube", "produce", "water", stdin=b"".join(b"line %d\n" % n for n in range(500)))
        assert len(sent) == 500
        before = node.ready
        node.kill()
        node.start()
        assert {**node.ready, "pid": 0} == {**before, "pid": 0}
        for key, version in versions.items():
            entry = node.rows("kv", "get", key)[0]
            assert (entry["value"], entry["version"]) == (key.replace("key", "value"), version)
        found = node.rows("tube", "consume", "water")
        assert {(row["partition"], row["offset"]) for row in found} >= {(r["partition"], r["offset"]) for r in sent}
        assert sorted(row["value"] for row in found) == sorted(f"line {n}" for n in range(500))
        # Versions go on from where they were.
        assert node.rows("kv", "set", "key-0", "new")[0]["version"] > versions["key-0"]
        assert node.stop() == 0


def test_the_lock_of_a_killed_node_does_not_stop_the_next(tmp_path: Path) -> None:
    with RunningNode(tmp_path) as node:
        pid = node.ready["pid"]
        node.kill()
        assert (tmp_path / "data" / "lock").read_text() == f"{pid}\n"
        node.start()
        assert (tmp_path / "data" / "lock").read_text() == f"{node.ready['pid']}\n"
        assert not Path(f"/proc/{pid}").exists() or os.getpid() != pid
