"""A node, and a TubeMQ broker in its own process on the same machine: each fails and restarts alone."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.tube.blocking import Producer
from tests.end_to_end.nodes import DEADLINE_S, PENSTOCK, RunningNode, environment, lines_of

RULES = 'rules: [{filter: "plant/#", topic: plant}]\n'
LASTING = "tube: {limits: {broker_reconnect_ms: 3600000}}\n"
"""The master does not forget a broker that was killed, however long a command takes on a busy machine."""


@contextmanager
def broker(node: RunningNode) -> Iterator[subprocess.Popen[str]]:
    """Broker 2 of the node's master, which has registered."""
    command = [*PENSTOCK, "tube", "broker", "run", "--broker-id", "2", "--json", "--log-level", "warning"]
    command += ["--tube-master", node.ready["tube_master"], "--data-dir", str(node.directory / "broker-2")]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert json.loads(next(lines_of(process)))["broker_id"] == 2
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()


def test_each_process_fails_alone(tmp_path: Path) -> None:
    node = RunningNode(tmp_path, RULES + LASTING)
    with node:
        with broker(node) as process:
            node.out("tube", "topic", "create", "events", "--broker-id", "2")
            assert [row["broker_id"] for row in node.rows("tube", "produce", "events", "one")] == [2]
            process.kill()
            process.wait(DEADLINE_S)
            # Without the broker: the state store, MQTT and the rule, whose records the node's own broker has.
            node.out("kv", "set", "key", "value")
            node.out("mqtt", "pub", "plant/flow", "7", "--qos", "1")
            # Topics of the configuration are on both brokers: the command reports the one that is down, and fails.
            done = node.penstock("tube", "consume", "plant", "--from", "earliest", "--raw")
            assert (done.returncode, done.stdout.strip()) == (1, b"7")
            assert b"broker 2" in done.stderr
        with broker(node) as process, Producer(node.ready["tube_master"]) as producer:
            assert node.out("tube", "consume", "events", "--from", "earliest", "--raw").strip() == "one"
            assert producer.send("events", b"two").broker_id == 2
            node.kill()
            assert producer.send("events", b"three").broker_id == 2  # without the master
            node.start()
            assert producer.send("events", b"four").broker_id == 2
            assert node.rows("kv", "get", "key")[0]["value"] == "value"
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        with broker(node):
            found = node.out("tube", "consume", "events", "--from", "earliest", "--raw").split()
            assert sorted(found) == ["four", "one", "three", "two"]
        assert node.stop() == 0
