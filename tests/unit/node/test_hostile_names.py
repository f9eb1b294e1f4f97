"""Names that clients choose are data: none becomes a file, a label of a metric, or a line of the log."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import RefusedError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.properties import Properties
from penstock.node.node import Node
from penstock.runtime.observability.logs import TextFormatter
from penstock.statestore.client.client import StateStoreClient
from tests.unit.node.test_node import config, http
from tests.unit.node.test_security import put_user

EVIL = "../../evil\x1b[2J\n2026-01-01T00:00:00.000Z info    penstock: ready"
"""Leaves a directory, clears a terminal, and looks like a line of the log."""


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that the node logs, as it is written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter())
    logger = logging.getLogger("penstock")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_client_with_hostile_names(tmp_path: Path, log: io.StringIO) -> None:
    put_user(tmp_path / "passwords", "ann", b"secret")
    node = Node(config(tmp_path / "data", security={"passwords": str(tmp_path / "passwords")}))
    ready = await node.start()
    host, _, port = ready.mqtt.rpartition(":")
    try:
        with pytest.raises(RefusedError):
            async with MqttClient(host, int(port), client_id=EVIL, username=EVIL, password="x", reconnect=False):
                pass
        client = MqttClient(
            host, int(port), client_id=EVIL, username="ann", password="secret", session_expiry_s=600, reconnect=False
        )
        async with client:
            await client.subscribe(f"{EVIL}/+", qos=1)
            await client.publish(EVIL, b"x", qos=1, retain=True, properties=Properties(user_properties=[(EVIL, EVIL)]))
        async with (
            MqttClient(host, int(port), client_id="../k", username="ann", password="secret") as other,
            StateStoreClient(other) as store,
        ):
            await store.set(EVIL, b"v")
        await http(ready.http, "/%0d%0apenstock%3a%20ready")
        page = (await http(ready.http, "/metrics"))[1]
    finally:
        await node.close()
    assert "evil" not in page
    names = [name for _, directories, files in os.walk(tmp_path) for name in (*directories, *files)]
    assert {"data", "passwords", "mqtt", "statestore"} <= set(names)
    assert [name for name in names if "evil" in name or not re.fullmatch(r"[\w.-]+", name)] == []
    lines = log.getvalue().split("\n")
    assert any("evil" in line for line in lines), "the refusal is logged"
    stamp = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (debug|info|warning|error) +[\w.]+: |  |$")
    assert [line for line in lines if not stamp.match(line)] == []
    assert not any(line.startswith("2026-01-01") or "\x1b" in line for line in lines)
