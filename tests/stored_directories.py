"""Data directories as an earlier version wrote them: how they are written, and what a client must find in them.

``python -m tests.stored_directories NAME`` writes two archives and a list of their content below
``tests/vectors/data-directories``: ``NAME-stopped.tar.xz`` (SIGTERM), ``NAME-killed.tar.xz`` (SIGKILL directly after
the last acknowledgement) and ``NAME.json``. Write them once per change of a stored format, before the change; archives
that exist are never written again.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Packet, Publish, PubRec, Subscribe, Subscription
from penstock.mqtt.codec.properties import Properties
from tests.end_to_end.nodes import DEADLINE_S, PENSTOCK, RunningNode

__all__ = ["ARCHIVES", "CONFIG", "PIPELINE", "MqttConnection", "extract", "names", "pipeline", "reading"]

ARCHIVES = Path(__file__).parent / "vectors" / "data-directories"

NEVER_MS = 100 * 365 * 24 * 3_600_000
"""A time to live of a century: the test must find the key."""

CONFIG = """\
tube:
  topics:
    telemetry: {partitions: 2, retention: 900000h}
rules:
  - filter: plant/#
    topic: telemetry
    key: "{topic}"
"""
"""Records are kept for a century: the test must find them."""

PIPELINE = """\
name: stored
source: {{topics: [telemetry], master: "{master}"}}
statestore: {{broker: "mqtt://{broker}"}}
dead_letters: {{path: lake/dead}}
steps:
  - name: parsed
    parse: {{schema: "machine STRING NOT NULL, at TIMESTAMP NOT NULL, celsius DOUBLE NOT NULL"}}
  - name: once
    dedupe: {{within: 1 day}}
  - name: hours
    from: parsed
    window:
      time: at
      duration: 1 hour
      watermark: 1 hour
      emit: closed
      by: [machine]
      aggregates: {{readings: count(*)}}
sinks:
  - name: rows
    from: once
    table: {{path: lake/rows}}
  - name: closed
    from: hours
    table: {{path: lake/closed}}
"""


class MqttConnection:
    """A blocking MQTT 5 connection that sends exactly the packets it is given, and acknowledges nothing by itself."""

    def __init__(self, address: str, client_id: str) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        self._decoder = Decoder(role=Role.CLIENT)
        self._packets = self._receive()
        never = Properties(session_expiry_interval=0xFFFF_FFFF)
        self.send(Connect(client_id, clean_start=False, properties=never))
        self.connack: Any = self.next()

    def __enter__(self) -> MqttConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, packet: Packet) -> None:
        self._socket.sendall(encode(packet))

    def next(self) -> Packet:
        """The next packet of the broker."""
        return next(self._packets)

    def _receive(self) -> Iterator[Packet]:
        while data := self._socket.recv(65_536):
            yield from self._decoder.feed(data)


def names() -> list[str]:
    """Every archive, without its suffix."""
    return sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz"))


def extract(name: str, target: Path) -> dict[str, Any]:
    """Extract an archive into ``target``; what the clients that wrote it had been told."""
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    version = name.rsplit("-", 1)[0]
    content: dict[str, Any] = json.loads((ARCHIVES / f"{version}.json").read_text(encoding="utf-8"))
    return dict(content[name])


def pipeline(directory: Path, node: RunningNode, *args: str) -> str:
    """Standard output of a ``penstock pipeline`` command about :data:`PIPELINE`, which must succeed."""
    (directory / "pipeline.yaml").write_text(
        PIPELINE.format(master=node.ready["tube_master"], broker=node.ready["mqtt"]), encoding="utf-8"
    )
    command = [*PENSTOCK, "pipeline", *args, "pipeline.yaml", "--state-dir", "state"]
    done = subprocess.run(
        command, cwd=directory, env=node.environment, capture_output=True, check=False, timeout=300, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reading(number: int) -> str:
    """The payload of a measurement; three of four fall into the same hour."""
    return json.dumps(
        {"machine": f"m{number % 2}", "at": f"2024-05-01T0{number // 4}:1{number % 4}:00Z", "celsius": number}
    )


def _write(directory: Path, node: RunningNode, *, with_pipeline: bool) -> dict[str, Any]:
    """Give every part of the node something to keep; what the clients were told."""
    told: dict[str, Any] = {}
    # State store: texts, bytes, fencing tokens, an expiry, a deleted key.
    node.out("kv", "set", "deleted", "x")
    node.out("kv", "del", "deleted")
    token = node.out("kv", "set", "lock", "holder-1").strip()
    newer = node.out("kv", "set", "lock", "holder-2").strip()
    node.out("kv", "set", "guarded", "b", "--fencing-token", newer)
    node.out("kv", "set", "text", "42")
    node.out("kv", "set", "expires", "later", "--ttl", f"{NEVER_MS}ms")
    node.out("kv", "set", "bytes", stdin=bytes(range(256)))
    told["tokens"] = [token, newer]
    told["keys"] = {key: node.rows("kv", "get", key)[0] for key in ("lock", "guarded", "text", "expires", "bytes")}
    # MQTT: a session with a QoS 2 exchange half done and messages waiting, a received QoS 2 message that was not
    # released, a shared subscription, a retained message with properties.
    with MqttConnection(node.ready["mqtt"], "half-done") as half:
        half.send(Subscribe(1, [Subscription("queued/#", 2), Subscription("$share/group/shared/#", 1)]))
        half.next()
        node.out("mqtt", "pub", "queued/0", "first", "--qos", "2")
        publish: Any = half.next()
        half.send(PubRec(publish.packet_id))
        half.next()  # PUBREL: from here on the broker waits for PUBCOMP
        told["released"] = publish.packet_id
        half.send(Publish("plant/unreleased", b"once", qos=2, packet_id=77))
        half.next()
    for number in (1, 2):
        node.out("mqtt", "pub", f"queued/{number}", f"waiting {number}", "--qos", str(number), "-p", "site=berlin")
    node.out("mqtt", "pub", "shared/1", "waiting for the group")
    node.out("mqtt", "pub", "kept/setpoint", "21.5", "--retain", "--content-type", "text/plain", "-p", "site=berlin")
    # TubeMQ: records of a rule and of a producer, a group that read some of them.
    for number in range(12):
        node.out("mqtt", "pub", "plant/telemetry", reading(number))
    node.out("tube", "topic", "create", "orders", "--partitions", "1", "--retention", "7d")
    node.out("tube", "produce", "telemetry", "not JSON", "--key", "k", "--header", "line=3", "--partition", "1")
    told["records"] = node.rows("tube", "consume", "telemetry")
    told["read"] = node.rows("tube", "consume", "telemetry", "--group", "reader", "--count", "5")
    if with_pipeline:
        pipeline(directory, node, "run", "--once")
    return told


def _archive(directory: Path, target: Path) -> None:
    """Pack what the node and the pipeline stored; sparse files compress well."""
    with tarfile.open(target, "x:xz", preset=9) as archive:
        for name in ("data", "state", "lake"):
            if (directory / name).exists():
                archive.add(directory / name, arcname=name)


def write(version: str) -> None:
    """Write both archives of ``version`` and the list of their content."""
    content = {}
    for end in ("stopped", "killed"):
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            with RunningNode(directory, CONFIG) as node:
                content[f"{version}-{end}"] = _write(directory, node, with_pipeline=end == "stopped")
                if end == "stopped":
                    assert node.stop() == 0
                else:
                    node.kill()
            _archive(directory, ARCHIVES / f"{version}-{end}.tar.xz")
    text = json.dumps(content, indent=1, sort_keys=True)
    (ARCHIVES / f"{version}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.umask(0o022)
    write(sys.argv[1])
